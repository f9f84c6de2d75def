// How far apart the rows of K or V lie, for the loader that gathers them one by one.
#pragma once
#include "host_device/kv_address.h"

namespace plait::cuda {

// Strides that are never stepped may be anything. Throws ArgumentError where 32 bits are too few.
RowUnits row_units(const char* name, const KvStrides& stride, i64 num_blocks, int block_size,
                   int element_bytes);

}  // namespace plait::cuda
