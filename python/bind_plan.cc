// Plan as plain data: its arrays as bytes, which python/plait/plan.py reads as structured NumPy
// arrays, and back; and the planner as a pure host function.
#include <algorithm>
#include <climits>
#include <cstring>

#include "batch_arg.h"
#include "bindings.h"
#include "cuda/cost_model.h"
#include "formats/view.h"
#include "host_device/shares.h"
#include "plait/plan.h"

namespace plait::python {
namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
nb::bytes to_bytes(const std::vector<T>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(T));
}

template <class T>
std::vector<T> from_bytes(nb::dict arrays, const char* name) {
  if (!arrays.contains(name)) fail("plan: no array ", name);
  nb::bytes bytes = nb::cast<nb::bytes>(arrays[name]);
  check(bytes.size() % sizeof(T) == 0, "plan: ", name, " has ", bytes.size(),
        " bytes, no multiple of ", sizeof(T));
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

nb::dict arrays_of(const Plan& plan) {
  nb::dict out;
  out["row_blocks"] = to_bytes(plan.row_blocks);
  out["items"] = to_bytes(plan.items);
  out["cta_item_indptr"] = to_bytes(plan.cta_item_indptr);
  out["token_request"] = to_bytes(plan.token_request);
  out["token_position"] = to_bytes(plan.token_position);
  out["row_map"] = to_bytes(plan.row_map);
  out["merge_indptr"] = to_bytes(plan.merge_indptr);
  out["merge_sources"] = to_bytes(plan.merge_sources);
  out["nodes"] = to_bytes(plan.nodes);
  return out;
}

nb::dict numbers_of(const Plan& plan) {
  nb::dict out;
  out["chosen"] = plan.chosen;
  out["num_ctas"] = plan.num_ctas;
  out["num_tokens"] = plan.num_tokens;
  out["num_requests"] = plan.num_requests;
  out["num_levels"] = plan.num_levels;
  out["num_partial_rows"] = plan.num_partial_rows;
  out["lists_per_head"] = plan.lists_per_head;
  out["total_keys"] = plan.total_keys;
  out["kv_bytes"] = plan.kv_bytes;
  out["cost_model"] = plan.cost_model;
  out["causal"] = plan.visible.causal;
  out["window_left"] = plan.visible.window_left;
  out["sink_tokens"] = plan.visible.sink_tokens;
  return out;
}

nb::list candidates_of(const Plan& plan) {
  nb::list out;
  for (const PlanCandidate& c : plan.candidates) {
    nb::dict candidate;
    candidate["name"] = c.name;
    candidate["chunk"] = c.chunk;
    candidate["num_items"] = c.num_items;
    candidate["num_partial_rows"] = c.num_partial_rows;
    candidate["makespan_us"] = c.makespan_us;
    candidate["balance"] = c.balance;
    candidate["fits"] = c.fits;
    out.append(candidate);
  }
  return out;
}

// What readers of a plan index by: a text may hold anything.
void check_indices(const Plan& plan) {
  const auto check_indptr = [](const char* name, const std::vector<int>& indptr, size_t size,
                               size_t end) {
    check(indptr.size() == size, "plan: ", name, " has ", indptr.size(), " entries, must have ",
          size);
    for (size_t i = 0; i < size; ++i) {
      check(i == 0 ? indptr[0] == 0 : indptr[i] >= indptr[i - 1], "plan: ", name, "[", i, "] is ",
            indptr[i], "; entries must not descend, from 0");
    }
    check(size == 0 || static_cast<size_t>(indptr.back()) <= end, "plan: ", name, " ends at ",
          indptr.empty() ? 0 : indptr.back(), ", beyond ", end);
  };
  check(plan.num_ctas >= 1 && plan.num_tokens >= 0, "plan: num_ctas is ", plan.num_ctas,
        " and num_tokens ", plan.num_tokens);
  check(plan.num_levels >= 1 && plan.num_levels <= kMaxLevels, "plan: num_levels is ",
        plan.num_levels, ", must be 1 to ", kMaxLevels);
  const size_t num_tokens = plan.num_tokens;
  check(plan.token_request.size() == num_tokens && plan.token_position.size() == num_tokens,
        "plan: token_request has ", plan.token_request.size(), " entries and token_position ",
        plan.token_position.size(), ", but num_tokens is ", num_tokens);
  check_indptr("cta_item_indptr", plan.cta_item_indptr, size_t{1} + plan.num_ctas,
               plan.items.size());
  check_indptr("merge_indptr", plan.merge_indptr, plan.merge_indptr.size(),
               plan.merge_sources.size());
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const WorkItem& item = plan.items[i];
    check(item.row_block >= 0 && static_cast<size_t>(item.row_block) < plan.row_blocks.size() &&
              item.shape >= 0 && item.shape < 2,
          "plan: items[", i, "] has row_block ", item.row_block, " of ", plan.row_blocks.size(),
          " and shape ", item.shape, " of 2");
  }
}

