// Lengths that lie on the device: which arrays of a batch say them, checked by shape, dtype and
// device alone, since nobody here can read their values.
#pragma once
#include "host_device/device_lengths.h"
#include "plait/attention.h"

namespace plait {

// True if the batch's qo_indptr is on the device, and with it everything that says lengths.
bool has_device_lengths(const Batch& batch);

// What of `batch` plan() reads on the device. For formats of one level, without masks and given
// positions. Throws ArgumentError naming the array, what it is and what is taken.
DeviceLengths take_device_lengths(const AttentionConfig& config, const Batch& batch);

}  // namespace plait
