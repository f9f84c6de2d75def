// A variant as the caller gives it: visibility as data, functors as C++ text (host_device/variant.h
// says what a functor is), parameters by name. Variants combine with `|`.
#pragma once
#include <string>
#include <vector>

#include "plait/plan_data.h"
#include "plait/tensor.h"

namespace plait {

struct VariantParam {
  enum Kind {
    kFloat,
    kInt,
    kTensor,  // const float* to a contiguous float32 tensor
    kTable,   // of built-ins: values that follow from the part and the Attention's shape
  };
  // Elements that a kTensor must have; kAnySize: not checked.
  enum Size { kAnySize, kNumQoHeads, kHeadDimQk };
  std::string name;
  Kind kind = kFloat;
  double value = 0;  // of kFloat and kInt, unless run() is given another
  Size size = kAnySize;
  bool operator==(const VariantParam&) const = default;
};

// Angles of rope(): pair i of n = rotary_dim / 2 is turned by position * frequency radians,
//   frequency = theta^(-i / n) / scale,
// but where old_context_len > 0, as Llama 3.1 has it: with wavelength w = 2 pi theta^(i / n),
// frequencies of w < old_context_len / high_freq_factor stay theta^(-i / n), those of w >
// old_context_len / low_freq_factor are divided by `scale`, and those between are blended.
struct RopeOptions {
  double theta = 10000, scale = 1;
  bool interleave = false;  // pairs are elements 2 i and 2 i + 1; else i and i + n
  int rotary_dim = 0;       // the first elements of a head, a multiple of 8; 0: all
  double low_freq_factor = 1, high_freq_factor = 4;
  int old_context_len = 0;
  bool operator==(const RopeOptions&) const = default;
};

// One struct of functors. Built-ins live in kernels/host_device/variants/<name>.h.
struct VariantPart {
  std::string name;         // "soft_cap"; how errors, plans and caches call it
  std::string struct_name;  // "SoftCap"
  std::string source;       // C++ text that defines the struct; empty for a built-in
  std::vector<VariantParam> params;
  bool use_softmax = true;  // of a built-in: either way
  RopeOptions rope{};       // of the built-in rope
  bool operator==(const VariantPart&) const = default;
};

struct Variant {
  Visibility visible;
  std::vector<VariantPart> parts;  // a transform that several define is applied part after part
  std::string name() const;        // "causal|soft_cap"; "full" if there is nothing to say
  bool use_softmax() const;
  bool custom_mask() const;  // whether plan() takes mask bits
  bool operator==(const Variant&) const = default;
};

Variant full();
Variant causal();
Variant sliding_window(int window_left, int sink_tokens = 0);  // throws on negative values
// Keys as a mask says that every plan() brings: MaskTables (kv_format.h). It hides more of what the
// other parts show: causal() | custom_mask() is both. Trees of drafts: without causal(), as a draft
// may lie behind its position.
Variant custom_mask();
Variant soft_cap(float cap);  // cap * tanh(sm_scale * q.k / cap); throws unless cap > 0
// logits + slope * (k_pos - q_pos); run() takes `slopes`, float32 [num_qo_heads]: with tensor
// parallelism those of this rank's heads. alibi_slopes() of Python are the paper's.
Variant alibi();
// Q and K are turned by their positions, for caches of keys as they were projected.
Variant rope(const RopeOptions& options = {});
// Rows of Q and of K become x / sqrt(mean(x^2) + eps) * weight; run() takes `q_norm_weight` and
// `k_norm_weight`, float32 [head_dim_qk]. Before rope(): rms_norm_q(eps) | rms_norm_k(eps) |
// rope().
Variant rms_norm_q(float eps = 1e-6f);
Variant rms_norm_k(float eps = 1e-6f);
// User code: `source` defines `struct struct_name` with any of the six functors, as
// kernels/host_device/variant.h says:
//   custom("bias", "Bias", R"(struct Bias {
//     PLAIT_HD static float logits_transform(const Params& p, const LogitContext& c, float logit) {
//       return logit + p.bias;
//     }
//   };)", {{"bias", VariantParam::kFloat, 0.5}});
// `Params` is written from `params`: a float, an int or a const float* each, by name. Throws if
// `source` defines no functor, misspells one or defines Params itself, and if a name is no C++
// identifier or stands twice.
Variant custom(const std::string& name, const std::string& struct_name, const std::string& source,
               std::vector<VariantParam> params, bool use_softmax = true);
// Both at once: keys visible to both; the functors of both, a's first: soft_cap(c) | alibi() adds
// the bias to the capped logit. Throws if a part or a parameter of the same name stands in both, if
// two custom parts disagree on softmax, or if no single window with sink tokens describes both.
Variant operator|(const Variant& a, const Variant& b);

// Value of a parameter for one run.
struct VariantArg {
  std::string name;
  double number = 0;
  TensorView tensor;  // for kTensor
};

}  // namespace plait
