"""FlashInfer's Python API on plait: `import plait.flashinfer as flashinfer`. Needs torch.

Names, argument order, defaults, shapes and the base-2 LSE are those of flashinfer 0.6.18; tensors
on the cpu are taken too. Every argument is honoured or refused by name: docs/flashinfer.md.
"""

from plait.flashinfer.attention import BatchAttention
from plait.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from plait.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from plait.flashinfer.page import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from plait.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from plait.flashinfer.quantization import packbits, segment_packbits

__all__ = [
    "BatchAttention",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
