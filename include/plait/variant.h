// A variant as the caller gives it: visibility as data, functors as C++ text (host_device/variant.h
// says what a functor is), parameters by name. Variants combine with `|`.
#pragma once
#include <string>
#include <vector>

#include "plait/plan_data.h"
#include "plait/tensor.h"

namespace plait {

struct VariantParam {
  enum Kind { kFloat, kInt, kTensor };  // float; int; const float* to a contiguous float32 tensor
  std::string name;
  Kind kind = kFloat;
  double value = 0;          // of kFloat and kInt, unless run() is given another
  bool operator==(const VariantParam&) const = default;
};

// One struct of functors. Built-ins live in kernels/host_device/variants/<name>.h.
struct VariantPart {
  std::string name;         // "soft_cap"; how errors, plans and caches call it
  std::string struct_name;  // "SoftCap"
  std::string source;       // C++ text that defines the struct; empty for a built-in
  std::vector<VariantParam> params;
  bool use_softmax = true;
  bool operator==(const VariantPart&) const = default;
};

struct Variant {
  Visibility visible;
  std::vector<VariantPart> parts;  // no two may define the same functor, but logits_mask
  std::string name() const;        // "causal|soft_cap"; "full" if there is nothing to say
  bool use_softmax() const;
  bool operator==(const Variant&) const = default;
};

Variant full();
Variant causal();
Variant sliding_window(int window_left, int sink_tokens = 0);  // throws on negative values
Variant soft_cap(float cap);  // cap * tanh(sm_scale * q.k / cap); throws unless cap > 0
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
// Both at once: keys visible to both; the functors of both, a's first. Throws if two parts define
// the same functor (but logits_mask: a key must pass both) or a parameter of the same name, if
// softmax and no softmax meet, or if no single window with sink tokens describes both windows.
Variant operator|(const Variant& a, const Variant& b);

// Value of a parameter for one run.
struct VariantArg {
  std::string name;
  double number = 0;
  TensorView tensor;  // for kTensor
};

}  // namespace plait
