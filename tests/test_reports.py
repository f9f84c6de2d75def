"""Faults that users of attention kernels have reported in public, as small inputs with right
values.

Every case names its source thread. Streams and recipes: streams.py. tests/gpu runs the same
functions on CUDA; those that need a GPU (large caches, graphs, spinning streams, two devices) are
there. Not reached by the features so far, hence refused by name or absent:
  C12 variable block sizes (BsrKv), C16 learned sinks: such formats and variants do not exist yet.
  C33, C34, C35 (building kernels): tests/jit/; that they exist is checked in test_structure.py.
"""

import itertools
import math
import time

import numpy as np
import pytest

import plait
from plait import reference
from plait.reference import from_storage, to_storage

import harness
from harness import Buffer, Case, attend, compare, device_of, same_bits
from streams import one_hot, residue_weights, std, uniform
from variants import SoftCap, TestVariant

BF16, FP16 = "bfloat16", "float16"
OUT = {BF16: (4e-3, 1.6e-2), FP16: (1e-3, 2e-3), "float32": (1e-5, 1e-5)}


def near(name, got, want, dtype):
    """The tolerance of the collection for out."""
    absolute, relative = OUT[dtype]
    compare(name, got, want, absolute + relative * np.abs(np.asarray(want, np.float64)))


def near_lse(name, got, want, tolerance=1e-3):
    """1e-3 for fp16 and q = 0; 2.5e-3 for bf16 with weights."""
    want = np.asarray(want, np.float64)
    compare(name, got, want, tolerance + 5e-7 * np.where(np.isfinite(want), np.abs(want), 0))


def against_reference(out, lse, data, dtype, q_lens=None, lse_tolerance=None, **visibility):
    q, k, v = data
    row = 0
    for i, n in enumerate(q_lens or [len(q)]):
        want, want_lse = reference.attention(q[row:row + n], k[i], v[i], **visibility)
        near(f"request {i} out", out[row:row + n], want, dtype)
        near_lse(f"request {i} lse", lse[row:row + n], want_lse,
                 lse_tolerance or (1e-3 if dtype == FP16 else 2.5e-3))
        row += n


def window(w):
    """Causal with window_left w; -1: none."""
    if w < 0:
        return TestVariant(plait.causal, visibility={"causal": True})
    return TestVariant(lambda: plait.causal() | plait.sliding_window(w),
                       visibility={"causal": True, "window_left": w})


def test_streams_start_as_stated():
    assert np.allclose(uniform(1, 4), [0.13312304, 0.49156344, 0.94200540, -0.11128163], atol=5e-9)
    assert np.allclose(uniform(7, 4), [-0.22034061, -0.96642351, 0.80152130, 0.16586053], atol=5e-9)


# --- rows that see no key, merging, LSE -----------------------------------------------------------

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


# --- large values, soft cap, unused slots ---------------------------------------------------------

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


# --- which keys a query sees ----------------------------------------------------------------------

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


# --- heads and sizes ------------------------------------------------------------------------------

@pytest.mark.parametrize("q_len", [1, 9])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("group", [*range(1, 9), 12, 16, 32])
def test_c13_group_sizes(device, kernel, group, d, q_len):
    """flashinfer-ai/flashinfer#996, #140; mlc-ai/mlc-llm#2543"""
    q, k, v = one_hot([(q_len, 77)], 2 * group, 2, d)
    v[0][:, 0], v[0][:, 1] = 1, 2
    out, _, _ = attend((q, k, v), device, kernel, format="csr_p16", dtype=BF16)
    want = np.arange(2 * group)[:, None] // group + 1
    compare("out", out, np.broadcast_to(want, out.shape), 0)
    data = std(15, [(q_len, 77)], 2 * group, 2, d, BF16)
    out, lse, _ = attend(data, device, kernel, format="csr_p16", dtype=BF16)
    against_reference(out, lse, data, BF16, causal=True)
    if q_len == 1 and d == 128 and group in (3, 5, 6, 7, 12):
        near("out", out[0, 0, :2], [-0.10385, -0.04592], BF16)


C14_LSE = {40: 5.42898, 80: 5.40336, 96: 5.25397, 112: 5.22738, 192: 5.26076, 256: 5.27854}


