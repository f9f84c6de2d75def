/* The C API used from C: that the header is C, and that what a C program writes comes out right.
 * c_api_test.cc calls these and looks at the results. */
#include "plait/c_api.h"

#include <stdlib.h>
#include <string.h>

/* One kv head of dim 8, two query heads, pages of 2 tokens. Two requests: 2 queries on keys
 * 0 ... 2 (pages 3, 1), 1 query on no keys. K is 0, V of key i is i + 1: out is the mean of the
 * visible values. Keys are appended by slot first. Returns the first status that is not OK. */
plait_status c_api_decode(float out[3 * 2 * 8], float lse[3 * 2]) {
  enum { kPages = 4, kPage = 2, kDim = 8, kTokens = 3 };
  float k_cache[kPages * kPage * kDim], v_cache[kPages * kPage * kDim];
  float k_new[kTokens * kDim] = {0}, v_new[kTokens * kDim], q[3 * 2 * kDim];
  const int64_t slots[kTokens] = {3 * kPage, 3 * kPage + 1, 1 * kPage};
  const int32_t qo_indptr[3] = {0, 2, 3}, kv_len[2] = {3, 0};
  const int32_t block_table[2 * 2] = {3, 1, -7, -7};
  plait_config config;
  plait_attention* attention = NULL;
  plait_append_args append;
  plait_batch batch;
  plait_run_args run;
  plait_status status;
  int i;

  for (i = 0; i < kPages * kPage * kDim; ++i) k_cache[i] = v_cache[i] = 1e30f;
  for (i = 0; i < kTokens * kDim; ++i) v_new[i] = (float)(i / kDim + 1);
  for (i = 0; i < 3 * 2 * kDim; ++i) q[i] = 1.0f;

  plait_append_args_init(&append);
  append.dtype = PLAIT_FLOAT32;
  append.kv_kind = PLAIT_PAGED;
  append.page_size = kPage;
  append.num_kv_heads = 1;
  append.head_dim_qk = append.head_dim_vo = kDim;
  append.num_tokens = kTokens;
  append.k_new = k_new;
  append.v_new = v_new;
  append.num_kv_blocks = kPages;
  append.k_cache = k_cache;
  append.v_cache = v_cache;
  append.slot_mapping = slots;
  status = plait_append_kv(&append, NULL);
  if (status != PLAIT_OK) return status;

  plait_config_init(NULL); /* nothing to fill: no fault */
  plait_batch_init(NULL);
  plait_run_args_init(NULL);
  plait_config_init(&config);
  config.num_qo_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_vo = kDim;
  config.dtype = PLAIT_FLOAT32;
  config.kv_kind = PLAIT_PAGED;
  config.page_size = kPage;
  config.max_requests = 2;
  config.max_query_tokens = 4;
  config.max_keys = 8;
  config.causal = 1;
  status = plait_attention_create(&config, &attention);
  if (status != PLAIT_OK) return status;

  plait_batch_init(&batch);
  batch.num_requests = 2;
  batch.qo_indptr = qo_indptr;
  batch.kv.kv_len = kv_len;
  batch.kv.block_table = block_table;
  batch.kv.block_table_rows = 2;
  batch.kv.block_table_columns = 2;
  batch.kv.block_table_stride_row = 2;
  batch.kv.block_table_stride_column = 1;
  status = plait_plan(attention, &batch, NULL);
  if (status == PLAIT_OK) {
    plait_run_args_init(&run);
    run.num_rows = 3;
    run.q = q;
    run.num_kv_blocks = kPages;
    run.k = k_cache;
    run.v = v_cache;
    run.out = out;
    run.lse = lse;
    status = plait_run(attention, &run, NULL);
  }
  plait_attention_destroy(attention);
  return status;
}

/* States (v 1, lse 0) and (v 3, lse 0) of one row and head of dim 1, `out` strided. */
plait_status c_api_merge(float out[4], float* out_lse) {
  const float v[2] = {1.0f, 3.0f}, lse[2] = {0.0f, 0.0f};
  plait_merge_args merge;
  plait_merge_args_init(&merge);
  merge.dtype = PLAIT_FLOAT32;
  merge.num_rows = 1;
  merge.num_states = 2;
  merge.num_heads = 1;
  merge.head_dim = 1;
  merge.v = v;
  merge.lse = lse;
  merge.out = out;
  merge.out_stride_row = 4;
  merge.out_stride_head = 2;
  merge.out_lse = out_lse;
  return plait_merge_states(&merge, NULL);
}
