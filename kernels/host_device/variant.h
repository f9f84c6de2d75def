// An attention variant: up to six functors written once and compiled for every executor, a flag,
// and typed parameters. Beside the code, Visibility says as data which keys a query sees.
// Source: FlashInfer (Ye et al., 2025, arXiv:2501.01005), "Attention variants"; the functors' names
// follow it.
//
// A variant is a struct with any of these static members; the presence of a name is what counts:
//   template <class Row> void query_transform(const Params&, const RowContext&, Row&);
//   template <class Row> void key_transform(const Params&, const RowContext&, Row&);
//   template <class Row> void value_transform(const Params&, const RowContext&, Row&);
//   float logits_transform(const Params&, const LogitContext&, float logit);  // sm_scale * q.k,
//                                                             // or a Logit of a Logit, below
//   bool logits_mask(const Params&, const LogitContext&);                      // false: hidden
//   float output_transform(const Params&, const OutputContext&, float value);
//   static constexpr bool kUseSoftmax = false;  // weights are the logits themselves
//   static constexpr bool kCustomMask = true;   // built-in custom_mask: the plan brings mask bits
// Functions are declared PLAIT_HD static. Row is described in host_device/row.h; of fp8 K and V it
// holds values, numbers times their scale.
//
// A built-in may have, beside a logits_transform of powers, the same without them for logits of at
// most small_logit(p); both leave a Logit of the same scale and offset.
//   Logit small_logits_transform(const Params&, const LogitContext&, Logit logit);
//   float small_logit(const Params&);
//
// `Params` is written for the user from the parameters that the variant declares, and is visible
// where the functors are: parameters {"bias", kFloat}, {"slopes", kTensor} give
//   struct Params { alignas(8) float bias; alignas(8) const float* slopes; };
// one 8-byte slot each, in order; a tensor is float32 and contiguous. kUseSoftmax too may be left
// to the declaration (plait/variant.h). So a whole variant reads
//   struct AlibiLike {
//     PLAIT_HD static float logits_transform(const Params& p, const LogitContext& c, float logit) {
//       return logit + p.bias + p.slopes[c.qo_head] * (c.k_pos - c.q_pos);
//     }
//   };
// The text is compiled inside a namespace of its own within plait; its #include lines are moved out
// in front of it. Only built-in variants (host_device/variants/) write their Params themselves.
#pragma once
#include "host_device/base.h"

