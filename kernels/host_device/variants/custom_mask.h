// Custom mask bits: no functor, only the flag that compiles their look-up into a kernel. The bits
// come with the plan (TokenMask, mask_bits.h).
#pragma once
#include "host_device/variant.h"

namespace plait {

struct CustomMask {
  struct Params {};
  static constexpr bool kCustomMask = true;
};

}  // namespace plait
