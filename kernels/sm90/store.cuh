// How a unit leaves the consumers: warpgroups that split the keys join their states, then rows are
// normalised and written, partial ones straight from the accumulator fragment.
#pragma once
#include "host_device/fold.h"
#include "ptx/mma_sync.cuh"
#include "ptx/sync.cuh"
#include "sm90/compute.cuh"
#include "tile/merge.cuh"

namespace plait::sm90 {

// Joins the states of the same 64 rows of all warpgroups that split the keys into warpgroup 0's:
// its output, and what `state` finds. All warpgroups call it. The output of warpgroup w goes
// through rows 64 w ... of Q's buffer `q`, of which the first 64 alone are in use, as much at a
// time as they hold.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void join_warpgroups(Consumer<kConfig, Variant>& consumer, unsigned char* q) {
  constexpr int kThreads = 128 * kConfig.num_consumer_warpgroups;
  constexpr int kCount = padded_dim(kConfig.head_dim_vo) / 2;
  constexpr int kPart = 16 * panels_of(kConfig.head_dim_qk), kParts = (kCount + kPart - 1) / kPart;
  constexpr int kTileQ = Smem<kConfig>::kTileQ, kSplit = key_split(kConfig);
  static_assert(kTileQ >= 64 * kSplit);
  const int warpgroup = threadIdx.x / 128;
  // Elements i ... i + 3 of all threads lie side by side, 16 elements in the giver's rows of a
  // panel.
  const auto exchange = [&](int giver, int i) {
    unsigned char* panel = q + (i / 16 * kTileQ + 64 * giver) * kPanelRowBytes;
    return reinterpret_cast<float4*>(panel) + i % 16 / 4 * 128 + threadIdx.x % 128;
  };
  float scale[kSplit][2];  // of each warpgroup's output
#pragma unroll
  for (int i = 0; i < 2 * kSplit; ++i) scale[i / 2][i % 2] = 1.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    ptx::named_barrier(kJoinReady, kThreads);  // what was there has been read
    if (warpgroup > 0 && warpgroup < kSplit) {
#pragma unroll
      for (int i = 0; i < min(kPart, kCount - part * kPart); i += 4) {
        const float* o = &consumer.o[part * kPart + i];
        *exchange(warpgroup, i) = float4{o[0], o[1], o[2], o[3]};
      }
    }
    ptx::named_barrier(kJoinWritten, kThreads);
    if (warpgroup > 0) continue;
    if (part == 0 && VariantTraits<Variant>::kUseSoftmax) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        SoftmaxState state = consumer.state(r);
        __syncwarp();
#pragma unroll
        for (int giver = 1; giver < kSplit; ++giver) {
          const OutputScales s = merge(state, consumer.state(r, giver));
#pragma unroll
          for (int before = 0; before < giver; ++before) scale[before][r] *= s.a;
          scale[giver][r] = s.b;
        }
        if (threadIdx.x % 4 == 0) consumer.state(r) = state;
      }
    }
#pragma unroll
    for (int i = 0; i < min(kPart, kCount - part * kPart); i += 4) {
      float* o = &consumer.o[part * kPart + i];
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] *= scale[0][e / 2];
#pragma unroll
      for (int giver = 1; giver < kSplit; ++giver) {
        const float4 given = *exchange(giver, i);
        o[0] += scale[giver][0] * given.x;
        o[1] += scale[giver][0] * given.y;
        o[2] += scale[giver][1] * given.z;
        o[3] += scale[giver][1] * given.w;
      }
    }
  }
  __syncwarp();  // one lane arrives for all (release_q), whose loads must be done
}

// The LSE of a state as `store` finds it; in invariant mode fold_unit has put it in its place.
template <KernelConfig kConfig>
PLAIT_DEVICE float lse_to_store(const SoftmaxState& state) {
  if constexpr (kConfig.chunk_keys > 0) return state.max_logit;
  return lse_of(state);
}

