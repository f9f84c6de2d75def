"""Public reports: which keys a query sees (reports.py)."""

import math

import numpy as np
import pytest

import plait
from plait.reference import from_storage, to_storage

from harness import attend, compare, device_of
from reports import BF16, FP16, against_reference, near, near_lse
from streams import one_hot, residue_weights, std
from variants import TestVariant


def window(w):
    """Causal with window_left w; -1: none."""
    if w < 0:
        return TestVariant(plait.causal, visibility={"causal": True})
    return TestVariant(lambda: plait.causal() | plait.sliding_window(w),
                       visibility={"causal": True, "window_left": w})


def check_one_hot(out, lse, q_len, kv_len, first_key, d=128):
    """Rows of OH under causal: keys first_key(p) ... p."""
    for i in range(q_len):
        p = i + kv_len - q_len
        if p < 0:
            compare(f"row {i} out", out[i], np.zeros_like(out[i]), 0)
            compare(f"row {i} lse", lse[i], np.full_like(lse[i], -np.inf), 0)
            continue
        want = np.broadcast_to(residue_weights(first_key(p), p, d), out[i].shape)
        near(f"row {i} out", out[i], want, BF16)
        hidden = out[i][want == 0]
        assert (hidden == 0).all(), f"row {i}: weight on a key that it does not see"
        near_lse(f"row {i} lse", lse[i], np.full_like(lse[i], math.log(p - first_key(p) + 1)))


@pytest.mark.parametrize("format", ["ragged", "csr_p16"])
@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (3, 128), (97, 64), (130, 257)])
def test_c08_causal_is_bottom_right(device, kernel, lengths, format):
    """Dao-AILab/flash-attention#282, #402; NVIDIA/cutlass#2336"""
    out, lse, _ = attend(one_hot([lengths], 4, 2, 128), device, kernel, format=format, dtype=BF16)
    check_one_hot(out, lse, *lengths, lambda p: 0)


def test_c08_values(device, kernel):
    data = std(11, [(130, 257)], 4, 2, 128, BF16)
    out, lse, _ = attend(data, device, kernel, format="ragged", dtype=BF16)
    against_reference(out, lse, data, BF16, causal=True)
    near("out", out[0, 0, :3], [-0.04000, -0.01255, 0.05520], BF16)
    near_lse("lse", lse[0, 0], 5.374753, 2.5e-3)


@pytest.mark.parametrize("format", ["ragged", "csr_p16"])
@pytest.mark.parametrize("q_len,kv_len,w", [(1, 300, 127), (300, 300, 127), (64, 300, 63), (64, 300, 0),
                                            (64, 300, 299), (64, 300, -1)])
def test_c09_window(device, kernel, q_len, kv_len, w, format):
    """huggingface/transformers#39408; lightseekorg/tokenspeed#578"""
    out, lse, _ = attend(one_hot([(q_len, kv_len)], 2, 2, 128), device, kernel, format=format,
                         dtype=BF16, variant=window(w), decode_only=q_len == 1)
    check_one_hot(out, lse, q_len, kv_len, lambda p: max(0, p - w) if w >= 0 else 0)
    last = {127: 4.852030, 63: math.log(64), 0: 0.0, 299: math.log(300), -1: math.log(300)}[w]
    near_lse("lse", lse[-1], np.full(2, last))


C10_LSE = {6: [1.490206, 2.345001, 2.657994, 2.743454, 0.932417, 1.995877]}


@pytest.mark.parametrize("heads", [6, 12, 40])
def test_c10_alibi(device, kernel, heads):
    """huggingface/transformers#28380; ml-explore/mlx#343"""
    p = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / p) for i in range(p)]
    slopes += [2 ** (-4 * (i + 1) / p) for i in range(0, 2 * (heads - p), 2)]
    variant = TestVariant(lambda: plait.causal() | plait.alibi(),
                          arguments=lambda h, d: {"slopes": plait.alibi_slopes(h)})
    out, lse, _ = attend(one_hot([(1, 16)], heads, heads, 64), device, kernel, format="csr_p16",
                         dtype=BF16, variant=variant)
    weight = np.exp(-np.array(slopes)[:, None] * (15 - np.arange(16)))
    want = np.zeros((1, heads, 64))
    want[0, :, :16] = weight / weight.sum(1, keepdims=True)
    near("out", out, want, BF16)
    near_lse("lse", lse[0], np.log(weight.sum(1)))
    if heads in C10_LSE:
        near_lse("lse", lse[0], C10_LSE[heads])


C11_LENGTHS = [(3, 5), (1, 7), (2, 9)]


def c11_attention(device, kernel, requests=3):
    return plait.Attention(
        num_qo_heads=2, num_kv_heads=2, head_dim=64, dtype=FP16, device=device, kernel=kernel,
        variant=plait.custom_mask(),
        bounds=plait.Bounds(requests=requests, query_tokens=16, keys=32))


@pytest.mark.parametrize("form", ["bytes", "indptr", "bools"])
def test_c11_mask_bits(device, kernel, form):
    """flashinfer-ai/flashinfer#3176, #2201"""
    dev = device_of(device)
    q, k, v = one_hot(C11_LENGTHS, 2, 2, 64)
    masks = [(np.arange(q_len)[:, None] + 2 * np.arange(kv_len) + r) % 3 != 0
             for r, (q_len, kv_len) in enumerate(C11_LENGTHS)]
    packed = np.array([0xb6, 0x6d, 0x6d, 0xdb, 0x6c, 0x03], np.uint8)
    masks_given = {"bytes": {"packed_custom_mask": packed},
                   "indptr": {"packed_custom_mask": packed, "mask_indptr": np.array([0, 2, 3, 6])},
                   "bools": {"custom_mask": np.concatenate([m.ravel() for m in masks])}}[form]
    attn = c11_attention(device, kernel)
    attn.plan(qo_indptr=np.array([0, 3, 4, 6]), kv_indptr=np.array([0, 5, 12, 21]), **masks_given)

    def put(x):
        return dev.put(to_storage(x, FP16), FP16)

    out, lse = attn.run(put(q), (put(np.concatenate(k)), put(np.concatenate(v))))
    dev.synchronize()
    out, lse = from_storage(dev.get(out, FP16), FP16), dev.get(lse)
    counts = [row.sum() for mask in masks for row in mask]
    assert counts == [3, 3, 4, 5, 6, 6]
    want = np.zeros((6, 2, 64))
    for i, row in enumerate(row for mask in masks for row in mask):
        want[i, :, :len(row)] = row / row.sum()
    near("out", out, want, FP16)
    assert (out[want == 0] == 0).all()
    near_lse("lse", lse, np.broadcast_to(np.log(counts)[:, None], lse.shape))


@pytest.mark.parametrize("mask,sizes", [
    ({"custom_mask": np.ones(150, bool)}, ("150", "200")),
    ({"packed_custom_mask": np.ones(24, np.uint8)}, ("24", "25")),
    ({"custom_mask": np.ones((20, 10), bool)}, ("[20, 10]", "[10, 20]"))],
    ids=["10x15", "a byte short", "transposed"])
def test_c11_refused(device, kernel, mask, sizes):
    with pytest.raises(ValueError) as error:
        c11_attention(device, kernel).plan(qo_indptr=np.array([0, 10]),
                                           kv_indptr=np.array([0, 20]), **mask)
    assert all(size in str(error.value) for size in sizes), str(error.value)
