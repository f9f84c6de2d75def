// What a batch may say of single queries beside its formats: custom mask bits and positions.
#pragma once
#include "formats/index_array.h"
#include "formats/view.h"

namespace plait {

// Checks the mask against the lengths in `out` and fills out.mask and out.view.request_mask_begin;
// without one both are left empty. Throws ArgumentError naming array, request and sizes.
void take_mask(const MaskTables& tables, const IndexArray& qo_indptr, const Device& device,
               FormatView& out);

// Overwrites `token_position` with the positions given, if they are.
void take_positions(const TensorView& q_positions, const Device& device,
                    std::vector<int>& token_position);

}  // namespace plait
