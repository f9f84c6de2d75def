"""Data for the tests of plait.flashinfer: caches and batches as torch tensors, NaN wherever no key
is, and results against the float64 reference with the tolerance of harness.py."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from plait import flashinfer, reference
from plait.reference import Functors

from harness import EPSILON, compare
from variants import Rope

HEADS, KV_HEADS, DIM = 4, 2, 64
BF16 = torch.bfloat16
LENS = [1, 0, 16, 33, 200]  # with an empty request among them


class AlibiSlopes(Functors):
    """Slopes for num_heads; then a soft cap, if any."""

    def __init__(self, num_heads, cap=0.0):
        power = 1
        while 2 * power <= num_heads:
            power *= 2
        self.slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
        self.slopes += [2.0 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
        self.cap = cap

    def logits_transform(self, logit, c):
        slope = np.array(self.slopes)[c.qo_head].astype(logit.dtype)
        logit = logit + slope * (c.k_pos - c.q_pos).astype(logit.dtype)
        return self.cap * np.tanh(logit / self.cap) if self.cap else logit


class RopeLlama(Rope):
    def __init__(self, scale, theta):
        super().__init__(False, theta)
        self.scale = scale

    def frequencies(self, dim):
        return super().frequencies(dim) / self.scale


def values(shape, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(device)


def numpy64(tensor):
    return tensor.detach().cpu().double().numpy()


def workspace(device, megabytes=64):
    return torch.empty(megabytes << 20, dtype=torch.uint8, device=device)


@dataclass
class Paged:
    """Requests' keys in a shuffled paged cache."""

    k: list            # float64 [kv_len, heads, dim] of each request
    v: list
    cache: object      # tuple or joint tensor, by layout
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    lens: list

    def tables(self, index_device="cpu", dtype=torch.int32):
        return tuple(x.to(index_device, dtype) for x in (self.indptr, self.indices,
                                                         self.last_page_len))


def paged(lens, page_size, device="cpu", layout="NHD", joint=False, dtype=torch.bfloat16,
          kv_heads=KV_HEADS, dim=DIM, seed=1, spare=3):
    pages = [-(-n // page_size) for n in lens]
    total = sum(pages) + spare
    cache = torch.full((total, 2, page_size, kv_heads, dim), float("nan"), dtype=dtype)
    ids = torch.from_numpy(np.random.default_rng(seed).permutation(total)[:sum(pages)]).int()
    k, v, at = [], [], 0
    for i, (n, count) in enumerate(zip(lens, pages)):
        both = values((2, n, kv_heads, dim), dtype, "cpu", 100 * seed + i)
        for j, page in enumerate(ids[at:at + count].tolist()):
            rows = both[:, j * page_size:(j + 1) * page_size]
            cache[page, :, :rows.shape[1]] = rows
        at += count
        k.append(numpy64(both[0]))
        v.append(numpy64(both[1]))
    if layout == "HND":
        cache = cache.transpose(2, 3)
    cache = cache.contiguous().to(device)
    last = [(n - 1) % page_size + 1 if n else 0 for n in lens]
    return Paged(k, v, cache if joint else (cache[:, 0].contiguous(), cache[:, 1].contiguous()),
                 torch.tensor([0, *np.cumsum(pages)], dtype=torch.int32), ids,
                 torch.tensor(last, dtype=torch.int32), list(lens))


def indptr(lens, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *np.cumsum(lens)], dtype=dtype, device=device)


def check(result, q, q_lens, k, v, *, scale=1.0, v_scale=1.0, dtype=None, **options):
    """Compares out, or (out, lse in base 2), with the reference request by request."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    dtype = str(dtype or q.dtype).removeprefix("torch.")
    assert out.dtype == q.dtype and (lse is None or lse.dtype == torch.float32)
    options = {"sm_scale": scale * q.shape[-1] ** -0.5} | options
    sm_scale = options.pop("sm_scale")
    q, out = numpy64(q), numpy64(out)
    lse = None if lse is None else numpy64(lse)
    begin = 0
    for i, q_len in enumerate(q_lens):
        rows, place = slice(begin, begin + q_len), f"request {i}, "
        per_request = {name: value[i] if isinstance(value, list) else value
                       for name, value in options.items()}
        want, want_lse = reference.attention(q[rows], k[i], v[i], sm_scale=sm_scale, **per_request)
        plain, plain_lse = reference.attention(
            q[rows], k[i], v[i], sm_scale=sm_scale, real=np.float32,
            stored=lambda x: reference.rounded(x, dtype), **per_request)
        want, plain = want * v_scale, plain * v_scale
        error = np.abs(plain - want).max(initial=0)
        roundings = 1 if v_scale == 1.0 else 2  # the result is rounded before it is scaled
        compare("out", out[rows], want, 2 * error + roundings * EPSILON[dtype] * np.abs(want)
                + 4e-6 * np.abs(want).max(initial=0), place)
        if lse is not None:
            seen = np.isfinite(want_lse)
            error = np.abs(plain_lse[seen] - want_lse[seen]).max(initial=0)
            magnitude = np.where(seen, np.abs(want_lse), 0)
            compare("lse", lse[rows], want_lse / np.log(2),
                    (2 * error + 2e-5 + 1e-6 * magnitude) / np.log(2), place)
        begin += q_len
    assert begin == len(out)


def decode_wrapper(device, layout="NHD", **more):
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout, **more)


def prefill_wrapper(device, layout="NHD", **more):
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout, **more)


def plan_decode(wrapper, cache, page_size, tables=None, dtype=torch.bfloat16, **more):
    wrapper.plan(*(tables or cache.tables()), HEADS, KV_HEADS, DIM, page_size, q_data_type=dtype,
                 **more)


def plan_prefill(wrapper, q_lens, cache, page_size, tables=None, dtype=torch.bfloat16, **more):
    wrapper.plan(indptr(q_lens), *(tables or cache.tables()), HEADS, KV_HEADS, DIM, page_size,
                 q_data_type=dtype, **more)


def refused(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    assert len(text) < 400 and "\n" not in text, text
