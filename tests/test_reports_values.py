"""Public reports: large values, soft cap, unused slots (reports.py)."""

import numpy as np
import pytest

import plait
from plait.reference import from_storage

from harness import attend, compare, same_bits
from reports import BF16, FP16, against_reference, near, near_lse
from streams import one_hot, std
from variants import SoftCap, TestVariant


@pytest.mark.parametrize("format", ["ragged", "csr_p16", "csr_p1"])
@pytest.mark.parametrize("batch", [1, 2])
def test_c05_large_negative_scores(device, kernel, format, batch):
    """flashinfer-ai/flashinfer#4267"""
    lengths = [(4, 16)] * batch
    q, k, v = one_hot(lengths, 8, 2, 128)
    q += 64
    for x in k:
        x[...] = -32
        x[:, :, 0] = -(32 + np.arange(16) / 4)[:, None]
    out, lse, _ = attend((q, k, v), device, kernel, format=format, dtype=BF16, variant="full",
                         q_lens=[4] * batch)
    weight = np.exp(-1.41421356 * np.arange(16))
    assert np.allclose((weight / weight.sum())[:4], [0.756883, 0.184011, 0.044736, 0.010877], atol=1e-6)
    want = np.zeros((4 * batch, 8, 128))
    want[..., :16] = weight / weight.sum()
    near("out", out, want, BF16)
    compare("lse", lse, np.full((4 * batch, 8), -23170.196), 0.02)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("format", ["ragged", "csr_p16"])
def test_c06_soft_cap_of_huge_scores(device, kernel, dtype, format):
    """vllm-project/vllm#56578"""
    q, k, v = one_hot([(1, 6)], 1, 1, 64)
    q[..., 0] = 100
    k[0][:, 0, 0] = [10, 30, 50, 100, -100, 44]
    variant = TestVariant(lambda: plait.soft_cap(50.0), SoftCap(50.0))
    out, lse, _ = attend((q, k, v), device, kernel, format=format, dtype=dtype, variant=variant,
                         sm_scale=1.0)
    want = np.zeros((1, 1, 64))
    want[..., [0, 1, 2, 3, 5]] = 0.2
    near("out", out, want, dtype)
    near_lse("lse", lse, [[51.609438]])


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("decode", [True, False])
def test_c07_unused_slots(device, kernel, dtype, d, decode):
    """Dao-AILab/flash-attention#1745; flashinfer-ai/flashinfer#358"""
    lengths = [(1 if decode else min(3, kv), kv) for kv in (1, 3, 130)]
    data = std(8, lengths, 4, 1, d, dtype)
    largest = 65504.0 if dtype == FP16 else float(from_storage(np.uint16(0x7F7F), BF16))
    results = []
    for fill in (0.0, np.nan, np.inf, largest):
        out, lse, built = attend(data, device, kernel, format="csr_p16", dtype=dtype, fill=fill,
                                 spare_pages=32 - 11, q_lens=[n for n, _ in lengths],
                                 decode_only=decode)
        assert built.keys.k.host.shape[0] == 32
        results.append((built.stored_out, lse))
    against_reference(from_storage(results[0][0], dtype), results[0][1], data, dtype,
                      [n for n, _ in lengths], causal=True)
    for out, lse in results[1:]:
        same_bits(out, results[0][0], "out ")
        same_bits(lse, results[0][1], "lse ")
