// kernels/ptx/pack.cuh for emulate.h.
#pragma once
#include "host_device/convert.h"

namespace plait::ptx {

template <Dtype kDtype>
unsigned pack2(float low, float high) {
  using T = Storage<kDtype>;
  return static_cast<unsigned>(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}

}  // namespace plait::ptx
