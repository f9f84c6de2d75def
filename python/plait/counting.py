"""The one place that counts the work of attention: floating-point operations and bytes.

Used by `plait replay` and `plait bench`, so that their figures mean the same.
"""

import numpy as np

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def _triangle(q, k):
    """Sum over the last q of k numbers 1 ... k; of all where q > k."""
    terms = np.clip(k, 0, q)
    return terms * (2 * k - terms + 1) // 2


def visible_pairs(q_len, kv_len, *, causal=True, window_left=-1):
    """(query, key) pairs that attention computes, over all requests (integer arrays or numbers)."""
    q, k = np.asarray(q_len, np.int64), np.asarray(kv_len, np.int64)
    pairs = _triangle(q, k) if causal else q * k
    if window_left >= 0:
        pairs = pairs - _triangle(q, k - 1 - window_left)  # a query hides position - window keys
    return int(pairs.sum())


def attention_work(
    q_len,
    kv_len,
    *,
    num_qo_heads,
    num_kv_heads,
    head_dim_qk,
    head_dim_vo,
    dtype,
    kv_dtype=None,
    causal=True,
    window_left=-1,
    shared_len=0,
):
    """(flops, bytes) of one run: two GEMMs over visible pairs; q, out, lse and each request's
    keys and values once, and once for all of them the first shared_len keys, which are the same.
    Keys that a window hides from all queries are not counted (nor are any then shared)."""
    if shared_len and window_left >= 0:
        raise ValueError("attention_work: shared_len with window_left is not counted")
    q_len, kv_len = np.broadcast_arrays(np.asarray(q_len, np.int64), np.asarray(kv_len, np.int64))
    pairs = visible_pairs(q_len, kv_len, causal=causal, window_left=window_left)
    read = np.where(q_len > 0, kv_len, 0)
    if window_left >= 0:
        read = np.minimum(read, q_len + window_left)
    dims = head_dim_qk + head_dim_vo
    tokens = int(q_len.sum())
    keys = int(read.sum()) - shared_len * max(int((q_len > 0).sum()) - 1, 0)
    flops = 2 * pairs * num_qo_heads * dims
    moved = tokens * num_qo_heads * dims * DTYPE_BYTES[dtype]
    moved += keys * num_kv_heads * dims * DTYPE_BYTES[kv_dtype or dtype]
    return flops, moved + tokens * num_qo_heads * 4
