#include "attention_config.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "host_device/convert.h"
#include "plait/error.h"
#include "tensor_checks.h"
#include "variant_args.h"

namespace plait {
namespace {

// Lengths stay well inside int, so that no sum of a position, a tile and a chunk can overflow.
constexpr int kMaxKeys = 1 << 30, kMaxPackedRows = 1 << 30;
constexpr int kMaxHeadDim = 256;

void check_heads(const AttentionConfig& c) {
  check(c.num_qo_heads >= 1, "attention: num_qo_heads is ", c.num_qo_heads, "; it must be >= 1");
  check(c.num_kv_heads >= 1, "attention: num_kv_heads is ", c.num_kv_heads, "; it must be >= 1");
  check(c.num_qo_heads % c.num_kv_heads == 0, "attention: num_qo_heads is ", c.num_qo_heads,
        "; it must be a multiple of num_kv_heads, ", c.num_kv_heads);
  const auto check_dim = [&](const char* name, int dim) {
    check(dim >= 8 && dim <= kMaxHeadDim && dim % 8 == 0, "attention: ", name, " is ", dim,
          "; it must be a multiple of 8 from 8 to ", kMaxHeadDim,
          dim > kMaxHeadDim ? " (MLA shapes are not supported yet)" : "");
  };
  check_dim("head_dim_qk", c.head_dim_qk);
  check_dim("head_dim_vo", c.head_dim_vo);
}

void check_bounds(const AttentionConfig& c) {
  const Bounds& b = c.bounds;
  check(b.requests >= 1, "attention: bounds.requests is ", b.requests, "; it must be >= 1");
  check(b.query_tokens >= 1, "attention: bounds.query_tokens is ", b.query_tokens,
        "; it must be >= 1");
  check(b.keys >= 1 && b.keys <= kMaxKeys, "attention: bounds.keys is ", b.keys,
        "; it must be 1 ... ", kMaxKeys);
  check(b.total_pages >= 0, "attention: bounds.total_pages is ", b.total_pages,
        "; it must be >= 0 (0: as many as requests and keys allow)");
  check(b.max_q_len >= 0, "attention: bounds.max_q_len is ", b.max_q_len,
        "; it must be >= 0 (0: query_tokens)");
  const long long rows = static_cast<long long>(b.query_tokens) * c.num_qo_heads;
  check(rows <= kMaxPackedRows, "attention: bounds.query_tokens ", b.query_tokens,
        " x num_qo_heads ", c.num_qo_heads, " is ", rows, "; at most ", kMaxPackedRows,
        " are taken");
}

void check_costs(const AttentionConfig& c) {
  check(c.device.type == kCuda, "attention: cost_model is of a GPU, but the device is ",
        to_string(c.device), "; there the costs are those shipped");
  const std::string& name = c.tuned_costs->name;
  check(!name.empty() && std::all_of(name.begin(), name.end(),
                                     [](unsigned char c) {
                                       return std::isalnum(c) || c == ' ' || c == '_' || c == '.';
                                     }),
        "attention: cost_model is named '", name, "'; a name has letters, digits, spaces, _ and .");
  for (const auto& [kind, cost] : c.tuned_costs->kernels) {
    check(kind == "sm90 mixed" || kind == "sm90 wide" || kind == "sm90 decode" || kind == "sm80",
          "attention: cost_model has a kernel '", kind,
          "'; known are sm90 mixed, sm90 wide, sm90 decode and sm80");
    // The planner counts in 64-bit picoseconds.
    constexpr float kMostUs = 1e6f, kMostUsPerKey = 1e3f;
    const auto check_us = [&, &kind = kind](const char* name, float us, float most) {
      check(us >= 0 && us <= most, "attention: cost_model has ", name, " ", us, " of '", kind,
            "'; taken is 0 ... ", most);
    };
    for (int i = 0; i < 2; ++i) {
      check_us("fixed_us", cost.fixed_us[i], kMostUs);
      check_us("us_per_key", cost.us_per_key[i], kMostUsPerKey);
    }
    check_us("merge_us", cost.merge_us, kMostUs);
  }
}

}  // namespace

void check_config(const AttentionConfig& c) {
  check_heads(c);
  check(!is_fp8(c.dtype), "attention: dtype is ", to_string(c.dtype),
        ", but q and out are float32, bfloat16 or float16; K and V may be ", to_string(c.dtype),
        " (kv_dtype)");
  check(c.dtype == Dtype::kFloat32 || c.dtype == Dtype::kBfloat16 || c.dtype == Dtype::kFloat16,
        "attention: dtype is ", static_cast<int>(c.dtype), ", which is no dtype");
  check(!c.kv_dtype || *c.kv_dtype == c.dtype || is_fp8(*c.kv_dtype), "attention: kv_dtype is ",
        to_string(c.dtype_kv()), "; it must be dtype, ", to_string(c.dtype),
        ", or float8_e4m3fn or float8_e5m2");
  check_format("attention", c.kv);
  variant_tables(c.variant, c.head_dim_qk);  // for its checks
  check_bounds(c);
  check(c.device.type == kCpu || c.device.type == kCuda, "attention: device is ",
        to_string(c.device), "; plait runs on cpu and cuda");
  check(c.device.id >= 0, "attention: device.id is ", c.device.id, "; it must be >= 0");
  check(c.device.type != kCpu || c.device.id == 0, "attention: device is cpu:", c.device.id,
        "; there is one cpu, 0");
  if (c.tuned_costs) check_costs(c);
  check(std::isfinite(c.sm_scale) && c.sm_scale >= 0, "attention: sm_scale is ", c.sm_scale,
        "; it must be finite and > 0 (0: 1 / sqrt(head_dim_qk))");
  // What a CPU takes depends on the machine: cpu::instruction_set_of.
  check(c.device.type == kCpu || c.kernel == "auto" || c.kernel == "plain" || c.kernel == "sm80" ||
            c.kernel == "sm90a" || c.kernel.rfind("sm80 ", 0) == 0 ||
            c.kernel.rfind("sm90 ", 0) == 0,
        "attention: kernel is '", c.kernel,
        "'; on cuda it must be auto, plain, sm80, sm90a, or one with a tile, as in "
        "'sm80 128x64x2' and 'sm90 128x144x2'");
  check(c.max_ctas >= 0, "attention: max_ctas is ", c.max_ctas,
        "; it must be >= 0 (0: the whole device)");
  check(c.chunk_keys == 0 || c.chunk_keys == 512 || c.chunk_keys == 1024 || c.chunk_keys == 2048,
        "attention: chunk_keys is ", c.chunk_keys,
        "; it must be 512, 1024 or 2048 keys (0: no invariant mode)");
  check(c.scheduler == Scheduler::kAuto || c.scheduler == Scheduler::kLpt ||
            c.scheduler == Scheduler::kUnsplit || c.scheduler == Scheduler::kPrefixSum,
        "attention: scheduler is ", static_cast<int>(c.scheduler),
        "; it must be auto, lpt, unsplit or prefix_sum");
}

}  // namespace plait
