// The C API: results of the C program beside this file, status codes and error texts.
#include "plait/c_api.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

extern "C" {
plait_status c_api_decode(float* out, float* lse);
plait_status c_api_merge(float* out, float* out_lse);
}

namespace {

TEST(CApi, AppendPlanRunFromC) {
  std::vector<float> out(3 * 2 * 8, 7), lse(3 * 2, 7);
  ASSERT_EQ(c_api_decode(out.data(), lse.data()), PLAIT_OK) << plait_last_error();
  for (int i = 0; i < 2 * 8; ++i) {
    EXPECT_FLOAT_EQ(out[i], 1.5f);          // query 0 sees values 1, 2
    EXPECT_FLOAT_EQ(out[2 * 8 + i], 2.0f);  // query 1 sees 1, 2, 3
    EXPECT_EQ(out[2 * 2 * 8 + i], 0.0f);
  }
  for (int head = 0; head < 2; ++head) {
    EXPECT_NEAR(lse[head], std::log(2.0), 1e-6);
    EXPECT_NEAR(lse[2 + head], std::log(3.0), 1e-6);
    EXPECT_EQ(lse[4 + head], -std::numeric_limits<float>::infinity());
  }
}

TEST(CApi, MergeFromC) {
  std::vector<float> out(4, 7);
  float lse = 7;
  ASSERT_EQ(c_api_merge(out.data(), &lse), PLAIT_OK) << plait_last_error();
  EXPECT_FLOAT_EQ(out[0], 2);
  EXPECT_EQ(out[1], 7);
  EXPECT_NEAR(lse, std::log(2.0), 1e-6);
}

TEST(CApi, Version) { EXPECT_STREQ(plait_version(), "0.1.0"); }

plait_config small_config() {
  plait_config config;
  plait_config_init(&config);
  config.num_qo_heads = config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_vo = 8;
  config.dtype = PLAIT_FLOAT32;
  config.max_requests = config.max_query_tokens = config.max_keys = 4;
  return config;
}

std::string create_error(const plait_config& config) {
  plait_attention* attention = nullptr;
  const plait_status status = plait_attention_create(&config, &attention);
  EXPECT_EQ(attention == nullptr, status != PLAIT_OK);
  plait_attention_destroy(attention);
  if (status == PLAIT_OK) return "";
  EXPECT_EQ(status, PLAIT_INVALID_ARGUMENT);
  return plait_last_error();
}

TEST(CApi, ConfigErrors) {
  plait_config config = small_config();
  EXPECT_EQ(create_error(config), "");
  config.head_dim_qk = 7;
  EXPECT_EQ(create_error(config),
            "attention: head_dim_qk is 7; it must be a multiple of 8 from 8 to 256");
  config = small_config();
  config.dtype = 9;
  EXPECT_EQ(create_error(config),
            "plait_config: dtype is 9; it must be PLAIT_FLOAT32 (0), PLAIT_BFLOAT16 (1) or "
            "PLAIT_FLOAT16 (2)");
  config = small_config();
  config.sink_tokens = 3;
  EXPECT_EQ(create_error(config),
            "plait_config: sink_tokens is 3, but there is no window for them to be outside of; set "
            "window_left");
  config = small_config();
  config.variant_name = "mine";
  EXPECT_EQ(create_error(config),
            "plait_config: variant_source is NULL, but other variant_ fields are set");
  const plait_param param{};
  config.variant_struct = "Mine";
  config.variant_source = "struct Mine {};";
  config.variant_params = &param;
  config.num_variant_params = -1;
  EXPECT_EQ(create_error(config), "plait_config: num_variant_params is -1; it must be >= 0");
  config = small_config();
  config.struct_size = 8;
  EXPECT_NE(create_error(config).find("plait_config.struct_size is 8, but this library's has "),
            std::string::npos);
  EXPECT_EQ(plait_attention_create(nullptr, nullptr), PLAIT_INVALID_ARGUMENT);
}

TEST(CApi, Fp8KeysAndValues) {
  plait_config config = small_config();
  config.kv_dtype = 1;
  EXPECT_EQ(create_error(config),
            "plait_config: kv_dtype is 1; it must be PLAIT_AS_DTYPE (-1), PLAIT_FLOAT8_E4M3FN (3) "
            "or PLAIT_FLOAT8_E5M2 (4)");
  config.kv_dtype = PLAIT_FLOAT8_E4M3FN;
  // Values 1 and 6 times 8 at scale 8, rows 2 and 0; then one key of each is seen.
  std::vector<float> k_new(2 * 8, 0.0f), v_new(2 * 8, 8.0f);
  for (int i = 8; i < 16; ++i) v_new[i] = 48.0f;
  std::vector<uint8_t> k(3 * 8, 0x7f), v = k;
  const int64_t slots[] = {2, 0};
  plait_append_args append;
  plait_append_args_init(&append);
  append.dtype = PLAIT_FLOAT32;
  append.kv_dtype = PLAIT_FLOAT8_E4M3FN;
  append.v_scale = 8;
  append.num_kv_heads = 1;
  append.head_dim_qk = append.head_dim_vo = 8;
  append.num_tokens = 2;
  append.k_new = k_new.data();
  append.v_new = v_new.data();
  append.num_kv_blocks = 3;
  append.k_cache = k.data();
  append.v_cache = v.data();
  append.slot_mapping = slots;
  ASSERT_EQ(plait_append_kv(&append, nullptr), PLAIT_OK) << plait_last_error();
  EXPECT_EQ(v[0], 0x4c);   // 6
  EXPECT_EQ(v[8], 0x7f);   // untouched
  EXPECT_EQ(v[16], 0x38);  // 1
  plait_attention* attention = nullptr;
  ASSERT_EQ(plait_attention_create(&config, &attention), PLAIT_OK) << plait_last_error();
  plait_batch batch;
  plait_batch_init(&batch);
  const int32_t qo_indptr[] = {0, 1, 2}, kv_begin[] = {2, 0}, kv_len[] = {1, 1};
  batch.num_requests = 2;
  batch.qo_indptr = qo_indptr;
  batch.kv.kv_begin = kv_begin;
  batch.kv.kv_len = kv_len;
  ASSERT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_OK) << plait_last_error();
  std::vector<float> q(2 * 8, 1.0f), out(2 * 8, 7.0f);
  plait_run_args run;
  plait_run_args_init(&run);
  run.num_rows = 2;
  run.q = q.data();
  run.num_kv_blocks = 3;
  run.k = k.data();
  run.v = v.data();
  run.out = out.data();
  run.v_scale = 8;
  ASSERT_EQ(plait_run(attention, &run, nullptr), PLAIT_OK) << plait_last_error();
  EXPECT_EQ(out[0], 8.0f);
  EXPECT_EQ(out[15], 48.0f);
  run.k_scale = 0;
  EXPECT_EQ(plait_run(attention, &run, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(), "run: k_scale is 0; it must be finite and > 0");
  plait_attention_destroy(attention);
}

TEST(CApi, WorkspaceOfTheCaller) {
  plait_config config = small_config();
  int64_t bytes = 0;
  ASSERT_EQ(plait_workspace_bytes(&config, &bytes), PLAIT_OK);
  ASSERT_GT(bytes, 0);
  std::vector<char> memory(bytes + 256);
  config.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  config.workspace_bytes = bytes;
  EXPECT_EQ(create_error(config), "");
  config.workspace_bytes = bytes - 1;
  EXPECT_EQ(create_error(config), "attention: the workspace has " + std::to_string(bytes - 1) +
                                      " bytes; this configuration needs " + std::to_string(bytes) +
                                      " (workspace_bytes())");
}

// K = 0, so that a query's output is the mean of V over the keys that mask, bias and cap leave it.
TEST(CApi, MaskBitsAlibiAndRope) {
  plait_config config = small_config();
  config.custom_mask = 1;
  config.alibi = 1;
  plait_attention* attention = nullptr;
  ASSERT_EQ(plait_attention_create(&config, &attention), PLAIT_OK) << plait_last_error();
  const int32_t qo[2] = {0, 1}, kv[2] = {0, 4}, first[1] = {1}, positions[1] = {2};
  plait_batch batch;
  plait_batch_init(&batch);
  batch.num_requests = 1;
  batch.qo_indptr = qo;
  batch.kv.kv_indptr = kv;
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "plan: packed_custom_mask has 0 bytes, but request 0 with 1 queries and 4 masked "
               "keys needs it to have 1");
  const uint8_t bits[1] = {0b101};  // of keys 1, 2, 3: 1 and 3
  batch.mask_bits = bits;
  batch.num_mask_bytes = 1;
  batch.first_masked_key = first;
  batch.q_positions = positions;
  ASSERT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_OK) << plait_last_error();

  const int heads = config.num_qo_heads, kv_heads = config.num_kv_heads, dim = config.head_dim_vo;
  std::vector<float> q(heads * config.head_dim_qk), k(4 * kv_heads * config.head_dim_qk);
  std::vector<float> v(4 * kv_heads * dim), out(heads * dim), slopes(heads, 0.5f);
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < kv_heads * dim; ++i) v[j * kv_heads * dim + i] = static_cast<float>(j);
  }
  plait_param param{"slopes", PLAIT_PARAM_TENSOR, 0, slopes.data(), heads};
  plait_run_args run;
  plait_run_args_init(&run);
  run.num_rows = 1;
  run.q = q.data();
  run.num_kv_blocks = 4;
  run.k = k.data();
  run.v = v.data();
  run.out = out.data();
  run.params = &param;
  run.num_params = 1;
  ASSERT_EQ(plait_run(attention, &run, nullptr), PLAIT_OK) << plait_last_error();
  const float w[3] = {std::exp(-1.0f), std::exp(-0.5f), std::exp(0.5f)};  // of keys 0, 1, 3
  const float want = (w[1] + 3 * w[2]) / (w[0] + w[1] + w[2]);
  for (const float x : out) EXPECT_NEAR(x, want, 1e-5);
  plait_attention_destroy(attention);

  config = small_config();
  config.rope = 1;
  config.rope_theta = -1;
  EXPECT_EQ(create_error(config), "rope: theta is -1, but must be finite and > 0");
}