@pytest.mark.parametrize("mode", ["ragged", "csr_p16", "decode"])
@pytest.mark.parametrize("d", [40, 56, 72, 80, 96, 112, 160, 192, 224, 256])
def test_c14_head_dims(device, kernel, d, mode):
    """flashinfer-ai/flashinfer#4299, #528"""
    q, k, v = std(17, [(128, 256)], 8, 8, d, FP16)
    if mode == "decode":
        q = q[-1:]
    out, lse, _ = attend((q, k, v), device, kernel, format="csr_p16" if mode == "decode" else mode,
                         dtype=FP16, decode_only=mode == "decode")
    against_reference(out, lse, (q, k, v), FP16, causal=True)
    if mode != "decode" and d in C14_LSE:
        near_lse("lse", lse[0, 0], C14_LSE[d])


@pytest.mark.parametrize("d", [512, 264, 46, 4, 0])
def test_c14_refused_head_dims(device, kernel, d):
    with pytest.raises(ValueError) as error:
        plait.Attention(num_qo_heads=8, num_kv_heads=8, head_dim=d, dtype=FP16, device=device,
                        kernel=kernel, bounds=plait.Bounds(requests=1, query_tokens=128, keys=256))
    assert str(d) in str(error.value) and "8" in str(error.value) and "256" in str(error.value)


C15 = {"decode": ("csr_p16", True), "ragged": ("ragged", False), "paged": ("csr_p16", False),
       "hnd": ("padded_p64_hnd", False)}


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("entry", C15)
def test_c15_fp8_scales(device, kernel, entry, kv_dtype):
    """flashinfer-ai/flashinfer#1023, #4979"""
    format, decode = C15[entry]
    scales = {"kv_dtype": kv_dtype, "k_scale": 0.25, "v_scale": 0.5}
    ones = np.ones((1, 1, 128)), [np.full((64, 1, 128), 0.5)], [np.full((64, 1, 128), 1.5)]
    out, lse, built = attend(ones, device, kernel, format=format, decode_only=decode, **scales)
    stored = [reference.from_storage(x.host, kv_dtype) for x in (built.keys.k, built.keys.v)]
    assert [set(x[np.isfinite(x)]) for x in stored] == [{2.0}, {3.0}]
    near("out", out, np.full((1, 1, 128), 1.5), BF16)
    near_lse("lse", lse, np.full((1, 1), 9.815737))

    q = reference.rounded(3 * uniform(18, (4, 4, 128)), BF16)
    data = q, [uniform(19, (100, 2, 128))], [uniform(20, (100, 2, 128))]
    if decode:  # the last query alone
        data = q[-1:], *data[1:]
    out, lse, built = attend(data, device, kernel, format=format, decode_only=decode, **scales)
    k, v = built.request_keys[0]
    against_reference(out, lse, (data[0], [k], [v]), BF16, causal=True)
    if not decode and kv_dtype == "float8_e4m3fn":
        near("out", out[0, 0, :3], [0.00218, -0.18501, -0.02082], BF16)


# --- large caches and batches ---------------------------------------------------------------------

@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("batch", [65535, 65536, 70000])
def test_c18_many_requests(device, kernel, batch, decode):
    """flashinfer-ai/flashinfer#3125; pytorch/pytorch#142228"""
    dev = device_of(device)
    attn = plait.Attention(
        num_qo_heads=2, num_kv_heads=1, head_dim=64, dtype=BF16, kv=plait.PagedKv(1), device=device,
        kernel=kernel, variant=plait.causal(),
        bounds=plait.Bounds(requests=batch, query_tokens=batch, keys=1, max_q_len=int(decode)))
    k = to_storage(np.zeros((97, 1, 1, 64)), BF16)
    v = to_storage(np.broadcast_to(np.arange(97.0)[:, None, None, None], k.shape), BF16)
    attn.plan(qo_indptr=np.arange(batch + 1), kv_page_indptr=np.arange(batch + 1),
              kv_page_indices=np.arange(batch) % 97, kv_len=np.ones(batch, np.int32))
    q = dev.put(to_storage(np.zeros((batch, 2, 64)), BF16), BF16)
    out, lse = attn.run(q, (dev.put(k, BF16), dev.put(v, BF16)))
    dev.synchronize()
    out = from_storage(dev.get(out, BF16), BF16)
    compare("out", out, np.broadcast_to((np.arange(batch) % 97)[:, None, None], out.shape), 0)
    compare("lse", dev.get(lse), np.zeros((batch, 2)), 0)


