#include "cpu/cost_model.h"

#include <algorithm>

#include "executor.h"

namespace plait::cpu {

PlanTarget plan_target(const AttentionConfig& config, int num_threads) {
  const float dims = static_cast<float>(config.head_dim_qk + config.head_dim_vo) / 256.0f;
  const ShapeModel many{kManyRows, 1, kManyRowsFixedUs * dims, kManyRowsUsPerKey * dims};
  const ShapeModel few{kFewRows, 1, kFewRowsFixedUs * dims, kFewRowsUsPerKey * dims};

  PlanTarget target;
  target.num_ctas = kCtasPerThread * num_threads;
  if (config.max_ctas > 0) target.num_ctas = std::min(target.num_ctas, config.max_ctas);
  target.tile_kv = kTileKv;
  target.chunk_keys = config.chunk_keys;
  target.group_size = config.num_qo_heads / config.num_kv_heads;
  target.num_kv_heads = config.num_kv_heads;
  const bool shared = config.kv.num_levels > 1;  // a row block then has the rows of many requests
  if (!shared &&
      static_cast<long long>(config.bounds.longest_q()) * target.group_size <= kFewRows) {
    target.num_shapes = 1;
    target.shapes[0] = few;
  } else {
    target.num_shapes = 2;
    target.shapes[0] = many;
    target.shapes[1] = few;
  }
  target.merge_us = kMergeUs * dims;
  target.min_split_keys = kMinSplitKeys;
  target.kv_bytes = kv_bytes(config);
  target.cost_model = "shipped, cpu";
  target.max_partial_rows = max_partial_rows(config, target.num_ctas, target.shapes[0].tile_q);
  return target;
}

}  // namespace plait::cpu