// Invariant mode: the unit's output, normalised, is that of a chunk. Of a head with several it is
// folded into what the thread has kept of its two rows since the chunk before; behind the last one,
// or the only one, the fold is left in o, `empty`, and the state that lse_to_store reads. Each
// thread writes and reads its own registers, in whole lines of its warp, which stay in L2.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void fold_unit(const Params& params, Consumer<kConfig, Variant>& consumer,
                            const Unit& unit, int row_begin, bool (&empty)[2]) {
  constexpr bool kUseSoftmax = VariantTraits<Variant>::kUseSoftmax;
  constexpr int kThreads = 128 * kConfig.num_consumer_warpgroups;
  constexpr int kCount = padded_dim(kConfig.head_dim_vo) / 8;  // of four elements, two of each row
  constexpr int kAtOnce = 4;                                   // loads under way: more would spill
  const int rows = unit.partial_row;
  FoldFactors factors[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
  float scale[2] = {1.0f, 1.0f}, lse[2] = {};
  if constexpr (kUseSoftmax) {
#pragma unroll
    for (int r = 0; r < 2; ++r) lse[r] = lse_of(consumer.state(r));
    __syncwarp();  // the four threads of a row have read its state
  }
  const bool has_rows = row_begin + row_of_thread(0) < unit.num_rows;
  if (rows <= kFirstChunk && has_rows) {
    ptx::keep_branch();
    float* kept = params.folds + i64{blockIdx.x} * fold_floats(kConfig) + 4 * threadIdx.x;
    const bool has_kept = rows != kFirstChunk;
    if constexpr (kUseSoftmax) {
      float* kept_states = kept + 4 * kThreads * kCount;
      float x[4] = {};
      if (has_kept) ptx::load_relaxed(kept_states, x);
      FoldedState state[2] = {{x[0], x[1]}, {x[2], x[3]}};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (rows == kFirstChunk) state[r] = {};
        factors[r] = fold(state[r], lse[r]);
      }
      if (rows != kLastChunk) {
        *reinterpret_cast<float4*>(kept_states) =
            float4{state[0].max_lse, state[0].sum, state[1].max_lse, state[1].sum};
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          scale[r] = fold_scale(state[r]);
          empty[r] = state[r].sum == 0.0f;
          lse[r] = fold_lse(state[r]);
        }
      }
    }
#pragma unroll
    for (int first = 0; first < kCount; first += kAtOnce) {
      float before[kAtOnce][4] = {};
      if (has_kept) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          ptx::load_relaxed(kept + 4 * kThreads * (first + i), before[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float* o = &consumer.o[4 * (first + i)];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          o[e] = kUseSoftmax ? fold(factors[e / 2], before[i][e], o[e]) : before[i][e] + o[e];
        }
        if (rows != kLastChunk) {
          *reinterpret_cast<float4*>(kept + 4 * kThreads * (first + i)) =
              float4{o[0], o[1], o[2], o[3]};
        }
      }
      ptx::keep_branch();
    }
  }
  if constexpr (kUseSoftmax) {
    if (threadIdx.x % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) consumer.state(r).max_logit = lse[r];
    }
  }
  __syncwarp();
  if (rows == kFinalRows || rows == kLastChunk) {
#pragma unroll
    for (int i = 0; i < kConfig.head_dim_vo / 2; ++i) {
      consumer.o[i] = folded(consumer.o[i], scale[i / 2 % 2]);
    }
  }
}

// Writes the 16 rows of this warp, first_row ... of the unit, as final. o: as stored; states: of
// the rows; q: the unit's buffer of Q, whose same rows nobody reads any more.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_final_rows(const Params& params, const Unit& unit, int first_row,
                                   const SoftmaxState* states,
                                   const float (&o)[padded_dim(kConfig.head_dim_vo) / 2],
                                   unsigned char* q) {
  using Out = Storage<kConfig.dtype_out>;
  constexpr int kTileQ = Smem<kConfig>::kTileQ, kRows = 16;
  constexpr int kBlocks = padded_dim(kConfig.head_dim_vo) / 8;
  constexpr int kChunks = kConfig.head_dim_vo / kChunkCols, kAll = kRows * kChunks;
  const int lane = threadIdx.x % 32, own_row = first_row + lane % kRows;
  unsigned char* rows = q + first_row * kPanelRowBytes;
#pragma unroll
  for (int block = 0; block < kBlocks; block += 2) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = &o[4 * (block + i / 2) + 2 * (i % 2)];
      w[i] = ptx::pack2<kConfig.dtype_out>(x[0], x[1]);
    }
    ptx::stmatrix_x4(
        ptx::smem_address(rows) + chunk_offset(kTileQ, lane % kRows, block + lane / kRows), w);
  }
  __syncwarp();
  // Not before o has left its registers.
  const PackedRow own = row_of(params, params.plan->row_map, unit, min(own_row, unit.num_rows - 1));
  const bool exists = own_row < unit.num_rows && has_row(params, own.token);
  const i64 own_offset = exists ? out_offset(params.out_stride, own.token, own.qo_head) : -1;
  if (exists && lane < kRows) {
    store_lse<Variant>(params, own.token, own.qo_head, lse_to_store<kConfig>(states[lane]));
  }
