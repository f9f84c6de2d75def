"""Public reports: page tables and index arrays (reports.py)."""

import math

import numpy as np
import pytest

import plait
from plait import reference
from plait.reference import from_storage, to_storage

from harness import attend, compare, device_of, same_bits
from reports import BF16, against_reference, near, near_lse
from streams import std, uniform


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
