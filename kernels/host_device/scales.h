// Where the scales of quantised K and V go (value = stored number * scale): K's into the logits and
// V's into the output, so that no element of K or V is multiplied. A row transform, however, must
// see the values: rows are multiplied in front of it, and nothing is left for logits or output.
#pragma once
#include "host_device/config.h"
#include "host_device/convert.h"
#include "host_device/variant.h"

namespace plait {

// What q . k is multiplied with.
template <class V, Dtype kDtypeKv>
PLAIT_HD float logit_scale(const Params& params) {
  constexpr bool kFolded = is_fp8(kDtypeKv) && !VariantTraits<V>::kHasKeyTransform;
  return kFolded ? params.sm_scale * params.k_scale : params.sm_scale;
}
// What the normalised output is multiplied with.
template <class V, Dtype kDtypeKv>
PLAIT_HD float output_scale(const Params& params) {
  constexpr bool kFolded = is_fp8(kDtypeKv) && !VariantTraits<V>::kHasValueTransform;
  return kFolded ? params.v_scale : 1.0f;
}
// A row of stored numbers of K or V becomes values, in front of a transform.
template <Dtype kDtypeKv, class Row>
PLAIT_HD void dequantise(Row& row, float scale) {
  if constexpr (is_fp8(kDtypeKv)) row.map([scale](int, float x) { return x * scale; });
}

}  // namespace plait