#pragma unroll
  for (int i = 0; i < (kAll + 31) / 32; ++i) {
    const int at = 32 * i + lane, row = at / kChunks, chunk = at % kChunks;
    const i64 offset = __shfl_sync(~0u, own_offset, row);
    if (offset < 0 || at >= kAll) continue;
    *reinterpret_cast<uint4*>(static_cast<Out*>(params.out) + offset + chunk * kChunkCols) =
        *reinterpret_cast<const uint4*>(rows + chunk_offset(kTileQ, row, chunk));
  }
  __syncwarp();  // one lane gives the buffer back for all
}

// Writes this thread's row r as final, from the fragment. o: as stored.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_final_row(const Params& params, const ThreadRows& rows, int r,
                                  const SoftmaxState& state,
                                  const float (&o)[padded_dim(kConfig.head_dim_vo) / 2]) {
  using Out = Storage<kConfig.dtype_out>;
  const int t = threadIdx.x % 4;
  if (!rows.valid[r] || !has_row(params, rows.token[r])) return;
  Out* row = static_cast<Out*>(params.out) +
             out_offset(params.out_stride, rows.token[r], rows.qo_head[r]) + 2 * t;
#pragma unroll
  for (int block = 0; block < kConfig.head_dim_vo / 8; ++block) {
    *reinterpret_cast<unsigned*>(row + 8 * block) =
        ptx::pack2<kConfig.dtype_out>(o[4 * block + 2 * r], o[4 * block + 2 * r + 1]);
  }
  if (t == 0)
    store_lse<Variant>(params, rows.token[r], rows.qo_head[r], lse_to_store<kConfig>(state));
}

// Writes this thread's row r as partial state `partial_row`. o: normalised.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_partial_row(const Params& params, int partial_row, int r,
                                    const SoftmaxState& state,
                                    const float (&o)[padded_dim(kConfig.head_dim_vo) / 2]) {
  const int t = threadIdx.x % 4;
  float* row = params.partial_out + static_cast<i64>(partial_row) * kConfig.head_dim_vo + 2 * t;
#pragma unroll
  for (int block = 0; block < kConfig.head_dim_vo / 8; ++block) {
    *reinterpret_cast<float2*>(row + 8 * block) =
        float2{o[4 * block + 2 * r], o[4 * block + 2 * r + 1]};
  }
  if (VariantTraits<Variant>::kUseSoftmax && t == 0) {
    params.partial_lse[partial_row] = lse_to_store<kConfig>(state);
  }
}

// Tells of the unit's partial rows and merges those that are complete thereby. Telling takes its
// time, about 2 us of which nothing is read, and merging 3; so in kernels of few rows a CTA does it
// once for parts that follow one another.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void merge_unit(const Sm90Call<Variant>& call, const Unit& unit, const Unit& next,
                             Smem<kConfig>& smem) {
  const Params& params = call.params;
  const int group_size = params.group_size;
  const auto head_of = [&](int i) {
    const int t = unit.first_row / group_size + i;
    return TokenHead{token_of(*params.plan, unit.first_token, t), unit.kv_head};
  };
  const auto arrive = [&](int num_rows, auto head_of) {
    constexpr int kThreads = 128 * kConfig.num_consumer_warpgroups;
    constexpr int kHeads = merges_together(kConfig) ? num_pending(kConfig) : tile_q(kConfig);
    static_assert(sizeof(int) * merge_scratch(kHeads) <= sizeof(smem.states));
    const auto sync = [] { ptx::named_barrier(kMergeBarrier, kThreads); };
    arrive_and_merge<kConfig, Variant>(
        params, call.variant, *params.plan, head_of, unit.first_row % group_size, num_rows,
        threadIdx.x, kThreads, reinterpret_cast<int*>(smem.states), next.item == nullptr, sync);
    sync();  // the next unit's states go where the scratch is
  };
  if constexpr (!merges_together(kConfig)) {
    arrive(unit.num_rows, head_of);
  } else {
    static_assert(kConfig.num_consumer_warpgroups == 1);
    Pending<kConfig>& pending = smem.pending[threadIdx.x / 32];
    const int lane = threadIdx.x % 32, rows_before = pending.num_rows;
    const int num_rows = rows_before + unit.num_rows;
#pragma unroll 1
    for (int i = lane; i * group_size < unit.num_rows; i += 32) {
      pending.heads[rows_before / group_size + i] = head_of(i);
    }
    // Where tiles hold no whole group there is one at a time.
    const bool waits = next.partial_row >= 0 && group_size <= kConfig.shapes[0].tile_q &&
                       num_rows <= kMergedTogether * group_size;
    __syncwarp();
    if (lane == 0) pending.num_rows = waits ? num_rows : 0;
    if (!waits) arrive(num_rows, [&](int i) { return pending.heads[i]; });
  }
}

