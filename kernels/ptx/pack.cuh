// Two 16-bit floats in one register, as fragments hold them.
// PTX manual: "Data Movement and Conversion Instructions: cvt".
#pragma once
#include "host_device/base.h"

namespace plait::ptx {

// Two floats as one register of two 16-bit elements, rounded to nearest even.
template <Dtype kDtype>
PLAIT_DEVICE unsigned pack2(float low, float high) {
  unsigned packed;
  if constexpr (kDtype == Dtype::kBfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

}  // namespace plait::ptx
