"""Public reports: rows that see no key, merging, the LSE (reports.py)."""

import math

import numpy as np
import pytest

import plait
from plait.reference import from_storage, to_storage

import harness
from harness import Case, attend, compare, device_of, same_bits
from reports import BF16, FP16, against_reference, near, near_lse
from streams import one_hot, residue_weights, std, uniform


@pytest.mark.parametrize("dtype", [FP16, BF16, "float32"])
@pytest.mark.parametrize("in_place", [False, True])
def test_c01_merge(device, dtype, in_place):
    """flashinfer-ai/flashinfer#4051; vllm-project/vllm#39148"""
    dev = device_of(device)
    a, b = np.zeros((4, 3, 64)), np.zeros((4, 3, 64))
    lse_a, lse_b = np.full((4, 3), -np.inf, np.float32), np.full((4, 3), -np.inf, np.float32)
    b[1], lse_b[1] = uniform(1, (3, 64)), 2
    a[2], lse_a[2] = uniform(2, (3, 64)), 2
    a[3], b[3], lse_a[3], lse_b[3] = 1, 3, 2, 2
    a, b = to_storage(a, dtype), to_storage(b, dtype)
    v_a, v_b, l_a, l_b = (dev.put(a, dtype), dev.put(b, dtype), dev.put(lse_a), dev.put(lse_b))
    more = {"out": v_a, "out_lse": l_a} if in_place else {}
    out, lse = plait.merge_state(v_a, l_a, v_b, l_b, **more)
    dev.synchronize()
    out, lse = dev.get(out, dtype), dev.get(lse)
    compare("out", from_storage(out[0], dtype), np.zeros((3, 64)), 0)
    compare("lse", lse[0], np.full(3, -np.inf), 0)
    same_bits(out[1], b[1], "row 1 ")
    same_bits(out[2], a[2], "row 2 ")
    compare("lse", lse[1:3], np.full((2, 3), 2.0), 0)
    compare("out", from_storage(out[3], dtype), np.full((3, 64), 2.0), 1e-6)
    compare("lse", lse[3], np.full(3, 2 + math.log(2)), 1e-6)


@pytest.mark.parametrize("dtype", [FP16, BF16, "float32"])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_c01_merge_many(device, dtype, n):
    """Row 0: all empty, and their values NaN. Row 1: only the last is not."""
    dev = device_of(device)
    v = np.full((2, n, 3, 64), np.nan)
    lse = np.full((2, n, 3), -np.inf, np.float32)
    v[1, -1], lse[1, -1] = uniform(1, (3, 64)), 2
    v = to_storage(v, dtype)
    out, out_lse = plait.merge_states(dev.put(v, dtype), dev.put(lse))
    dev.synchronize()
    out, out_lse = dev.get(out, dtype), dev.get(out_lse)
    compare("out", from_storage(out[0], dtype), np.zeros((3, 64)), 0)
    compare("lse", out_lse, np.array([[-np.inf] * 3, [2.0] * 3]), 0)
    same_bits(out[1], v[1, -1], "row 1 ")


@pytest.mark.parametrize("format", ["csr_p16", "ragged"])
@pytest.mark.parametrize("second", [False, True])
def test_c02_more_queries_than_keys(device, kernel, format, second):
    """flashinfer-ai/flashinfer#4452"""
    lengths = [(5, 9)] * second + [(97, 64)]
    out, lse, _ = attend(one_hot(lengths, 32, 8, 128), device, kernel, format=format, dtype=BF16,
                         q_lens=[n for n, _ in lengths])
    out, lse = out[5 * second:], lse[5 * second:]
    compare("out", out[:33], np.zeros((33, 32, 128)), 0)
    compare("lse", lse[:33], np.full((33, 32), -np.inf), 0)
    for i in range(33, 97):
        want = np.broadcast_to(residue_weights(0, i - 33, 128), (32, 128))
        near(f"row {i} out", out[i], want, BF16)
        assert (out[i][want == 0] == 0).all(), f"row {i}: weight on a key that it does not see"
        near_lse(f"row {i} lse", lse[i], np.full(32, math.log(i - 32)))


