"""One decode step over a paged cache, and the attention state of two halves merged.

python examples/decode.py [cpu|cuda]
"""

import sys

import numpy as np

import plait

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
rng = np.random.default_rng(0)
kv_len = np.array([37, 5, 130])  # keys of three requests
block_table = rng.permutation(3 * 9).reshape(3, 9).astype(np.int32)  # pages of 16, in any order
q = rng.standard_normal((3, 8, 64), np.float32)  # one query token each, 8 heads
k_cache, v_cache = rng.standard_normal((2, 27, 16, 2, 64), np.float32)  # 2 kv heads
if device != "cpu":
    q, k_cache, v_cache = (plait.DeviceArray.from_numpy(x, device) for x in (q, k_cache, v_cache))

attn = plait.Attention(
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=64,
    dtype="float32",
    kv=plait.PagedKv(page_size=16),
    device=device,
    variant=plait.causal(),
    bounds=plait.Bounds(requests=8, query_tokens=8, keys=256),
)
plan = attn.plan(qo_indptr=np.arange(4), kv_len=kv_len, block_table=block_table)
out, lse = attn.run(q, (k_cache, v_cache))
print(plan)
print(f"kernel {attn.kernel_name}, out {out.shape}, lse {lse.shape}")
print(f"workspace {attn.workspace_bytes} bytes")

# The same through states: the first 2 pages of every request, then the rest, joined.
first = np.minimum(kv_len, 32)
attn.plan(qo_indptr=np.arange(4), kv_len=first, block_table=block_table)
state_a = attn.run(q, (k_cache, v_cache))
attn.plan(
    qo_indptr=np.arange(4), kv_len=kv_len - first, block_table=np.roll(block_table, -2, axis=1)
)
state_b = attn.run(q, (k_cache, v_cache))
merged, merged_lse = plait.merge_state(*state_a, *state_b)
to_numpy = (lambda x: x) if device == "cpu" else plait.DeviceArray.to_numpy
print("merged states differ by at most", np.abs(to_numpy(merged) - to_numpy(out)).max())
