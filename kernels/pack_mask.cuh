// A custom mask that lies on the device, packed without any alignment or as bools, becomes the
// words that attention kernels read (TokenMask). A plan step, after its upload, on the same stream.
#pragma once
#include "host_device/mask_bits.h"
#include "host_device/utility_calls.h"
#include "tile/begin.cuh"

namespace plait {

// Any grid of whole warps: a warp a token, a lane a word.
PLAIT_DEVICE void pack_mask(const PackMaskCall& call) {
  begin_kernel();
  const int warps_a_cta = blockDim.x / 32, lane = threadIdx.x % 32;
  for (int token = blockIdx.x * warps_a_cta + threadIdx.x / 32; token < call.num_tokens;
       token += gridDim.x * warps_a_cta) {
    const TokenMask mask = call.tokens[token];
    const i64 source = call.token_source[token];
    const int num_words = mask_row_words(mask.begin, mask.end);
    for (int i = lane; i < num_words; i += 32) {
      const int word = (mask.begin >> 5) + i;
      call.words[mask.first_word + i] =
          call.bools ? pack_mask_bools(call.from, source, mask.begin, mask.end, word)
                     : pack_mask_bits(call.from, source, mask.begin, mask.end, word);
    }
  }
}

}  // namespace plait
