// An attention variant: up to six functors written once and compiled for every executor, a flag,
// and typed parameters. Beside the code, Visibility says as data which keys a query sees.
// Source: FlashInfer (Ye et al., 2025, arXiv:2501.01005), "Attention variants"; the functors' names
// follow it.
//
// A variant is a struct with any of these static members; the presence of a name is what counts:
//   struct Params { float x; const float* t; };           // 8-byte slots in declaration order
//   static constexpr bool kUseSoftmax = false;             // weights are the logits themselves
//   template <class Row> void query_transform(const Params&, const RowContext&, Row&);
//   template <class Row> void key_transform(const Params&, const RowContext&, Row&);
//   template <class Row> void value_transform(const Params&, const RowContext&, Row&);
//   float logits_transform(const Params&, const LogitContext&, float logit);  // sm_scale * q.k
//   bool logits_mask(const Params&, const LogitContext&);                      // false: hidden
//   float output_transform(const Params&, const OutputContext&, float value);
// Functions are declared PLAIT_HD static. Row is described in host_device/row.h.
#pragma once
#include "host_device/base.h"

namespace plait {

struct LogitContext {
  int request;         // of the query
  int q_pos, k_pos;    // absolute
  int qo_head, kv_head;
};
struct RowContext {    // of a row of Q, K or V
  int request;         // -1 for keys that several requests share
  int position;        // absolute
  int head;            // query head for Q, kv head for K and V
};
struct OutputContext {
  int request, q_pos, qo_head, dim;
};

struct ProbeRow;  // stands for any Row when a variant is asked what it defines

template <class V>
struct VariantTraits {
  static constexpr bool kHasQueryTransform = requires { &V::template query_transform<ProbeRow>; };
  static constexpr bool kHasKeyTransform = requires { &V::template key_transform<ProbeRow>; };
  static constexpr bool kHasValueTransform = requires { &V::template value_transform<ProbeRow>; };
  static constexpr bool kHasLogitsTransform = requires { &V::logits_transform; };
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
};

// The variant without functors: plain softmax attention; visibility alone tells full, causal and
// window apart.
struct Standard {
  struct Params {};
};

}  // namespace plait