Plan from_parts(nb::dict numbers, nb::list candidates, nb::dict arrays) {
  const auto integer = [&](const char* name, long long lowest, long long highest) {
    check(numbers.contains(name), "plan: no number ", name);
    const nb::object value = numbers[name];
    long long number = 0;
    check(nb::try_cast(value, number) && number >= lowest && number <= highest, "plan: ", name,
          " is ", nb::repr(value).c_str(), "; it must be an integer from ", lowest, " to ",
          highest);
    return number;
  };
  const auto number = [&](const char* name) {
    return static_cast<int>(integer(name, INT_MIN, INT_MAX));
  };
  Plan plan;
  for (nb::handle entry : candidates) {
    nb::dict c;
    PlanCandidate candidate;
    const auto field = [&](const char* name, auto& to) {
      return c.contains(name) && nb::try_cast(nb::object(c[name]), to);
    };
    check(nb::try_cast(entry, c) && field("name", candidate.name) &&
              field("chunk", candidate.chunk) && field("num_items", candidate.num_items) &&
              field("num_partial_rows", candidate.num_partial_rows) &&
              field("makespan_us", candidate.makespan_us) && field("balance", candidate.balance) &&
              field("fits", candidate.fits),
          "plan: candidates[", plan.candidates.size(), "] is ", nb::repr(entry).c_str(),
          ", which is no candidate");
    plan.candidates.push_back(std::move(candidate));
  }
  plan.chosen = number("chosen");
  check(plan.candidates.empty() ? plan.chosen == 0
                                : plan.chosen >= 0 && plan.chosen < int(plan.candidates.size()),
        "plan: chosen is ", plan.chosen, " of ", plan.candidates.size(), " candidates");
  plan.num_ctas = number("num_ctas");
  plan.num_tokens = number("num_tokens");
  plan.num_requests = number("num_requests");
  plan.num_levels = number("num_levels");
  plan.num_partial_rows = number("num_partial_rows");
  plan.lists_per_head = number("lists_per_head");
  plan.total_keys = integer("total_keys", LLONG_MIN, LLONG_MAX);
  plan.kv_bytes = integer("kv_bytes", 0, LLONG_MAX);
  check(numbers.contains("cost_model") &&
            nb::try_cast(nb::object(numbers["cost_model"]), plan.cost_model) &&
            std::all_of(plan.cost_model.begin(), plan.cost_model.end(),
                        [](char c) { return c >= ' ' && c != '"' && c != '\\'; }),
        "plan: cost_model is missing, or no plain text");
  plan.visible = {number("causal"), number("window_left"), number("sink_tokens")};
  plan.row_blocks = from_bytes<RowBlock>(arrays, "row_blocks");
  plan.items = from_bytes<WorkItem>(arrays, "items");
  plan.cta_item_indptr = from_bytes<int>(arrays, "cta_item_indptr");
  plan.token_request = from_bytes<int>(arrays, "token_request");
  plan.token_position = from_bytes<int>(arrays, "token_position");
  plan.row_map = from_bytes<int>(arrays, "row_map");
  plan.merge_indptr = from_bytes<int>(arrays, "merge_indptr");
  plan.merge_sources = from_bytes<int>(arrays, "merge_sources");
  plan.nodes = from_bytes<NodeChoice>(arrays, "nodes");
  check_indices(plan);
  return plan;
}

// Every field but the shapes, by name.
template <class Target, class Visit>
void for_fields(Target& target, Visit visit) {
  visit("num_ctas", target.num_ctas);
  visit("tile_kv", target.tile_kv);
  visit("kv_align", target.kv_align);
  visit("chunk_keys", target.chunk_keys);
  visit("group_size", target.group_size);
  visit("num_kv_heads", target.num_kv_heads);
  visit("merge_us", target.merge_us);
  visit("max_partial_rows", target.max_partial_rows);
  visit("min_split_keys", target.min_split_keys);
  visit("cache_keys", target.cache_keys);
  visit("num_sms", target.num_sms);
  visit("queue_percent", target.queue_percent);
  visit("min_queued_keys", target.min_queued_keys);
  visit("min_keys_for_queue", target.min_keys_for_queue);
  visit("kv_bytes", target.kv_bytes);
  visit("cost_model", target.cost_model);
}

PlanTarget target_from(nb::dict options) {
  PlanTarget target;
  for_fields(target, [&](const char* name, auto& field) {
    field = nb::cast<std::remove_reference_t<decltype(field)>>(options[name]);
  });
  nb::list shapes = nb::cast<nb::list>(options["shapes"]);
  target.num_shapes = int(shapes.size());
  for (int i = 0; i < target.num_shapes; ++i) {
    nb::tuple shape = nb::cast<nb::tuple>(shapes[i]);
    target.shapes[i] = {nb::cast<int>(shape[0]), nb::cast<int>(shape[1]), nb::cast<float>(shape[2]),
                        nb::cast<float>(shape[3])};
  }
  return target;
}

