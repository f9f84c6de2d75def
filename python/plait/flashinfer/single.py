"""What single_decode_... and single_prefill_with_kv_cache share: plan and run in one call."""

import numpy as np

from plait.flashinfer.options import Options, kv_dtype, one_dtype
from plait.flashinfer.pool import Needs, single_pool
from plait.flashinfer.refusals import one_of, scale, tensor
from plait.flashinfer.wrapper import LAYOUTS, run


def single(where, q, k, v, kv_layout, what_is_seen, *, mask=None, o_dtype=None, return_lse,
           sm_scale, **scales):
    """q [rows, num_qo_heads, head_dim_qk]; k, v 3-D by kv_layout; what_is_seen: of Options."""
    one_of(where, "kv_layout", kv_layout, LAYOUTS)
    k, v = (tensor(where, name, x, 3) for name, x in (("k", k), ("v", v)))
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    sm_scale = scale(where, "sm_scale", sm_scale, None)
    dtype = one_dtype(where, q=q.dtype, o_dtype=o_dtype)
    options = Options(q.shape[1], k.shape[1], q.shape[2], v.shape[2], dtype, **what_is_seen,
                      kv_dtype=kv_dtype(where, dtype, k=k.dtype, v=v.dtype))
    q_len, kv_len = len(q), len(k)
    attention = single_pool(q.device).get(options, Needs(1, q_len, kv_len, 0, q_len))
    attention._plan(np.array([0, q_len]), {"kv_indptr": np.array([0, kv_len])}, [], None,
                    mask)
    return run(attention, options, q, (k, v), sm_scale=sm_scale, return_lse=return_lse, **scales)