def test_c18_many_heads(device, kernel):
    """65536 kv heads: taken, or refused by name."""
    dev, heads = device_of(device), 65536
    try:
        attn = plait.Attention(
            num_qo_heads=heads, num_kv_heads=heads, head_dim=16, dtype=BF16, device=device,
            kernel=kernel, bounds=plait.Bounds(requests=1, query_tokens=1, keys=2))
    except ValueError as error:
        assert "65536" in str(error)
        return
    attn.plan(qo_indptr=np.array([0, 1]), kv_indptr=np.array([0, 2]))
    v = np.zeros((2, heads, 16))
    v[0] = (np.arange(heads) % 97)[:, None]
    v[1] = v[0] + 2
    q = dev.put(to_storage(np.zeros((1, heads, 16)), BF16), BF16)
    out, _ = attn.run(q, tuple(dev.put(to_storage(x, BF16), BF16) for x in (np.zeros_like(v), v)))
    dev.synchronize()
    compare("out", from_storage(dev.get(out, BF16), BF16)[0],
            np.broadcast_to((np.arange(heads) % 97 + 1)[:, None], (heads, 16)), 0)


# --- page tables, layouts, index arrays -----------------------------------------------------------

@pytest.mark.parametrize("format", ["padded_p16", "csr_p16"])
@pytest.mark.parametrize("decode", [True, False])
def test_c19_table_entries_past_the_end(device, kernel, format, decode):
    """vllm-project/vllm#42494; vllm-project/flash-attention#42"""
    kv_lens = (1, 15, 16, 17, 63, 64, 65, 127, 129)
    lengths = [(1 if decode else min(1 + i % 4, kv), kv) for i, kv in enumerate(kv_lens)]
    q_lens = [n for n, _ in lengths]
    data = std(25, lengths, 8, 2, 128, BF16)
    results = []
    for wild in (0, -1, 2147483647, "page"):
        out, lse, built = attend(data, device, kernel, format=format, dtype=BF16, wild=wild,
                                 q_lens=q_lens, decode_only=decode)
        results.append((built.stored_out, lse))
    against_reference(out, lse, data, BF16, q_lens, causal=True)
    for other, other_lse in results[:-1]:
        same_bits(other, results[-1][0], "out ")
        same_bits(other_lse, results[-1][1], "lse ")


def paged_attention(device, page_size=16, **more):
    bounds = plait.Bounds(requests=4, query_tokens=8, keys=64)
    return plait.Attention(**({
        "num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": BF16,
        "kv": plait.PagedKv(page_size), "device": device, "bounds": bounds} | more))


C20 = {  # what is wrong -> (plan arguments, words of the error)
    "last_page_len 17": ({"kv_page_indptr": [0, 2], "kv_page_indices": [0, 1],
                          "kv_last_page_len": [17]}, ("kv_last_page_len[0]", "17", "16")),
    "last_page_len 0": ({"kv_page_indptr": [0, 2], "kv_page_indices": [0, 1],
                         "kv_last_page_len": [0]}, ("kv_last_page_len[0]", " 0")),
    "last_page_len -1": ({"kv_page_indptr": [0, 2], "kv_page_indices": [0, 1],
                          "kv_last_page_len": [-1]}, ("kv_last_page_len[0]", "-1")),
    "indptr decreasing": ({"qo_indptr": [0, 1, 2], "kv_page_indptr": [0, 2, 1],
                           "kv_page_indices": [0, 1], "kv_last_page_len": [1, 1]},
                          ("kv_page_indptr[2]", "1")),
    "indptr not from 0": ({"kv_page_indptr": [1, 2], "kv_page_indices": [0, 1],
                           "kv_last_page_len": [1]}, ("kv_page_indptr[0]", "1")),
    "indptr past the indices": ({"kv_page_indptr": [0, 3], "kv_page_indices": [0, 1],
                                 "kv_last_page_len": [1]}, ("kv_page_indptr[1]", "3", "2")),
    "qo_indptr one short": ({"qo_indptr": [0, 1], "kv_page_indptr": [0, 1, 2],
                             "kv_page_indices": [0, 1], "kv_last_page_len": [1, 1]},
                            ("kv_page_indptr",)),
}


@pytest.mark.parametrize("name", C20)
def test_c20_bad_page_tables(device, name):
    """flashinfer-ai/flashinfer#320, #2896"""
    arguments, words = C20[name]
    attn = paged_attention(device)
    with pytest.raises(ValueError) as error:
        attn.plan(**{n: np.array(x, np.int32) for n, x in ({"qo_indptr": [0, 1]} | arguments).items()})
    for word in words:
        assert word in str(error.value), error.value