C03 = {
    "b": ([(1, 3), (0, 0), (1, 2)], 9, 3, 64),
    "c120": ([(0, 0), (0, 0), (0, 0), (1, 1)], 21, 7, 120),
    "c128": ([(0, 0), (0, 0), (0, 0), (1, 1)], 21, 7, 128),
    "d": ([(2, 70), (0, 150), (3, 33)], 8, 2, 128),
}


@pytest.mark.parametrize("format", ["csr_p16", "ragged"])
@pytest.mark.parametrize("name", C03)
def test_c03_empty_requests(device, kernel, name, format):
    """Dao-AILab/flash-attention#1159, #1537, #1619"""
    lengths, heads, kv_heads, d = C03[name]
    data = std(51, lengths, heads, kv_heads, d, BF16)
    q_lens = [n for n, _ in lengths]
    out, lse, _ = attend(data, device, kernel, format=format, dtype=BF16, q_lens=q_lens)
    against_reference(out, lse, data, BF16, q_lens, causal=True)
    begin = 0
    for i, n in enumerate(q_lens):  # as when its request is run alone
        if n:
            alone, alone_lse, _ = attend((data[0][begin:begin + n], [data[1][i]], [data[2][i]]),
                                         device, kernel, format=format, dtype=BF16)
            near(f"request {i} out", out[begin:begin + n], alone, BF16)
            near_lse(f"request {i} lse", lse[begin:begin + n], alone_lse, 2.5e-3)
        begin += n
    if name.startswith("c"):
        v = data[2][3][0]
        compare("out", out[0], np.repeat(v, 3, axis=0), 0)


@pytest.mark.parametrize("format", ["csr_p16", "ragged", "padded_p16"])
@pytest.mark.parametrize("lengths", [(), ((0, 0),) * 4, ((0, 30), (0, 0), (0, 7))])
def test_c03_nothing_to_do(device, kernel, format, lengths):
    """(a) batch 0, (e) all q_len 0: returns at once, nothing is written."""
    case = Case(format, "causal", lengths, BF16, 64)
    _, out, lse = harness.execute(harness.build(case, device, kernel))
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


@pytest.mark.parametrize("format", ["csr_p16", "ragged", "slots", "padded_p16"])
def test_c04_lse_is_natural(device, kernel, format):
    """(a) flashinfer-ai/flashinfer#2113; sgl-project/sglang#35045"""
    q, k, v = one_hot([(1, 4096)], 4, 2, 128)
    _, lse, _ = attend((uniform(3, q.shape), k, v), device, kernel, format=format, dtype=BF16,
                       variant="full")
    near_lse("lse", lse, np.full((1, 4), 8.317766), 1e-4)


def test_c04_split_by_hand(device, kernel):
    """(b) 224 and 32 keys, merged by merge_state, equal the unsplit 256."""
    dev = device_of(device)
    q, (k,), (v,) = std(54, [(8, 256)], 4, 2, 128, BF16)
    parts = [attend((q, [k[s]], [v[s]]), device, kernel, format="ragged", dtype=BF16, variant="full")
             for s in (slice(0, 224), slice(224, 256))]
    args = [dev.put(x, BF16 if n == 0 else None) for built in parts
            for n, x in enumerate((built[2].stored_out, built[1]))]
    out, lse = plait.merge_state(*args)
    dev.synchronize()
    out, lse = from_storage(dev.get(out, BF16), BF16), dev.get(lse)
    whole, whole_lse, _ = attend((q, [k], [v]), device, kernel, format="ragged", dtype=BF16,
                                 variant="full")
    near("out", out, whole, BF16)
    near_lse("lse", lse, whole_lse, 2.5e-3)
    against_reference(out, lse, (q, [k], [v]), BF16)
