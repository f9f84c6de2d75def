"""plait.flashinfer: custom masks and position encodings of every wrapper.

tests/gpu runs the same functions on CUDA.
"""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer, reference  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, DIM, HEADS, KV_HEADS, LENS, AlibiSlopes, RopeLlama, check, decode_wrapper, indptr,
    numpy64, paged, plan_decode, plan_prefill, prefill_wrapper, refused, values, workspace,
)
from harness import compare  # noqa: E402
from variants import Masked, SoftCap  # noqa: E402


def random_masks(q_lens, kv_lens, seed=3):
    """bool [q_len, kv_len] of each request; some queries see nothing."""
    rng = np.random.default_rng(seed)
    masks = [rng.random((q, kv)) < 0.6 for q, kv in zip(q_lens, kv_lens)]
    for mask in masks:
        mask[1::5] = False
    return masks


def flat(masks, device):
    return torch.from_numpy(np.concatenate([m.ravel() for m in masks])).to(device)


def bits(masks, device):
    return flashinfer.segment_packbits(flat(masks, device), indptr([m.size for m in masks], device),
                                       "little")[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_custom_masks(device, packed, on_device):
    """Masks of all wrappers, in place of causal, with a window and a soft cap beside them; a plan
    without a mask after one with it has none."""
    q_lens = [1, 3, 9, 30, 0]
    where = device if on_device else "cpu"
    cache = paged(LENS, 16, device)
    masks = random_masks(q_lens, LENS)
    q = values((sum(q_lens), HEADS, DIM), BF16, device, 7)
    mask = ({"packed_custom_mask": bits(masks, where)} if packed
            else {"custom_mask": flat(masks, where)})
    reference_options = {"window_left": 50, "functors": Masked(masks, SoftCap(9.0)),
                         "request": list(range(5))}
    memory = workspace(device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory)
    for _ in range(2):
        plan_prefill(wrapper, q_lens, cache, 16, causal=True, window_left=50, logits_soft_cap=9.0,
                     **mask)
        check(wrapper.run(q, cache.cache, return_lse=True), q, q_lens, cache.k, cache.v,
              **reference_options)
        plan_prefill(wrapper, q_lens, cache, 16, causal=True)
        check(wrapper.run(q, cache.cache), q, q_lens, cache.k, cache.v, causal=True)

    k, v = (torch.from_numpy(np.concatenate(x)).to(device, BF16) for x in (cache.k, cache.v))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(memory)
    ragged.plan(indptr(q_lens), indptr(LENS), HEADS, KV_HEADS, DIM, causal=True, window_left=50,
                logits_soft_cap=9.0, q_data_type=BF16, **mask)
    check(ragged.run(q, k, v, return_lse=True), q, q_lens, cache.k, cache.v, **reference_options)
    ragged.plan(indptr(q_lens), indptr(LENS), HEADS, KV_HEADS, DIM, q_data_type=BF16)
    check(ragged.run(q, k, v), q, q_lens, cache.k, cache.v)  # no stale mask

    one = torch.from_numpy(masks[3]).to(where)
    single = {"packed_custom_mask": flashinfer.packbits(one.flatten(), "little")} if packed else {
        "custom_mask": one}
    q, k, v = q[13:43], k[17:50], v[17:50]
    check(flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True, **single), q, [30],
          cache.k[3:4], cache.v[3:4], functors=Masked([masks[3]], reference.Functors()))


