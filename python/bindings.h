// What the files of the extension module have in common.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "plait/error.h"
#include "plait/plan.h"

namespace plait::python {

Scheduler parse_scheduler(const std::string& name);

nanobind::dict target_options(const PlanTarget& target);  // as plan.py's make_plan takes it

void bind_config(nanobind::module_& m);      // formats, variants, bounds, configuration
void bind_plan(nanobind::module_& m);        // Plan as plain arrays; the planner without a device
void bind_attention(nanobind::module_& m);   // Workspace, Attention
void bind_compose(nanobind::module_& m);     // compose_radix
void bind_operations(nanobind::module_& m);  // merge_states, append_kv
void bind_device(nanobind::module_& m);      // DeviceArray, graph timing
void bind_tools(nanobind::module_& m);       // doctor, compile, cache, benchmarks

}  // namespace plait::python
