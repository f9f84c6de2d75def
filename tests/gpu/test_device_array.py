"""CUDA without a framework: plait.DeviceArray in, DeviceArray out."""

import numpy as np

import plait
from plait import reference
from plait.reference import from_storage, to_storage

from harness import compare


def test_run_merge_and_append(kernel):
    rng = np.random.default_rng(3)
    q, k, v = (reference.rounded(rng.standard_normal((n, h, 128)).astype(np.float32), "bfloat16")
               for n, h in ((3, 8), (70, 2), (70, 2)))
    on = [plait.DeviceArray.from_numpy(to_storage(x, "bfloat16")) for x in (q, k, v)]
    empty = np.full((6, 16, 2, 128), 0x7FC0, np.uint16)  # NaN
    cache = [plait.DeviceArray.from_numpy(empty) for _ in range(2)]
    pages = np.array([4, 0, 5, 2, 1])
    slots = (pages[:, None] * 16 + np.arange(16)).ravel()[:70]
    plait.append_kv(on[1], on[2], cache, kv=plait.PagedKv(16), slot_mapping=slots)
    attn = plait.Attention(num_qo_heads=8, num_kv_heads=2, head_dim=128, device="cuda", kernel=kernel,
                           kv=plait.PagedKv(16), variant=plait.causal(),
                           bounds=plait.Bounds(requests=1, query_tokens=3, keys=70))
    attn.plan(qo_indptr=np.array([0, 3]), kv_len=np.array([70]), block_table=pages[None])
    out, lse = attn.run(on[0], cache)
    nothing = plait.DeviceArray.from_numpy(np.full((3, 8), -np.inf, np.float32))
    out, lse = plait.merge_state(out, lse, on[0], nothing)
    assert isinstance(out, plait.DeviceArray) and out.dtype == "bfloat16"
    want, want_lse = reference.attention(q, k, v, causal=True)
    compare("out", from_storage(out.to_numpy(), "bfloat16"), want, 4e-3 + 1.6e-2 * np.abs(want))
    compare("lse", lse.to_numpy(), want_lse, 2.5e-3)