// What the variant makes of row r, which is normalised and scaled, of this thread.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void transform_output(const typename Variant::Params& variant, const ThreadRows& rows,
                                   int r, float (&o)[padded_dim(kConfig.head_dim_vo) / 2]) {
#pragma unroll
  for (int block = 0; block < kConfig.head_dim_vo / 8; ++block) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = o[4 * block + 2 * r + e];
      const OutputContext context{rows.request[r], rows.position[r], rows.qo_head[r],
                                  8 * block + threadIdx.x % 4 * 2 + e};
      x = Variant::output_transform(variant, context, x);
    }
  }
}

// All consumer warpgroups call it, each for its rows row_begin ... of the unit; `writes` is false
// for one whose rows were joined into another's. next: the unit behind it; release_q(): gives back
// q, the unit's buffer of Q, if that is still to be done.
template <KernelConfig kConfig, class Variant, class ReleaseQ>
PLAIT_DEVICE void store_unit(const Sm90Call<Variant>& call, Consumer<kConfig, Variant>& consumer,
                             const Unit& unit, int row_begin, bool writes, const Unit& next,
                             unsigned char* q, ReleaseQ release_q) {
  constexpr bool kUseSoftmax = VariantTraits<Variant>::kUseSoftmax;
  using Traits = VariantTraits<Variant>;
  const Params& params = call.params;
  const bool partial = unit.partial_row >= 0;
  auto& o = consumer.o;
  constexpr bool kFolds = kConfig.chunk_keys > 0;
  const bool is_kept =
      kFolds && (unit.partial_row == kFirstChunk || unit.partial_row == kMiddleChunk);
  if (writes) {
    const float unit_scale =
        kFolds || partial ? 1.0f : output_scale<Variant, kConfig.dtype_kv>(params);
    bool empty[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = kUseSoftmax ? consumer.state(r).sum : 1.0f;
      empty[r] = sum == 0.0f;
      const float scale = unit_scale * (kUseSoftmax ? reciprocal(sum) : 1.0f);
#pragma unroll
      for (int i = 2 * r; i < kConfig.head_dim_vo / 2; i += 4) {
        o[i] *= scale;
        o[i + 1] *= scale;
      }
    }
    if (kUseSoftmax && __any_sync(~0u, empty[0] || empty[1])) {
      ptx::keep_branch();
#pragma unroll
      for (int i = 0; i < kConfig.head_dim_vo / 2; ++i) o[i] = empty[i / 2 % 2] ? 0.0f : o[i];
    }
    if constexpr (kFolds) {
      fold_unit<kConfig, Variant>(params, consumer, unit, row_begin, empty);
      if (!partial) {
        const float final_scale = output_scale<Variant, kConfig.dtype_kv>(params);
#pragma unroll
        for (int i = 0; i < kConfig.head_dim_vo / 2; ++i) o[i] *= final_scale;
      }
    }
    const auto rows_of_thread = [&] {
      return thread_rows(params, *params.plan, unit, nullptr, row_begin);
    };
    if constexpr (Traits::kHasOutputTransform) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (partial || empty[r] || is_kept) continue;
        transform_output<kConfig, Variant>(call.variant, rows_of_thread(), r, o);
      }
    }
    if (is_kept) {
      // stays with the thread
    } else if (stages_rows(kConfig) && !partial) {
      const int first_row = threadIdx.x % 128 / 32 * 16;
      store_final_rows<kConfig, Variant>(params, unit, row_begin + first_row, consumer.states(), o,
                                         q);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const ThreadRows rows = rows_of_thread();  // again: registers are scarce
        if (!partial) {
          store_final_row<kConfig, Variant>(params, rows, r, consumer.state(r), o);
        } else if (rows.valid[r]) {
          store_partial_row<kConfig, Variant>(params, unit.partial_row + rows.row[r], r,
                                              consumer.state(r), o);
        }
      }
    }
  }
  release_q();
  if (partial) {
#pragma unroll  // else the compiler keeps it through the merge: only the host knows that the next
    for (float& x : o) x = 0.0f;  // P V does not add to it
    merge_unit<kConfig, Variant>(call, unit, next, consumer.smem);
  }
}

}  // namespace plait::sm90