TEST(CApi, PlanAndRunErrors) {
  const plait_config config = small_config();
  plait_attention* attention = nullptr;
  ASSERT_EQ(plait_attention_create(&config, &attention), PLAIT_OK);
  EXPECT_EQ(std::string(plait_kernel_name(attention)).substr(0, 3), "cpu");
  plait_run_args run;
  plait_run_args_init(&run);
  EXPECT_EQ(plait_run(attention, &run, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(), "run: nothing is planned yet; call plan() first");
  plait_batch batch;
  plait_batch_init(&batch);
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(), "plan: qo_indptr is missing");
  const int32_t zero[1] = {0}, qo[2] = {0, 1}, begin[1] = {-1}, len[1] = {1};
  batch.qo_indptr = zero;
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_OK) << plait_last_error();  // no requests
  EXPECT_EQ(plait_run(attention, &run, nullptr), PLAIT_OK) << plait_last_error();     // no rows
  run.num_rows = 2;
  EXPECT_EQ(plait_run(attention, &run, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(), "run: q is missing");
  batch.num_requests = 1;
  batch.qo_indptr = qo;
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "plan: kv_indptr is missing; ragged K and V need kv_indptr, or kv_begin and kv_len");
  batch.kv.kv_begin = begin;
  batch.kv.kv_len = len;
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "plan: kv_begin[0] is -1; rows of K and V are 0 ... 281474976710656");
  batch.kv.on_device = PLAIT_ON_DEVICE_LENGTHS;
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "plait_batch: kv.on_device has PLAIT_ON_DEVICE_LENGTHS, but the attention is on the "
               "cpu");
  batch.kv.on_device = 32;
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "plait_kv_tables: on_device is 32; it must be a sum of PLAIT_ON_DEVICE_...");
  batch.kv.on_device = 0;
  batch.num_requests = -1;
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(), "plait_batch: num_requests is -1; it must be >= 0");
  EXPECT_EQ(plait_plan(nullptr, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(), "plait_plan: attention is NULL");
  plait_attention_destroy(attention);
  plait_attention_destroy(nullptr);
}

}  // namespace
