"""The one place that counts the work of attention: floating-point operations and bytes.

Used by `plait replay` and `plait bench`, so that their figures mean the same.
"""

import numpy as np

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def visible_pairs(q_len, kv_len, *, causal=True):
    """(query, key) pairs that attention computes, over all requests (integer arrays or numbers)."""
    q, k = np.asarray(q_len, np.int64), np.asarray(kv_len, np.int64)
    if not causal:
        return int((q * k).sum())
    seen = np.minimum(q, k)  # queries before the first key see nothing
    return int((seen * (2 * k - seen + 1) // 2).sum())


def attention_work(
    q_len, kv_len, *, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, dtype, causal=True
):
    """(flops, bytes) of one run: two GEMMs over visible pairs; q, out, lse and each request's
    keys and values once, as if nothing were shared between requests or read twice."""
    pairs = visible_pairs(q_len, kv_len, causal=causal)
    tokens, keys = int(np.sum(q_len)), int(np.sum(np.where(np.asarray(q_len) > 0, kv_len, 0)))
    flops = 2 * pairs * num_qo_heads * (head_dim_qk + head_dim_vo)
    size = DTYPE_BYTES[dtype]
    moved = (tokens * num_qo_heads + keys * num_kv_heads) * (head_dim_qk + head_dim_vo) * size
    return flops, moved + tokens * num_qo_heads * 4