def test_c11_masks(device):
    """C11: the shares of the allowed keys, through packed and unpacked masks; wrong sizes are
    named."""
    q_lens, kv_lens = [3, 1, 2], [5, 7, 9]
    masks = [np.array([[(i + 2 * j + r) % 3 != 0 for j in range(kv)] for i in range(q)])
             for r, (q, kv) in enumerate(zip(q_lens, kv_lens))]
    q = torch.zeros(6, 2, 64, dtype=torch.float16, device=device)
    k = torch.zeros(21, 2, 64, dtype=torch.float16, device=device)
    v = torch.zeros_like(k)
    for begin, n in ((0, 5), (5, 7), (12, 9)):
        v[begin:begin + n, :, :n] = torch.eye(n, dtype=torch.float16, device=device)[:, None]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    packed = torch.tensor([0xB6, 0x6D, 0x6D, 0xDB, 0x6C, 0x03], dtype=torch.uint8)

    def plan(**mask):
        wrapper.plan(indptr(q_lens), indptr(kv_lens), 2, 2, 64, **mask)

    def unpack(n, at):  # bit t of a request is bit t mod 8 of byte t div 8
        return [packed[at + t // 8].item() >> t % 8 & 1 for t in range(n)]

    stated = [unpack(15, 0), unpack(7, 2), unpack(18, 3)]
    for mask in ({"packed_custom_mask": packed}, {"custom_mask": torch.tensor(sum(stated, [])).bool()}):
        plan(**mask)
        out = numpy64(wrapper.run(q, k, v))
        row = 0
        for r, allowed in enumerate(stated):
            allowed = np.array(allowed).reshape(q_lens[r], -1)
            share = np.pad(allowed / allowed.sum(1, keepdims=True), ((0, 0), (0, 64 - kv_lens[r])))
            compare("out", out[row:row + q_lens[r]], np.repeat(share[:, None], 2, 1), 1e-3)
            assert (out[row:row + q_lens[r]][np.repeat(share[:, None] == 0, 2, 1)] == 0).all()
            row += q_lens[r]
    assert [sum(row) for row in (stated[0][:5], stated[0][5:10], stated[0][10:], stated[1],
                                 stated[2][:9], stated[2][9:])] == [3, 3, 4, 5, 6, 6]
    refused(lambda: plan(packed_custom_mask=packed[:-1]), "packed_custom_mask", "5", "6")
    refused(lambda: plan(custom_mask=torch.ones(39).bool()), "custom_mask", "39", "40")
    refused(lambda: plan(custom_mask=torch.ones(40)), "custom_mask", "float32", "bool")
    refused(lambda: plan(custom_mask=torch.ones(40).bool(), packed_custom_mask=packed), "both")
    single = functools.partial(flashinfer.single_prefill_with_kv_cache, q[:3], k[:5], v[:5])
    refused(lambda: single(custom_mask=torch.from_numpy(masks[0].T.copy())), "custom_mask", "[5, 3]",
            "3", "5")


def test_masks_in_graph_mode(device):
    """Later plans bring other masks of other lengths; one without any is refused."""
    int32 = {"dtype": torch.int32, "device": device}
    buffers = [torch.zeros(n, **int32) for n in (4, 4, 30, 3)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "NHD", True, *buffers,
        custom_mask_buf=torch.zeros(9999, dtype=torch.uint8, device=device),
        mask_indptr_buf=torch.zeros(4, **int32))
    for q_lens, lens in (([5, 1, 3], [70, 1, 40]), ([1, 1, 2], [300, 3, 90])):
        cache = paged(lens, 16, device)
        masks = random_masks(q_lens, lens)
        q = values((sum(q_lens), HEADS, DIM), BF16, device, 7)
        plan_prefill(wrapper, q_lens, cache, 16, custom_mask=flat(masks, device))
        check(wrapper.run(q, cache.cache), q, q_lens, cache.k, cache.v, request=[0, 1, 2],
              functors=Masked(masks, reference.Functors()))
    refused(lambda: plan_prefill(wrapper, q_lens, cache, 16), "custom_mask is False", "graph")


@pytest.mark.parametrize("mode", ["ALIBI", "ROPE_LLAMA"])
def test_position_encodings(device, mode):
    q_lens = [1, 0, 9, 30, 20]
    cache = paged(LENS, 16, device)
    q = values((sum(q_lens), HEADS, DIM), BF16, device, 7)
    more = {"pos_encoding_mode": mode, "logits_soft_cap": 20.0 if mode == "ALIBI" else None}
    if mode == "ROPE_LLAMA":
        more |= {"rope_scale": 2.0, "rope_theta": 5e4}
    functors = AlibiSlopes(HEADS, 20.0) if mode == "ALIBI" else RopeLlama(2.0, 5e4)
    wrapper = prefill_wrapper(device)
    plan_prefill(wrapper, q_lens, cache, 16, causal=True, **more)
    check(wrapper.run(q, cache.cache, return_lse=True), q, q_lens, cache.k, cache.v, causal=True,
          functors=functors)
    decode = decode_wrapper(device)
    plan_decode(decode, cache, 16, pos_encoding_mode=mode)
    functors = AlibiSlopes(HEADS) if mode == "ALIBI" else RopeLlama(1.0, 1e4)
    check(decode.run(q[:5], cache.cache), q[:5], [1] * 5, cache.k, cache.v, functors=functors)
    k, v = (values((77, KV_HEADS, DIM), BF16, device, s) for s in (2, 3))
    out = flashinfer.single_decode_with_kv_cache(q[0], k, v, pos_encoding_mode=mode)
    check(out[None], q[:1], [1], [numpy64(k)], [numpy64(v)], functors=functors)
    out = flashinfer.single_prefill_with_kv_cache(q[:9], k, v, pos_encoding_mode=mode)
    check(out, q[:9], [9], [numpy64(k)], [numpy64(v)], functors=functors)


@pytest.mark.parametrize("heads", [6, 12, 40])
def test_c10_alibi(device, heads):
    """C10: the slopes of head counts that are no power of two."""
    slopes = AlibiSlopes(heads).slopes
    if heads == 6:
        assert slopes == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    q = torch.zeros(heads, 64, dtype=BF16, device=device)
    k = torch.zeros(16, heads, 64, dtype=BF16, device=device)
    v = torch.eye(16, 64, dtype=BF16, device=device)[:, None].repeat(1, heads, 1)
    out, lse = flashinfer.single_decode_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI",
                                                      return_lse=True)
    weights = np.exp(-np.array(slopes)[:, None] * (15 - np.arange(16)))
    compare("out", numpy64(out)[:, :16], weights / weights.sum(1, keepdims=True), 4e-3)
    compare("lse", numpy64(lse), np.log2(weights.sum(1)), 1e-3)
