// The frequencies of rope(), from its options, as its kernels read them (host_device/rotation.h).
#pragma once
#include <vector>

#include "plait/variant.h"

namespace plait {

void check_rope(const RopeOptions& options);  // throws ArgumentError

// Of each pair: 2^64 turns a position. Throws ArgumentError unless rotary_dim fits `head_dim`.
std::vector<unsigned long long> rope_turns(const RopeOptions& options, int head_dim);

}  // namespace plait
