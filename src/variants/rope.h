// The frequencies of rope(), from its options, as its kernels read them (host_device/rotation.h).
#pragma once
#include <vector>

#include "plait/variant.h"

namespace plait {

void check_rope(const RopeOptions& options);  // throws ArgumentError

// The memory of a RotationTable. Throws ArgumentError unless rotary_dim fits `head_dim`.
std::vector<unsigned long long> rope_table(const RopeOptions& options, int head_dim);

}  // namespace plait