namespace plait {

// k_pos - q_pos, a float in two parts. Kernels that walk along a row give what its elements share
// and each one's constant: then a product with a slope is one instruction an element.
struct Distance {
  float shared, own;
  PLAIT_HD operator float() const { return shared + own; }
};
template <class T>
inline constexpr bool kIsNumber = true;
template <>
inline constexpr bool kIsNumber<Distance> = false;
// A multiple of it.
struct Slope {
  float factor;
  Distance distance;
  PLAIT_HD operator float() const { return factor * distance.shared + factor * distance.own; }
};
template <class T>
  requires kIsNumber<T>
PLAIT_HD Slope operator*(T slope, const Distance& d) {
  return {static_cast<float>(slope), d};
}
template <class T>
  requires kIsNumber<T>
PLAIT_HD Slope operator*(const Distance& d, T slope) {
  return slope * d;
}

// A logit, product * scale + offset: scale > 0, and both are the same for all keys of a query and
// head in a tile. A functor that takes a Logit begins with one product less an element, and one
// that returns a Logit leaves the last product and sum to the softmax, which has them anyway.
struct Logit {
  float product, scale, offset;
  PLAIT_HD Logit(float product, float scale = 1.0f, float offset = 0.0f)
      : product(product), scale(scale), offset(offset) {}
  PLAIT_HD operator float() const { return product * scale + offset; }
};
PLAIT_HD float operator*(const Logit& logit, float x) {
  return multiply_add(logit.product, logit.scale * x, logit.offset * x);
}
template <class T>
inline constexpr bool kIsLogit = false;
template <>
inline constexpr bool kIsLogit<Logit> = true;
template <class L>
  requires kIsLogit<L>  // not what converts to one
PLAIT_HD Logit operator+(const L& logit, const Slope& slope) {
  return {multiply_add(slope.factor * reciprocal(logit.scale), slope.distance.own, logit.product),
          logit.scale, logit.offset + slope.factor * slope.distance.shared};
}

struct LogitContext {
  int request;         // of the query
  int q_pos, k_pos;    // absolute
  int qo_head, kv_head;
  Dtype dtype = Dtype::kFloat32;  // of q: how exact a logit is worth its time
  Distance distance{static_cast<float>(k_pos - q_pos), 0.0f};
};
struct RowContext {    // of a row of Q, K or V
  int request;         // -1 for keys that several requests share
  int position;        // absolute
  int head;            // query head for Q, kv head for K and V
};
struct OutputContext {
  int request, q_pos, qo_head, dim;
};

// Stand for any Row and any Params when a variant is asked what it defines.
struct ProbeRow;
struct ProbeParams {
  template <class T>
  PLAIT_HD operator const T&() const;
};

template <class V>
struct VariantTraits {
  // Asked by a call: NVRTC 13.0 takes no address of a template's instance in a requirement.
  static constexpr bool kHasQueryTransform = requires(
      const ProbeParams& p, const RowContext& c, ProbeRow& row) {
    V::template query_transform<ProbeRow>(p, c, row);
  };
  static constexpr bool kHasKeyTransform = requires(
      const ProbeParams& p, const RowContext& c, ProbeRow& row) {
    V::template key_transform<ProbeRow>(p, c, row);
  };
  static constexpr bool kHasValueTransform = requires(
      const ProbeParams& p, const RowContext& c, ProbeRow& row) {
    V::template value_transform<ProbeRow>(p, c, row);
  };
  static constexpr bool kHasLogitsTransform = requires { &V::logits_transform; };
  static constexpr bool kHasSmallLogitsTransform = requires { &V::small_logits_transform; };
  static constexpr bool kHasLogitsMask = requires { &V::logits_mask; };
  static constexpr bool kHasOutputTransform = requires { &V::output_transform; };
  static constexpr bool use_softmax() {
    if constexpr (requires { V::kUseSoftmax; }) {
      return V::kUseSoftmax;
    } else {
      return true;
    }
  }
  static constexpr bool kUseSoftmax = use_softmax();
  static constexpr bool has_custom_mask() {
    if constexpr (requires { V::kCustomMask; }) {
      return V::kCustomMask;
    } else {
      return false;
    }
  }
  static constexpr bool kCustomMask = has_custom_mask();
};

template <class V>
constexpr bool defines_a_functor() {
  using Traits = VariantTraits<V>;
  return Traits::kHasQueryTransform || Traits::kHasKeyTransform || Traits::kHasValueTransform ||
         Traits::kHasLogitsTransform || Traits::kHasLogitsMask || Traits::kHasOutputTransform;
}

// Whether kUseSoftmax, if V defines it, is what the variant was declared with.
template <class V>
constexpr bool agrees_on_softmax(bool declared) {
  if constexpr (requires { V::kUseSoftmax; }) {
    return V::kUseSoftmax == declared;
  } else {
    return true;
  }
}

// Whether the functors of V can be called as this file says, with parameters of type P. Asked by
// generated code of those that the source defines, so that a wrong signature gets one clear line.
template <class V, class P>
struct FunctorFits {
  static constexpr bool query_transform =
      requires(const P& p, const RowContext& c, ProbeRow& row) { V::query_transform(p, c, row); };
  static constexpr bool key_transform =
      requires(const P& p, const RowContext& c, ProbeRow& row) { V::key_transform(p, c, row); };
  static constexpr bool value_transform =
      requires(const P& p, const RowContext& c, ProbeRow& row) { V::value_transform(p, c, row); };
  static constexpr bool logits_transform =
      requires(const P& p, const LogitContext& c, float x) { float{V::logits_transform(p, c, x)}; };
  static constexpr bool logits_mask =
      requires(const P& p, const LogitContext& c) { bool{V::logits_mask(p, c)}; };
  static constexpr bool output_transform = requires(const P& p, const OutputContext& c, float x) {
    float{V::output_transform(p, c, x)};
  };
};

// The variant without functors: plain softmax attention; visibility alone tells full, causal and
// window apart.
struct Standard {
  struct Params {};
};

}  // namespace plait