def test_c20_page_id_beyond_the_cache(device):
    """Host table: refused by plan, or by run before anything is written."""
    dev = device_of(device)
    attn = paged_attention(device)
    cache = [dev.put(to_storage(np.zeros((4, 16, 1, 64)), BF16), BF16) for _ in range(2)]
    q = dev.put(to_storage(np.zeros((1, 2, 64)), BF16), BF16)
    out = dev.put(to_storage(np.full((1, 2, 64), 7.0), BF16), BF16)
    lse = dev.put(np.full((1, 2), 7.0, np.float32))
    with pytest.raises(ValueError) as error:
        attn.plan(qo_indptr=np.array([0, 1]), kv_page_indptr=np.array([0, 2]),
                  kv_page_indices=np.array([1, 4]), kv_last_page_len=np.array([3]))
        attn.run(q, cache, out=out, lse=lse)
    assert "kv_page_indices[1]" in str(error.value) and "4" in str(error.value)
    dev.synchronize()
    assert (from_storage(dev.get(out, BF16), BF16) == 7).all() and (dev.get(lse) == 7).all()


def test_c20_no_pages(device):
    """A request with 0 pages takes last_page_len 0."""
    dev = device_of(device)
    attn = paged_attention(device)
    attn.plan(qo_indptr=np.array([0, 1, 2]), kv_page_indptr=np.array([0, 0, 1]),
              kv_page_indices=np.array([2]), kv_last_page_len=np.array([0, 5]))
    v = np.full((4, 16, 1, 64), np.nan)
    v[2, :5] = 3
    q = dev.put(to_storage(np.zeros((2, 2, 64)), BF16), BF16)
    out, lse = attn.run(q, [dev.put(to_storage(x, BF16), BF16) for x in (np.where(v == 3, 0, v), v)])
    dev.synchronize()
    out = from_storage(dev.get(out, BF16), BF16)
    compare("out", out, np.array([0.0, 3.0])[:, None, None] * np.ones((2, 2, 64)), 0)
    compare("lse", dev.get(lse), np.repeat([[-np.inf], [math.log(5)]], 2, 1), 1e-6)


