// A plan that is made on the device: the memory it takes, for any batch within the bounds, and the
// argument of the kernel that makes it (kernels/plan_lengths.cuh).
#pragma once
#include <cstddef>

#include "host_device/plan_lengths_call.h"
#include "plait/attention.h"

namespace plait::cuda {

std::size_t device_plan_bytes(const AttentionConfig& config, const PlanTarget& target);

// memory: device_plan_bytes() of the device, 256-byte aligned. head: PlanView, with the starts of
// target.num_ctas CTAs behind it (plan_image.h). Throws ArgumentError where the kernel cannot cut
// for so many CTAs.
PlanLengthsCall plan_lengths_call(const AttentionConfig& config, const PlanTarget& target,
                                  const DeviceLengths& lengths, char* memory, char* head,
                                  unsigned* counters, int num_tickets);

}  // namespace plait::cuda
