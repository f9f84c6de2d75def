"""Public reports: heads, head dims, fp8 scales, large caches and batches (reports.py)."""

import math
import mmap

import numpy as np
import pytest

import plait
from plait import reference
from plait.reference import from_storage, to_storage

from harness import attend, compare, device_of
from reports import BF16, FP16, against_reference, near, near_lse
from streams import one_hot, std, uniform


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


def zeros_where_memory_is_only_touched(device, shape):
    """A bfloat16 tensor of zeros, far larger than what of it is used: on the host no pages of it
    exist before that."""
    if device != "cpu":
        import torch

        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    no_reserve = 0x4000  # MAP_NORESERVE, which mmap names from Python 3.11 on
    memory = mmap.mmap(-1, 2 * math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(memory, np.uint16).reshape(shape)


def test_c17_large_cache(device, kernel):
    """flashinfer-ai/flashinfer#3130: 8.6 GB each of K and V; offsets past 2^31 and 2^32 elements.
    (Its pages of 32 keys, 1 kv head and d 512 are as large; that head dim is refused, see C14.)"""
    pages, size, heads, d = 262146, 16, 8, 128
    if device != "cpu":
        import torch

        if torch.cuda.mem_get_info()[0] < 19 << 30:
            pytest.skip("C17 needs 19 GB of device memory")
    dev = device_of(device)

    def put(x):
        return dev.put(to_storage(x, BF16), BF16)

    k, v = (zeros_where_memory_is_only_touched(device, (pages, size, heads, d)) for _ in range(2))
    for page, value in ((0, 1), (131071, 2), (131072, 3), (262145, 4), (1, -5)):
        v[page] = put(np.full((size, heads, d), value))
    q = put(uniform(17, (4, heads, d)))
    attn = plait.Attention(num_qo_heads=heads, num_kv_heads=heads, head_dim=d, dtype=BF16,
                           kv=plait.PagedKv(size), device=device, kernel=kernel,
                           bounds=plait.Bounds(requests=4, query_tokens=4, keys=64))
    ids = np.array([0, 131071, 131072, 262145])

    def run(q, **plan):
        attn.plan(**plan, kv_page_indices=ids)
        out, _ = attn.run(q, (k, v))
        dev.synchronize()
        return from_storage(dev.get(out, BF16), BF16)

    out = run(q, qo_indptr=np.arange(5), kv_len=np.full(4, 16), kv_page_indptr=np.arange(5))
    compare("out", out, np.arange(1.0, 5)[:, None, None] * np.ones((4, heads, d)), 0)
    out = run(q[:1], qo_indptr=np.array([0, 1]), kv_len=np.array([64]),
              kv_page_indptr=np.array([0, 4]))
    compare("out", out, np.full((1, heads, d), 2.5), 0)
    one = put(np.ones((1, heads, d)))
    plait.append_kv(one, one, (k, v), kv=plait.PagedKv(size),
                    slot_mapping=np.array([262145 * size + 3]))
    dev.synchronize()
    for at, value in (((262145, 3), 1), ((1, 3), -5), ((262145, 4), 4)):
        compare(f"v{at}", from_storage(dev.get(v[at], BF16), BF16), np.full((heads, d), value), 0)


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