@pytest.mark.parametrize("q_len", [1, 70])
@pytest.mark.parametrize("page_size", [1, 3, 5, 16, 48, 64, 128, 256, 544])
def test_c21_page_sizes(device, kernel, page_size, q_len):
    """flashinfer-ai/flashinfer#490, #4347; ROCm/aiter#2996; ai-bond/flash-attention-v100#41"""
    dev = device_of(device)
    q, (k,), (v,) = std(27, [(q_len, 1000)], 8, 2, 128, BF16)
    flat, flat_lse, built = attend((q, [k], [v]), device, kernel, format="ragged", dtype=BF16)
    pages = -(-1000 // page_size)
    order = np.argsort(uniform(27, pages), kind="stable")
    caches = []
    for x in (k, v):
        cache = np.full((pages, page_size, 2, 128), np.nan)
        rows = np.concatenate([x, np.full((pages * page_size - 1000, 2, 128), np.nan)])
        cache[order] = rows.reshape(pages, page_size, 2, 128)
        caches.append(dev.put(to_storage(cache, BF16), BF16))
    attn = plait.Attention(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16,
                           kv=plait.PagedKv(page_size), device=device, kernel=kernel,
                           variant=plait.causal(),
                           bounds=plait.Bounds(requests=1, query_tokens=q_len, keys=1000))
    plan = attn.plan(qo_indptr=np.array([0, q_len]), kv_len=np.array([1000]),
                     kv_page_indptr=np.array([0, pages]), kv_page_indices=order)
    out, lse = attn.run(dev.put(to_storage(q, BF16), BF16), caches)
    dev.synchronize()
    stored, lse = dev.get(out, BF16), dev.get(lse)
    against_reference(from_storage(stored, BF16), lse, (q, [k], [v]), BF16, causal=True)
    if np.array_equal(plan.items, built.plan.items):  # the same cuts: the same bits
        same_bits(stored, built.stored_out, "out ")
        same_bits(lse, flat_lse, "lse ")


def test_c22_repeated_pages(device, kernel):
    """RBLN-SW/vllm-rbln#41"""
    dev = device_of(device)
    attn = plait.Attention(num_qo_heads=2, num_kv_heads=2, head_dim=64, dtype=BF16,
                           kv=plait.PagedKv(4), device=device, kernel=kernel,
                           bounds=plait.Bounds(requests=3, query_tokens=3, keys=12, total_pages=7))
    attn.plan(qo_indptr=np.arange(4), kv_page_indptr=np.array([0, 3, 5, 7]),
              kv_page_indices=np.array([5, 5, 7, 5, 7, 5, 7]), kv_last_page_len=np.array([3, 4, 4]))
    k = np.full((9, 4, 2, 64), np.nan)
    k[[5, 7]] = 0
    v = np.full_like(k, np.nan)
    v[5], v[7] = 1, 4
    q = dev.put(to_storage(uniform(1, (3, 2, 64)), BF16), BF16)
    out, lse = attn.run(q, [dev.put(to_storage(x, BF16), BF16) for x in (k, v)])
    dev.synchronize()
    stored, lse = dev.get(out, BF16), dev.get(lse)
    near("out", from_storage(stored[0], BF16), np.full((2, 64), (8 + 3 * 4) / 11), BF16)
    near_lse("lse", lse[0], np.full(2, 2.397895))
    near("out", from_storage(stored[1], BF16), np.full((2, 64), 2.5), BF16)
    same_bits(stored[2], stored[1], "request 2 ")
    same_bits(lse[2], lse[1], "request 2 lse ")


C23_ARRAYS = ("qo_indptr", "kv_page_indptr", "kv_page_indices", "kv_last_page_len")


@pytest.mark.parametrize("change", ["int64", "stride2"])
@pytest.mark.parametrize("array", C23_ARRAYS)
def test_c23_index_types(device, kernel, array, change):
    """flashinfer-ai/flashinfer#1654, #725"""
    dev = device_of(device)
    attn = plait.Attention(num_qo_heads=32, num_kv_heads=8, head_dim=64, dtype=BF16,
                           kv=plait.PagedKv(2), device=device, kernel=kernel,
                           bounds=plait.Bounds(requests=2, query_tokens=2, keys=2))
    q = np.repeat(uniform(5, (1, 32, 64)), 2, 0)
    k, v = (np.full((4, 2, 8, 64), np.nan) for _ in range(2))
    k[[1, 3], 0], v[[1, 3], 0] = uniform(6, (8, 64)), uniform(7, (8, 64))
    tensors = [dev.put(to_storage(x, BF16), BF16) for x in (q, k, v)]
    arrays = {n: np.array(x, np.int32) for n, x in zip(C23_ARRAYS, ([0, 1, 2], [0, 1, 2], [3, 1], [1, 1]))}

    def rows():
        attn.plan(**arrays)
        out, _ = attn.run(tensors[0], tensors[1:])
        dev.synchronize()
        return dev.get(out, BF16)

    plain = rows()
    same_bits(plain[0], plain[1], "the two requests ")
    compare("out", from_storage(plain[0], BF16),
            np.repeat(reference.rounded(v[1, 0], BF16), 4, 0), 0)
    if change == "int64":
        arrays[array] = arrays[array].astype(np.int64)
    else:
        wide = np.full(2 * len(arrays[array]), 2**30, np.int32)
        wide[::2] = arrays[array]
        arrays[array] = wide[::2]
    same_bits(rows(), plain, f"{array} as {change} ")


def test_c24_slices(device, kernel):
    """ROCm/pytorch#3230; flagos-ai/FlagGems#5896, #5235; flashinfer-ai/flashinfer#3800"""
    dev = device_of(device)
    lengths = [(62, 62), (1, 5000), (1, 62)]
    q_lens = [n for n, _ in lengths]
    q, k, v = std(30, lengths, 16, 4, 128, BF16)
    dense, dense_lse, built = attend((q, k, v), device, kernel, format="ragged", dtype=BF16,
                                     q_lens=q_lens)
    against_reference(dense, dense_lse, (q, k, v), BF16, q_lens, causal=True)
    keys = sum(kv for _, kv in lengths)
    joint = np.full((keys, 24, 128), np.nan)  # q, k, v as slices of one tensor
    joint[:len(q), :16], joint[:, 16:20], joint[:, 20:] = q, np.concatenate(k), np.concatenate(v)
    joint = dev.put(to_storage(joint, BF16), BF16)
    turned = [dev.put(to_storage(np.concatenate(x).transpose(1, 0, 2), BF16), BF16) for x in (k, v)]
    turned = [x.transpose(1, 0, 2) if device == "cpu" else x.permute(1, 0, 2) for x in turned]
    for name, kv in (("slices", (joint[:, 16:20], joint[:, 20:])), ("views", turned)):
        out = Buffer((len(q), 16, 128), BF16, 7.0, pad=[(0, 0), (3, 5), (0, 0)])
        lse = Buffer((len(q), 16), "float32", 7.0, pad=[(0, 0), (0, 4)])
        built.attention.run(joint[:len(q), :16], kv, out=out.upload(dev), lse=lse.upload(dev))
        dev.synchronize()
        same_bits(out.download(), built.stored_out, f"{name}: out ")
        same_bits(lse.download(), dense_lse, f"{name}: lse ")


@pytest.mark.parametrize("moved", ["q", "k", "v", "out", "lse"])
def test_c25_odd_base_pointers(device, kernel, moved):
    """vllm-project/vllm#41257: the same bits, or a refusal that names the tensor and the
    alignment."""
    dev = device_of(device)
    q, (k,), (v,) = std(32, [(3, 70)], 8, 2, 128, BF16)
    _, lse, built = attend((q, [k], [v]), device, kernel, format="ragged", dtype=BF16)
    shapes = {"q": q, "k": k, "v": v, "out": np.full(q.shape, 7.0), "lse": np.full(q.shape[:2], 7.0)}
    tensors = {}
    for name, x in shapes.items():
        dtype = "float32" if name == "lse" else BF16
        shift = int(name == moved)
        flat = np.concatenate([np.full(shift, np.nan), x.ravel()])
        tensors[name] = dev.put(to_storage(flat, dtype), dtype)[shift:].reshape(x.shape)
    try:
        built.attention.run(tensors["q"], (tensors["k"], tensors["v"]), out=tensors["out"],
                            lse=tensors["lse"])
    except ValueError as error:
        assert moved in str(error) and "align" in str(error) and "16" in str(error)
        return
    dev.synchronize()
    same_bits(dev.get(tensors["out"], BF16), built.stored_out, "out ")
    same_bits(dev.get(tensors["lse"]), lse, "lse ")


def test_c25_odd_row_stride(device, kernel):
    """Rows of 130 elements with head_dim 128: the same bits, or refused by name."""
    dev = device_of(device)
    q, (k,), (v,) = std(32, [(3, 70)], 8, 2, 128, BF16)
    _, lse, built = attend((q, [k], [v]), device, kernel, format="ragged", dtype=BF16)
    wide = []
    for x in (q, k, v):
        memory = np.full((*x.shape[:2], 130), np.nan)
        memory[..., :128] = x
        wide.append(dev.put(to_storage(memory, BF16), BF16)[..., :128])
    try:
        out, got = built.attention.run(wide[0], wide[1:])
    except ValueError as error:
        assert "stride" in str(error) or "align" in str(error)
        return
    dev.synchronize()
    same_bits(dev.get(out, BF16), built.stored_out, "out ")
    same_bits(dev.get(got), lse, "lse ")


@pytest.mark.parametrize("layout", ["aligned", "moved", "stride130"])
def test_c25_append(device, layout):
    """append of 40 tokens into pages of 16, with the same layouts."""
    dev = device_of(device)
    new = [reference.rounded(uniform(32 + n, (40, 2, 128)), BF16) for n in range(2)]
    tensors = []
    for x in new:
        if layout == "moved":
            flat = to_storage(np.concatenate([[np.nan], x.ravel()]), BF16)
            tensors.append(dev.put(flat, BF16)[1:].reshape(x.shape))
        elif layout == "stride130":
            memory = np.full((40, 2, 130), np.nan)
            memory[..., :128] = x
            tensors.append(dev.put(to_storage(memory, BF16), BF16)[..., :128])
        else:
            tensors.append(dev.put(to_storage(x, BF16), BF16))
    caches = [Buffer((5, 16, 2, 128), BF16, 7.0) for _ in range(2)]
    order = np.array([4, 0, 2])
    slots = (order[:, None] * 16 + np.arange(16)).ravel()[:40]
    try:
        plait.append_kv(*tensors, [c.upload(dev) for c in caches], kv=plait.PagedKv(16),
                        slot_mapping=slots)
    except ValueError as error:
        assert ("stride" in str(error) or "align" in str(error)) and layout != "aligned"
        return
    dev.synchronize()
    for cache, x in zip(caches, new):
        want = np.full((5, 16, 2, 128), 7.0)
        want.reshape(80, 2, 128)[slots] = x
        same_bits(cache.download(), to_storage(want, BF16), "cache ")


# --- plan, workspace, repeatable results ----------------------------------------------------------

C28_KV = {
    "three with keys": [5, 5, 5] + [0] * 21,
    "none with keys": [0] * 24,
    "one long": [0] * 7 + [100000] + [0] * 16,
}


@pytest.mark.parametrize("name", C28_KV)
def test_c28_requests_without_keys(device, kernel, name):
    """flashinfer-ai/flashinfer#726"""
    if device == "cpu" and name == "one long":
        lengths = [(5, n // 40) for n in C28_KV[name]]  # 100000 keys of 8 heads take GBs in float64
    else:
        lengths = [(5, n) for n in C28_KV[name]]
    data = std(39, lengths, 40, 8, 128, BF16)
    out, lse, _ = attend(data, device, kernel, format="csr_p16", dtype=BF16, q_lens=[5] * 24)
    for i, (_, kv_len) in enumerate(lengths):
        rows = slice(5 * i, 5 * i + 5)
        if kv_len == 0:
            compare(f"request {i} out", out[rows], np.zeros((5, 40, 128)), 0)
            compare(f"request {i} lse", lse[rows], np.full((5, 40), -np.inf), 0)
        else:
            alone = (data[0][rows], [data[1][i]], [data[2][i]])
            against_reference(out[rows], lse[rows], alone, BF16, causal=True)


C29 = {
    "a": dict(num_qo_heads=32, num_kv_heads=2, head_dim=256,
              bounds=dict(requests=512, query_tokens=512, keys=4096, max_q_len=1)),
    "b": dict(num_qo_heads=64, num_kv_heads=4, head_dim=128,
              bounds=dict(requests=1, query_tokens=1, keys=200000)),
    "c": dict(num_qo_heads=32, num_kv_heads=4, head_dim=256,
              bounds=dict(requests=128, query_tokens=128 * 577, keys=577)),
}


def aligned_bytes(dev, n):
    """n bytes of 0xA5 at a 256-byte boundary."""
    if dev.name == "cpu":
        memory = np.full(n + 256, 0xA5, np.uint8)
        start = -memory.ctypes.data % 256
        return memory[start:start + n]
    return dev.put(np.full(n, 0xA5, np.uint8))


@pytest.mark.parametrize("name", C29)
def test_c29_workspace_size(device, kernel, name):
    """vllm-project/vllm#25342; sgl-project/sglang#2102; flashinfer-ai/flashinfer#5177"""
    dev = device_of(device)
    config = dict(C29[name], bounds=plait.Bounds(**C29[name]["bounds"]), dtype=BF16,
                  kv=plait.PagedKv(16), device=device, kernel=kernel, variant=plait.causal())
    n = plait.workspace_bytes(**config)
    if name == "a":
        assert n <= 64 << 20
    for too_few in (n - 256, 0):
        with pytest.raises(ValueError) as error:
            if too_few:
                plait.Attention(**config, workspace=plait.Workspace(buffer=aligned_bytes(dev, too_few)))
            else:
                plait.Attention(**config, workspace=plait.Workspace(device=device, bytes=0))
        assert str(n) in str(error.value) and str(too_few) in str(error.value)
    if device == "cpu":  # the full batches take minutes on two cores; the plan is cut all the same
        lengths = {"a": [(1, 4096)] * 3 + [(1, 77)], "b": [(1, 200000)], "c": [(40, 577)] * 2}[name]
    else:
        lengths = {"a": [(1, 4096)] * 512, "b": [(1, 200000)], "c": [(577, 577)] * 128}[name]
    memory = aligned_bytes(dev, n + 4096)
    attn = plait.Attention(**config, workspace=plait.Workspace(buffer=memory[:n]))
    heads, kv_heads, d = config["num_qo_heads"], config["num_kv_heads"], config["head_dim"]
    pages = [-(-kv // 16) for _, kv in lengths]
    cached = min(max(pages), 64)  # all requests read the same pages: V of page p is 1 + p % 2
    table = np.concatenate([np.arange(p) % 64 for p in pages])
    qo_indptr = np.cumsum([0] + [q for q, _ in lengths])
    attn.plan(qo_indptr=qo_indptr, kv_len=np.array([kv for _, kv in lengths]),
              kv_page_indptr=np.cumsum([0] + pages), kv_page_indices=table)
    k = np.zeros((cached, 16, kv_heads, d), np.float32)
    v = k + (1 + np.arange(cached) % 2)[:, None, None, None]
    q = dev.put(to_storage(np.zeros((1, heads, d), np.float32), BF16), BF16)
    q = (np.tile(q, (qo_indptr[-1], 1, 1)) if device == "cpu"
         else q.expand(int(qo_indptr[-1]), -1, -1).contiguous())
    out, lse = attn.run(q, [dev.put(to_storage(x, BF16), BF16) for x in (k, v)])
    dev.synchronize()
    lse = dev.get(lse)
    ones = 1 + (np.arange(max(pages) * 16) // 16) % 2
    means = np.cumsum(ones) / np.arange(1, len(ones) + 1)
    for i, (q_len, kv_len) in enumerate(lengths):
        seen = np.arange(kv_len - q_len, kv_len) + 1
        rows = slice(qo_indptr[i], qo_indptr[i + 1])
        if i in (0, 1, len(lengths) // 2, len(lengths) - 1):  # all of (c) is 1.2 GB
            got = from_storage(dev.get(out[rows], BF16), BF16)
            near(f"request {i} out", got,
                 np.broadcast_to(means[seen - 1][:, None, None], got.shape), BF16)
        near_lse(f"request {i} lse", lse[rows],
                 np.broadcast_to(np.log(seen)[:, None], lse[rows].shape))
    guard = dev.get(memory)[n:]
    assert (guard == 0xA5).all(), f"byte {np.argmax(guard != 0xA5)} behind the workspace was written"


def test_c32_plan_time(device, kernel):
    """flashinfer-ai/flashinfer#3338; sgl-project/sglang#23500; flashinfer-ai/flashinfer#253

    The bars of planning are measured by `plait bench plan`; here only that a plan never waits.
    """
    batch = 4096
    attn = plait.Attention(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16,
                           kv=plait.PagedKv(16), device=device, kernel=kernel,
                           variant=plait.causal(),
                           bounds=plait.Bounds(requests=batch, query_tokens=batch, keys=8192))
    kv_len = (37 * np.arange(batch)) % 8000 + 1
    pages = -(-kv_len // 16)
    arguments = dict(qo_indptr=np.arange(batch + 1, dtype=np.int32), kv_len=kv_len.astype(np.int32),
                     kv_page_indptr=np.concatenate([[0], np.cumsum(pages)]).astype(np.int32),
                     kv_page_indices=np.arange(pages.sum(), dtype=np.int32))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        attn._plan(arguments["qo_indptr"], {n: x for n, x in arguments.items() if n != "qo_indptr"}, [])
        times.append(time.perf_counter() - start)
    assert sorted(times)[3] < 20e-3, f"plan of 4096 requests took {sorted(times)[3] * 1e3:.1f} ms"


C36 = list(itertools.product([1, 2, 8, 33, 64], ["first", "middle", "last"]))


@pytest.mark.parametrize("q_len", [1, 130])
def test_c36_repeatable(device, kernel, q_len):
    """flashinfer-ai/flashinfer#696, #1675; deepseek-ai/FlashMLA#212"""
    runs = 50 if device != "cpu" else (50 if q_len == 1 else 3)
    batches = C36 if device != "cpu" else [C36[0], (8, "last"), (64, "middle")]
    alone = {}
    for batch, place in batches:
        companions = [(7 * i) % 5000 + 1 for i in range(batch - 1)]
        at = {"first": 0, "middle": (batch - 1) // 2, "last": batch - 1}[place]
        lengths = [(1, kv) for kv in companions]
        lengths.insert(at, (q_len, 3001))
        q_lens = [n for n, _ in lengths]
        x = std(49, [(q_len, 3001)], 32, 8, 128, BF16)
        others = std(149, [(1, kv) for kv in companions] or [(0, 0)], 32, 8, 128, BF16)
        k, v = ([*others[n]] if companions else [] for n in (1, 2))
        k.insert(at, x[1][0])
        v.insert(at, x[2][0])
        data = np.concatenate([others[0][:at], x[0], others[0][at:]]), k, v
        out, lse, built = attend(data, device, kernel, format="csr_p16", dtype=BF16, q_lens=q_lens)
        first = (built.stored_out.copy(), lse.copy())
        for n in range(runs - 1):
            _, again, again_lse = harness.execute(built) if n % 10 == 0 else rerun(built)
            same_bits(again, first[0], f"batch {batch}, run {n}: out ")
            same_bits(again_lse, first[1], f"batch {batch}, run {n}: lse ")
        rows = slice(at, at + q_len)
        if not alone:
            against_reference(out, lse, data, BF16, q_lens, causal=True)
            alone = {"out": out[rows], "lse": lse[rows]}
        two_ulp = 2 * 2.0**-7 * np.abs(alone["out"])
        compare(f"batch {batch}, X {place}, out", out[rows], alone["out"], np.maximum(two_ulp, 1e-3))
        near_lse(f"batch {batch}, X {place}, lse", lse[rows], alone["lse"])


def rerun(built):
    """run() again on the same plan."""
    built.attention.run(built.q.tensor, built.kv, out=built.out.tensor, lse=built.lse.tensor)
    built.device.synchronize()
    return None, built.out.download(), built.lse.download()
