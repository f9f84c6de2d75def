// Which query token and head a packed row is, and whose keys a row block holds. Used by every
// kernel, when it loads Q, masks logits and stores.
#pragma once
#include "host_device/config.h"
#include "host_device/variant.h"

namespace plait {

// Row of q, out and lse of the i-th token of the row block whose first_token is `block_token`.
PLAIT_HD int token_of(const PlanView& plan, int block_token, int i) {
  const int token = block_token + i;
  return plan.row_map != nullptr ? plan.row_map[token] : token;
}

// The packed rows of a token (a row of q) and kv head: one for each head of the group.
struct TokenHead {
  int token, kv_head;
};

// One packed row: token `token` (a row of q) and query head `qo_head`.
struct PackedRow {
  int token, qo_head;
};
PLAIT_HD PackedRow packed_row(const PlanView& plan, const RowBlock& block, int row, int kv_head,
                              int group_size) {
  const int i = row / group_size;
  return {token_of(plan, block.first_token, i), kv_head * group_size + (row - i * group_size)};
}

// A captured run that is replayed may meet a plan of more tokens than its q has rows. Those rows do
// not exist: they are computed from the last one that does, and stored nowhere.
PLAIT_HD bool has_row(const Params& params, int token) { return token < params.num_rows; }
PLAIT_HD int existing_row(const Params& params, int token) {
  return has_row(params, token) ? token : params.num_rows - 1;
}

// RowContext::request of the keys of `block`: -1 where several requests share them. Formats list
// the tokens of a row block request by request, so its two ends tell.
PLAIT_HD int request_of_keys(const PlanView& plan, const RowBlock& block) {
  const int first = plan.token_request[token_of(plan, block.first_token, 0)];
  const int last = plan.token_request[token_of(plan, block.first_token, block.num_tokens - 1)];
  return first == last ? first : -1;
}

}  // namespace plait
