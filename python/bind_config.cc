// Formats, variants, bounds and the configuration of an Attention.
#include <algorithm>

#include "bindings.h"
#include "plait/attention.h"

namespace plait::python {
namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::string repr(const KvFormat& kv) {
  const std::string one =
      kv.kind == KvFormat::kRagged
          ? "RaggedKv()"
          : concat("PagedKv(page_size=", kv.page_size, ", layout='", kv.hnd ? "HND" : "NHD", "')");
  return kv.num_levels == 1 ? one : concat("ComposedKv(", one, ", num_levels=", kv.num_levels, ")");
}

std::string repr(const Bounds& b) {
  return concat("Bounds(requests=", b.requests, ", query_tokens=", b.query_tokens,
                ", keys=", b.keys, ", total_pages=", b.total_pages, ", max_q_len=", b.max_q_len,
                ")");
}

// What read_cost_model() of cost_model.py returns, or None.
std::optional<TunedCosts> costs_from(nb::object cost_model) {
  if (cost_model.is_none()) return std::nullopt;
  using Entry = std::tuple<std::vector<float>, std::vector<float>, float>;
  const auto [name, arch, kernels] =
      nb::cast<std::tuple<std::string, std::string, std::map<std::string, Entry>>>(cost_model);
  TunedCosts costs{name, arch, {}};
  for (const auto& [kind, entry] : kernels) {
    const auto& [fixed_us, us_per_key, merge_us] = entry;
    KernelCost& cost = costs.kernels[kind];
    std::copy_n(fixed_us.begin(), std::min<size_t>(fixed_us.size(), 2), cost.fixed_us);
    std::copy_n(us_per_key.begin(), std::min<size_t>(us_per_key.size(), 2), cost.us_per_key);
    cost.merge_us = merge_us;
  }
  return costs;
}

AttentionConfig make_config(int num_qo_heads, int num_kv_heads, int head_dim_qk, int head_dim_vo,
                            const std::string& dtype, const std::optional<std::string>& kv_dtype,
                            const KvFormat& kv, const Variant& variant, const Bounds& bounds,
                            std::pair<int, int> device, float sm_scale,
                            const std::string& scheduler, const std::string& kernel, int max_ctas,
                            int chunk_keys, nb::object cost_model) {
  return {num_qo_heads,
          num_kv_heads,
          head_dim_qk,
          head_dim_vo,
          parse_dtype(dtype),
          kv_dtype ? std::optional<Dtype>(parse_dtype(*kv_dtype)) : std::nullopt,
          kv,
          variant,
          bounds,
          {device.first, device.second},
          sm_scale,
          parse_scheduler(scheduler),
          kernel,
          max_ctas,
          chunk_keys,
          costs_from(cost_model)};
}

VariantParam make_param(const std::string& name, const std::string& kind, double value) {
  check(kind == "float" || kind == "int" || kind == "tensor", "variant parameter '", name,
        "' is of kind '", kind, "'");
  return {name,
          kind == "float" ? VariantParam::kFloat
          : kind == "int" ? VariantParam::kInt
                          : VariantParam::kTensor,
          value};
}

}  // namespace

Scheduler parse_scheduler(const std::string& name) {
  constexpr std::pair<const char*, Scheduler> kNames[] = {{"auto", Scheduler::kAuto},
                                                          {"lpt", Scheduler::kLpt},
                                                          {"unsplit", Scheduler::kUnsplit},
                                                          {"prefix_sum", Scheduler::kPrefixSum}};
  for (const auto& [known, scheduler] : kNames) {
    if (name == known) return scheduler;
  }
  throw ArgumentError(
      concat("scheduler is '", name, "'; taken are 'auto', 'lpt', 'unsplit' and 'prefix_sum'"));
}

