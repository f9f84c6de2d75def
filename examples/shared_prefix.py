"""A shared prefix as two levels: its keys are read once for all requests under it.

python examples/shared_prefix.py
"""

import numpy as np

import plait

rng = np.random.default_rng(0)
prefix, own = 64, np.array([3, 10, 0, 21])  # keys of the prefix, and of each request alone
k, v = rng.standard_normal((2, prefix + own.sum(), 2, 64), np.float32)
q = rng.standard_normal((4, 8, 64), np.float32)
qo_indptr = np.arange(5)
begin = prefix + np.concatenate([[0], np.cumsum(own)[:-1]])
shape = dict(
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=64,
    dtype="float32",
    bounds=plait.Bounds(requests=4, query_tokens=4, keys=128),
)

attn = plait.Attention(kv=plait.ComposedKv(plait.RaggedKv(), num_levels=2), **shape)
plan = attn.plan(
    qo_indptr=qo_indptr,
    levels=[
        plait.Level(
            node_indptr=np.array([0, 4]),
            node_requests=np.arange(4),  # one node over all four
            kv_begin=np.array([0]),
            kv_len=np.array([prefix]),
        ),
        plait.Level(kv_begin=begin, kv_len=own),
    ],
)  # node i is request i
out, lse = attn.run(q, (k, v))
print(plan)

# The same, request by request, over a copy of prefix and own keys.
flat = plait.Attention(kv=plait.RaggedKv(), **shape)
rows = np.concatenate([np.r_[0:prefix, b : b + n] for b, n in zip(begin, own)])
flat.plan(qo_indptr=qo_indptr, kv_indptr=np.concatenate([[0], np.cumsum(own + prefix)]))
expected, _ = flat.run(q, (k[rows], v[rows]))
print("largest difference from the flat batch:", np.abs(out - expected).max())
assert np.abs(out - expected).max() < 1e-5
