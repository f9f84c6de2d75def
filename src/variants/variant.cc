// The public Variant: built-ins, checks of custom ones, and how two combine.
#include "plait/variant.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>

#include "plait/error.h"
#include "variants/functors.h"
#include "variants/rope.h"

namespace plait {
namespace {

// The window whose keys are those that both windows show.
void intersect_windows(const Visibility& a, const Visibility& b, Visibility& both) {
  if (a.window_left < 0 || b.window_left < 0) {
    const Visibility& windowed = a.window_left < 0 ? b : a;
    both.window_left = windowed.window_left;
    both.sink_tokens = windowed.sink_tokens;
    return;
  }
  const Visibility& narrow = a.window_left <= b.window_left ? a : b;
  const Visibility& wide = a.window_left <= b.window_left ? b : a;
  // The narrow window's extra sinks would have to end where the wide window begins: two steps.
  check(narrow.sink_tokens <= wide.sink_tokens || a.window_left == b.window_left,
        "variant: sliding_window(", a.window_left, ", sink_tokens=", a.sink_tokens,
        ") | sliding_window(", b.window_left, ", sink_tokens=", b.sink_tokens,
        ") is no single window; give the narrower one at most as many sink tokens");
  both.window_left = narrow.window_left;
  both.sink_tokens = std::min(narrow.sink_tokens, wide.sink_tokens);
}

void check_combines(const VariantPart& a, const VariantPart& b) {
  const bool agree = a.use_softmax == b.use_softmax || a.source.empty() || b.source.empty();
  check(agree, "variant: '", a.name, "' | '", b.name, "': ", a.use_softmax ? a.name : b.name,
        " uses softmax and ", a.use_softmax ? b.name : a.name, " does not; they cannot combine");
  check(a.name != b.name, "variant: '", a.name, "' stands twice in a combination");
  for (const VariantParam& p : a.params) {
    const bool both = std::any_of(b.params.begin(), b.params.end(),
                                  [&](const VariantParam& other) { return other.name == p.name; });
    check(!both, "variant: '", a.name, "' | '", b.name, "': both have a parameter '", p.name,
          "'; rename one");
  }
}

VariantPart built_in(const char* name, std::string struct_name, std::vector<VariantParam> params) {
  VariantPart part;
  part.name = name;
  part.struct_name = std::move(struct_name);
  part.params = std::move(params);
  return part;
}

Variant of(VariantPart part) {
  Variant variant;
  variant.parts.push_back(std::move(part));
  return variant;
}

Variant rms_norm(const char* name, const char* struct_name, const char* prefix, float eps) {
  check(std::isfinite(eps) && eps > 0, name, ": eps is ", eps, ", but must be finite and > 0");
  const VariantParam epsilon{concat(prefix, "_norm_eps"), VariantParam::kFloat, eps};
  const VariantParam weight{concat(prefix, "_norm_weight"), VariantParam::kTensor, 0,
                            VariantParam::kHeadDimQk};
  return of(built_in(name, struct_name, {epsilon, weight}));
}

}  // namespace

std::string Variant::name() const {
  std::string text;
  const auto add = [&](const std::string& word) { text += (text.empty() ? "" : "|") + word; };
  if (visible.causal) add("causal");
  if (visible.window_left >= 0) add("sliding_window");
  for (const VariantPart& part : parts) add(part.name);
  return text.empty() ? "full" : text;
}

bool Variant::use_softmax() const {
  return std::all_of(parts.begin(), parts.end(),
                     [](const VariantPart& p) { return p.use_softmax; });
}

bool Variant::custom_mask() const {
  return std::any_of(parts.begin(), parts.end(), [](const VariantPart& part) {
    return part.source.empty() && part.name == "custom_mask";
  });
}

Variant full() { return {}; }

Variant causal() {
  Variant variant;
  variant.visible.causal = 1;
  return variant;
}

Variant sliding_window(int window_left, int sink_tokens) {
  check(window_left >= 0, "sliding_window: window_left is ", window_left,
        ", but must be >= 0 (0: a query sees its own position only)");
  check(sink_tokens >= 0, "sliding_window: sink_tokens is ", sink_tokens, ", but must be >= 0");
  Variant variant;
  variant.visible.window_left = window_left;
  variant.visible.sink_tokens = sink_tokens;
  return variant;
}

Variant custom_mask() { return of(built_in("custom_mask", "CustomMask", {})); }

Variant soft_cap(float cap) {
  check(std::isfinite(cap) && cap >= FLT_MIN, "soft_cap: cap is ", cap,  // 1 / cap must be finite
        ", but must be finite and > 0, and no denormal");
  return of(built_in("soft_cap", "SoftCap", {{"cap", VariantParam::kFloat, cap}}));
}

Variant alibi() {
  return of(built_in("alibi", "Alibi",
                     {{"slopes", VariantParam::kTensor, 0, VariantParam::kNumQoHeads}}));
}

Variant rope(const RopeOptions& options) {
  check_rope(options);
  const std::string pairing = options.interleave ? "Pairing::kAdjacent" : "Pairing::kHalf";
  VariantPart part = built_in("rope", concat("Rope<", pairing, ", ", options.rotary_dim, ">"),
                              {{"rotations", VariantParam::kTable}});
  part.rope = options;
  return of(std::move(part));
}

Variant rms_norm_q(float eps) { return rms_norm("rms_norm_q", "RmsNormQ", "q", eps); }
Variant rms_norm_k(float eps) { return rms_norm("rms_norm_k", "RmsNormK", "k", eps); }

Variant custom(const std::string& name, const std::string& struct_name, const std::string& source,
               std::vector<VariantParam> params, bool use_softmax) {
  const std::string where = concat("variant '", name, "'");
  check(is_identifier(name), where, ": the name must be a C++ identifier (letters, digits, _)");
  check(is_identifier(struct_name) && struct_name != "Params" && struct_name != "Variant", where,
        ": struct_name '", struct_name,
        "' must be a C++ identifier, no keyword and neither Params nor Variant");
  for (size_t i = 0; i < params.size(); ++i) {
    check(is_identifier(params[i].name), where, ": parameter ", i, " is named '", params[i].name,
          "', but must be a C++ identifier and no keyword");
    for (size_t j = 0; j < i; ++j) {
      check(params[i].name != params[j].name, where, ": parameters ", j, " and ", i,
            " are both named '", params[i].name, "'");
    }
  }
  check(source.find('\0') == std::string::npos, where, ": the source holds a zero byte");
  check_source(where, struct_name, source);
  Variant variant;
  variant.parts.push_back({name, struct_name, source, std::move(params), use_softmax});
  return variant;
}

Variant operator|(const Variant& a, const Variant& b) {
  Variant both;
  both.visible.causal = a.visible.causal | b.visible.causal;
  intersect_windows(a.visible, b.visible, both.visible);
  for (const VariantPart& part_a : a.parts) {
    for (const VariantPart& part_b : b.parts) check_combines(part_a, part_b);
  }
  both.parts = a.parts;
  both.parts.insert(both.parts.end(), b.parts.begin(), b.parts.end());
  return both;
}

}  // namespace plait
