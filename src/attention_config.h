// The checks of a configuration, before anything is compiled or allocated.
#pragma once
#include "plait/attention.h"

namespace plait {

// Throws ArgumentError naming the field, its value and what is taken.
void check_config(const AttentionConfig& config);

}  // namespace plait