void bind_config(nb::module_& m) {
  nb::class_<KvFormat>(m, "KvFormat",
                       "How K and V lie in memory; made by RaggedKv, PagedKv, ComposedKv.")
      .def_prop_ro(
          "kind",
          [](const KvFormat& f) { return f.kind == KvFormat::kRagged ? "ragged" : "paged"; })
      .def_ro("page_size", &KvFormat::page_size)
      .def_ro("num_levels", &KvFormat::num_levels)
      .def_prop_ro("layout", [](const KvFormat& f) { return f.hnd ? "HND" : "NHD"; })
      .def(
          "__eq__", [](const KvFormat& a, const KvFormat& b) { return a == b; }, nb::is_operator())
      .def("__repr__", [](const KvFormat& f) { return repr(f); });
  m.def("ragged_kv", &ragged_kv);
  m.def("paged_kv", &paged_kv, "page_size"_a, "hnd"_a);
  m.def("composed_kv", &composed_kv, "format"_a, "num_levels"_a);

  nb::class_<Bounds>(
      m, "Bounds",
      "Capacities of an Attention: requests and query tokens of a step, keys of a request,\n"
      "pages of a step's host tables (0: requests * ceil(keys / page_size)), and the most\n"
      "query tokens of a request (0: query_tokens; 1: decode only).")
      .def(
          "__init__",
          [](Bounds* self, int requests, int query_tokens, int keys, long long total_pages,
             int max_q_len) {
            new (self) Bounds{requests, query_tokens, keys, total_pages, max_q_len};
          },
          nb::kw_only(), "requests"_a, "query_tokens"_a, "keys"_a, "total_pages"_a = 0,
          "max_q_len"_a = 0)
      .def_ro("requests", &Bounds::requests)
      .def_ro("query_tokens", &Bounds::query_tokens)
      .def_ro("keys", &Bounds::keys)
      .def_ro("total_pages", &Bounds::total_pages)
      .def_ro("max_q_len", &Bounds::max_q_len)
      .def(
          "__eq__", [](const Bounds& a, const Bounds& b) { return a == b; }, nb::is_operator())
      .def("__repr__", [](const Bounds& b) { return repr(b); });

  nb::class_<Variant>(
      m, "Variant",
      "What a query sees and how logits, rows and outputs are changed; combine with |.")
      .def_prop_ro("name", &Variant::name)
      .def_prop_ro("use_softmax", &Variant::use_softmax)
      .def_prop_ro("custom_mask", &Variant::custom_mask)
      .def_prop_ro("causal", [](const Variant& v) { return v.visible.causal != 0; })
      .def_prop_ro("window_left", [](const Variant& v) { return v.visible.window_left; })
      .def_prop_ro("sink_tokens", [](const Variant& v) { return v.visible.sink_tokens; })
      .def(
          "__or__", [](const Variant& a, const Variant& b) { return a | b; }, nb::is_operator())
      .def(
          "__eq__", [](const Variant& a, const Variant& b) { return a == b; }, nb::is_operator())
      .def("__repr__", [](const Variant& v) { return concat("<plait variant ", v.name(), ">"); });
  m.def("full", &full);
  m.def("causal", &causal);
  m.def("sliding_window", &sliding_window, "window_left"_a, "sink_tokens"_a);
  m.def("soft_cap", &soft_cap, "cap"_a);
  m.def("custom_mask", &custom_mask);
  m.def("alibi", &alibi);
  m.def(
      "rope",
      [](double theta, double scale, bool interleave, int rotary_dim, double low_freq_factor,
         double high_freq_factor, int old_context_len) {
        return rope({theta, scale, interleave, rotary_dim, low_freq_factor, high_freq_factor,
                     old_context_len});
      },
      nb::kw_only(), "theta"_a, "scale"_a, "interleave"_a, "rotary_dim"_a, "low_freq_factor"_a,
      "high_freq_factor"_a, "old_context_len"_a);
  m.def("rms_norm_q", &rms_norm_q, "eps"_a);
  m.def("rms_norm_k", &rms_norm_k, "eps"_a);
  nb::class_<VariantParam>(m, "VariantParam");
  m.def("variant_param", &make_param, "name"_a, "kind"_a, "value"_a);
  m.def("custom", &custom, "name"_a, "struct_name"_a, "source"_a, "params"_a, "use_softmax"_a);

  nb::class_<AttentionConfig>(m, "AttentionConfig");
  m.attr("INVARIANT_CHUNK") = kInvariantChunk;
  m.def("attention_config", &make_config, nb::kw_only(), "num_qo_heads"_a, "num_kv_heads"_a,
        "head_dim_qk"_a, "head_dim_vo"_a, "dtype"_a, "kv_dtype"_a.none(), "kv"_a, "variant"_a,
        "bounds"_a, "device"_a, "sm_scale"_a, "scheduler"_a, "kernel"_a, "max_ctas"_a,
        "chunk_keys"_a, "cost_model"_a.none());
  m.def("workspace_bytes", &workspace_bytes, "config"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace plait::python