Plan plan_on_host(const KvFormat& kv, const Bounds& bounds, nb::handle qo_indptr, nb::dict tables,
                  nb::object levels, const Variant& variant, nb::dict target_options,
                  const std::string& scheduler) {
  const Scheduler parsed_scheduler = parse_scheduler(scheduler);
  const PlanTarget target = target_from(target_options);
  BatchArg arg;
  const Batch batch = arg.batch(qo_indptr, tables, levels, {});
  nb::gil_scoped_release unlocked;
  FormatView view;
  make_view(kv, bounds, batch, Device{}, view);
  Plan plan = make_plan(view.view, variant.visible, target, parsed_scheduler);
  plan.nodes = batch.nodes;
  return plan;
}

// The target that stands for sm90 where none is at hand: its shipped costs; two shapes split the
// keys of the second. Only a model: a plan of it is for no Attention.
nb::dict default_target(const std::vector<int>& tile_q, int num_ctas, int tile_kv, int group_size,
                        int num_kv_heads) {
  check(tile_q.size() == 1 || tile_q.size() == 2, "make_plan: tile_q has ", tile_q.size(),
        " shapes; one or two are taken");
  const bool decode = tile_q.size() == 1;
  const KernelCost& cost = decode ? cuda::kSm90DecodeCost : cuda::kSm90MixedCost;
  PlanTarget target;
  target.num_ctas = num_ctas;
  target.tile_kv = tile_kv;
  target.group_size = group_size;
  target.num_kv_heads = num_kv_heads;
  target.num_shapes = int(tile_q.size());
  for (int i = 0; i < target.num_shapes; ++i) {
    target.shapes[i] = {tile_q[i], i + 1, cost.fixed_us[i], cost.us_per_key[i]};
  }
  target.merge_us = cost.merge_us;
  target.min_split_keys = cost.min_split_keys;
  target.queue_percent = cuda::kQueuePercent;
  target.min_queued_keys = cuda::kMinQueuedKeys;
  target.min_keys_for_queue = cuda::kMinKeysForQueue;
  target.kv_bytes = num_kv_heads * 2LL * (128 + 128);
  target.cost_model = decode ? "shipped, sm90 decode" : "shipped, sm90 mixed";
  target.cache_keys = cuda::kCacheBytes / (2 * (128 + 128));  // 16-bit, head_dim 128
  target.max_partial_rows = static_cast<int>(
      std::min(2LL * num_ctas * *std::max_element(tile_q.begin(), tile_q.end()), 1LL * INT_MAX));
  return target_options(target);
}

}  // namespace

// shapes: (tile_q, key_split, fixed_us, us_per_key) in descending tile_q.
nb::dict target_options(const PlanTarget& target) {
  nb::list shapes;
  for (int i = 0; i < target.num_shapes; ++i) {
    const ShapeModel& shape = target.shapes[i];
    shapes.append(nb::make_tuple(shape.tile_q, shape.key_split, shape.fixed_us, shape.us_per_key));
  }
  nb::dict out;
  for_fields(target, [&](const char* name, const auto& field) { out[name] = field; });
  out["shapes"] = shapes;
  return out;
}

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "PlanData")
      .def_prop_ro("arrays", &arrays_of)
      .def_prop_ro("numbers", &numbers_of)
      .def_prop_ro("candidates", &candidates_of)
      .def_prop_ro("balance", &Plan::balance)
      .def_static("from_parts", &from_parts, "numbers"_a, "candidates"_a, "arrays"_a)
      .def(
          "__eq__", [](const Plan& a, const Plan& b) { return a == b; }, nb::is_operator())
      .def("__str__", [](const Plan& plan) { return to_string(plan); })
      .def("explain", [](const Plan& plan) { return explain(plan); })
      .def("explain_json", [](const Plan& plan) { return explain_json(plan); });
  m.def("make_plan", &plan_on_host, "kv"_a, "bounds"_a, "qo_indptr"_a, "tables"_a, "levels"_a,
        "variant"_a, "target"_a, "scheduler"_a);
  m.def(
      "timeline",
      [](const Plan& plan, nb::dict target) {
        return to_bytes(timeline(plan, target_from(target)));
      },
      "plan"_a, "target"_a);
  m.def("default_target", &default_target, "tile_q"_a, "num_ctas"_a, "tile_kv"_a, "group_size"_a,
        "num_kv_heads"_a);
  // What the model has beside the costs of a target: of two CTAs that share a multiprocessor.
  m.attr("speed_alone") = kTenthsOfSpeedAlone / 10.0;
  m.attr("last_join_us") = kLastJoinPs * 1e-6;
  m.attr("row_block_bytes") = sizeof(RowBlock);
  m.attr("work_item_bytes") = sizeof(WorkItem);
  m.attr("item_time_bytes") = sizeof(ItemTime);
  m.attr("node_choice_bytes") = sizeof(NodeChoice);
}

}  // namespace plait::python
