"""plait.flashinfer computes what the published API documents: every wrapper against the reference.

tests/gpu runs the same functions on CUDA.
"""

import functools
import math
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer, reference  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    DIM, HEADS, KV_HEADS, AlibiSlopes, RopeLlama, check, decode_wrapper, indptr, numpy64, paged,
    plan_decode, plan_prefill, prefill_wrapper, values, workspace,
)
from harness import compare  # noqa: E402
from variants import Masked, SoftCap  # noqa: E402

BF16 = torch.bfloat16
LENS = [1, 0, 16, 33, 200]  # with an empty request among them


def refused(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    assert len(text) < 400 and "\n" not in text, text


# --- single requests ------------------------------------------------------------------------------

@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_len", [0, 1, 65, 301])
def test_single_decode(device, layout, kv_len):
    q = values((HEADS, DIM), BF16, device, 1)
    k, v = (values((kv_len, KV_HEADS, DIM), BF16, device, s) for s in (2, 3))
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(),
                                            v.transpose(0, 1).contiguous())
    out, lse = flashinfer.single_decode_with_kv_cache(q, *given, layout, return_lse=True)
    assert out.shape == q.shape and lse.shape == (HEADS,)
    check((out[None], lse[None]), q[None], [1], [numpy64(k)], [numpy64(v)])
    out = flashinfer.single_decode_with_kv_cache(
        q, *given, layout, use_tensor_cores=True, window_left=7, logits_soft_cap=5.0, sm_scale=0.3,
        q_scale=0.5, k_scale=2.5, v_scale=0.25)
    check(out[None], q[None], [1], [numpy64(k)], [numpy64(v)], sm_scale=0.3 * 0.5 * 2.5,
          v_scale=0.25, window_left=7, functors=SoftCap(5.0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [(5, 5), (17, 130), (9, 4), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
def test_single_prefill(device, causal, lens, dtype):
    q = values((lens[0], HEADS, DIM), dtype, device, 1)
    k, v = (values((lens[1], KV_HEADS, d), dtype, device, s) for s, d in ((2, DIM), (3, 32)))
    options = {"causal": causal, "window_left": 11, "sm_scale": 0.2}
    for backend in ("auto", "fa2", "fa3"):
        result = flashinfer.single_prefill_with_kv_cache(
            q, k, v, backend=backend, use_fp16_qk_reduction=True, return_lse=True, **options)
        check(result, q, [lens[0]], [numpy64(k)], [numpy64(v)], **options)
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    again = flashinfer.single_prefill_with_kv_cache_return_lse(
        q, k, v, kv_layout="HND", o_dtype=dtype, **options)
    assert all(torch.equal(a, b) for a, b in zip(result, again))


# --- decode ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joint", [False, True])
def test_batch_decode(device, page_size, layout, joint):
    cache = paged(LENS, page_size, device, layout, joint)
    q = values((len(LENS), HEADS, DIM), BF16, device, 7)
    wrapper = decode_wrapper(device, layout)
    plan_decode(wrapper, cache, page_size)
    check(wrapper.run(q, cache.cache, return_lse=True), q, [1] * len(LENS), cache.k, cache.v)
    if page_size == 1:  # the page's dimension may be left out
        page_dim = (2 if joint else 1) + (layout == "HND")
        flat = (cache.cache.squeeze(page_dim) if joint
                else tuple(x.squeeze(page_dim) for x in cache.cache))
        assert torch.equal(wrapper.run(q, flat), wrapper.run(q, cache.cache))


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("on_device", [False, True])
def test_index_arrays_of_either_type_anywhere(device, index, on_device):
    cache = paged(LENS, 16, device)
    q = values((len(LENS), HEADS, DIM), BF16, device, 7)
    wrapper = decode_wrapper(device)
    plan_decode(wrapper, cache, 16, cache.tables(device if on_device else "cpu", index))
    check(wrapper.run(q, cache.cache), q, [1] * len(LENS), cache.k, cache.v)


def test_decode_arguments(device):
    cache = paged(LENS, 16, device)
    q = values((len(LENS), HEADS, DIM), BF16, device, 7)
    wrapper = decode_wrapper(device, use_tensor_cores=True, backend="fa2")
    assert wrapper.use_tensor_cores and not wrapper.is_cuda_graph_enabled
    seq_lens = torch.tensor(LENS, dtype=torch.int32)
    plan_decode(wrapper, cache, 16, window_left=9, logits_soft_cap=4.0, sm_scale=0.4,
                seq_lens=seq_lens, non_blocking=False, kv_data_type="bfloat16", o_data_type=BF16)
    out, lse = torch.full_like(q, 7), torch.full((len(q), HEADS), 7.0, device=device)
    got = wrapper.run(q, cache.cache, q_scale=2.0, k_scale=torch.tensor(0.5), v_scale=2, out=out,
                      lse=lse, return_lse=True, window_left=9, enable_pdl=True)
    assert got[0] is out and got[1] is lse
    options = {"window_left": 9, "functors": SoftCap(4.0)}
    check(got, q, [1] * len(q), cache.k, cache.v, sm_scale=0.4, v_scale=2.0, **options)
    assert wrapper.run(q, cache.cache, out=out) is out  # lse is not asked for
    lse.fill_(7)
    wrapper.run(q, cache.cache, lse=lse)  # but written where given
    check((out, lse), q, [1] * len(q), cache.k, cache.v, sm_scale=0.4, **options)
    again = wrapper.run_return_lse(q, cache.cache)
    check(again, q, [1] * len(q), cache.k, cache.v, sm_scale=0.4, **options)


def test_decode_of_several_queries(device):
    """q_len_per_req: causal among a request's queries."""
    lens, n = [3, 40, 129], 3
    cache = paged(lens, 16, device)
    q = values((n * len(lens), HEADS, DIM), BF16, device, 7)
    wrapper = decode_wrapper(device)
    plan_decode(wrapper, cache, 16, q_len_per_req=n)
    check(wrapper.run(q, cache.cache, return_lse=True), q, [n] * 3, cache.k, cache.v, causal=True)
    with pytest.warns(DeprecationWarning, match="q_len_per_req"):
        wrapper.run(q, cache.cache, q_len_per_req=n)
    with pytest.warns(DeprecationWarning):
        refused(lambda: wrapper.run(q, cache.cache, q_len_per_req=1), "q_len_per_req is 1", "3")


def test_decode_arguments_by_position_are_deprecated(device):
    cache = paged(LENS, 16, device)
    q = values((len(LENS), HEADS, DIM), BF16, device, 7)
    wrapper = decode_wrapper(device)
    with pytest.warns(DeprecationWarning, match="by name"):
        wrapper.begin_forward(*cache.tables(), HEADS, KV_HEADS, DIM, 16, "NONE", 5, None, BF16)
    check(wrapper.run(q, cache.cache), q, [1] * len(LENS), cache.k, cache.v, window_left=5)
    wrapper.end_forward()
    arguments = (*cache.tables(), HEADS, KV_HEADS, DIM, 16)
    refused(lambda: wrapper.plan(*arguments, "NONE", pos_encoding_mode="NONE"), "pos_encoding_mode",
            error=TypeError)
    refused(lambda: wrapper.plan(*arguments, *range(17)), "17", error=TypeError)


def test_fast_decode_plan(device):
    cache = paged(LENS, 16, device)
    q = values((len(LENS), HEADS, DIM), BF16, device, 7)
    wrapper = decode_wrapper(device)
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    given, indices, last = cache.tables()
    wrapper.begin_forward(torch.zeros_like(given), indices, last, HEADS, KV_HEADS, DIM, 16,
                          data_type=BF16, global_override_indptr_cpu=given)
    check(wrapper.run(q, cache.cache), q, [1] * len(LENS), cache.k, cache.v)


# --- prefill --------------------------------------------------------------------------------------

@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_batch_prefill_paged(device, page_size, layout, causal):
    q_lens = [1, 2, 9, 40, 0]
    cache = paged(LENS, page_size, device, layout, joint=causal)
    q = values((sum(q_lens), HEADS, DIM), BF16, device, 7)
    wrapper = prefill_wrapper(device, layout)
    plan_prefill(wrapper, q_lens, cache, page_size, causal=causal)
    check(wrapper.run(q, cache.cache, return_lse=True), q, q_lens, cache.k, cache.v, causal=causal)


def test_prefill_arguments(device):
    q_lens = [1, 0, 9, 30, 3]
    cache = paged(LENS, 16, device)
    q = values((sum(q_lens), HEADS, DIM), BF16, device, 7)
    wrapper = prefill_wrapper(device, backend="fa3")
    plan_prefill(wrapper, q_lens, cache, 16, causal=True, window_left=20, logits_soft_cap=3.0,
                 sm_scale=0.3, seq_lens=torch.tensor(LENS), seq_lens_q=torch.tensor(q_lens),
                 max_token_per_sequence=30, max_sequence_kv=200, head_dim_vo=DIM,
                 token_pos_in_items_len=0, disable_split_kv=False, kv_data_type=BF16)
    out, lse = torch.full_like(q, 7), torch.full((len(q), HEADS), 7.0, device=device)
    got = wrapper.run(q, cache.cache, q_scale=2.0, k_scale=0.5, v_scale=3.0, out=out, lse=lse,
                      return_lse=True, window_left=20)
    assert got[0] is out and got[1] is lse
    options = {"causal": True, "window_left": 20, "functors": SoftCap(3.0)}
    check(got, q, q_lens, cache.k, cache.v, sm_scale=0.3, v_scale=3.0, **options)
    for more, words in (
        ({"seq_lens": torch.tensor([1, 0, 16, 33, 199])}, ("seq_lens",)),
        ({"seq_lens_q": torch.tensor([1, 0, 9, 30])}, ("seq_lens_q",)),
        ({"max_token_per_sequence": 29}, ("max_token_per_sequence is 29", "30")),
        ({"max_sequence_kv": 199}, ("max_sequence_kv is 199", "200")),
    ):
        refused(lambda: plan_prefill(wrapper, q_lens, cache, 16, **more), *words)  # noqa: B023
    assert torch.equal(wrapper.run(q, cache.cache, q_scale=2.0, k_scale=0.5, v_scale=3.0), out), \
        "a refused plan leaves the one before"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dims", [(64, 64), (64, 32)], ids=str)
def test_batch_prefill_ragged(device, layout, dims):
    q_lens, kv_lens = [3, 0, 20, 5], [3, 7, 150, 0]
    q = values((sum(q_lens), HEADS, dims[0]), torch.float16, device, 1)
    k, v = (values((sum(kv_lens), KV_HEADS, d), torch.float16, device, s)
            for s, d in zip((2, 3), dims))
    ends = np.cumsum(kv_lens)
    split_k, split_v = ([numpy64(x[e - n:e]) for e, n in zip(ends, kv_lens)] for x in (k, v))
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(indptr(q_lens), indptr(kv_lens), HEADS, KV_HEADS, dims[0], dims[1], causal=True,
                 v_indptr=indptr(kv_lens), o_indptr=indptr(q_lens, dtype=torch.int64))
    result = wrapper.run(q, *given, return_lse=True)
    check(result, q, q_lens, split_k, split_v, causal=True)
    wrapper.plan(indptr(q_lens, device), indptr(kv_lens, device), HEADS, KV_HEADS, *dims,
                 window_left=30, q_data_type="float16", sm_scale=0.5)
    check(wrapper.run_return_lse(q, *given, k_scale=0.5), q, q_lens, split_k, split_v, sm_scale=0.25,
          window_left=30)
    refused(lambda: wrapper.plan(indptr(q_lens), indptr(kv_lens), HEADS, KV_HEADS, dims[0],
                                 v_indptr=indptr([1, 2, 3, 4])), "v_indptr", "kv_indptr")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batch_attention(device, layout):
    q_lens = [1, 1, 12, 33, 1]
    cache = paged(LENS, 16, device, layout, joint=True)
    q = values((sum(q_lens), HEADS, DIM), BF16, device, 7)
    wrapper = flashinfer.BatchAttention(layout, device)
    given, indices, _ = cache.tables()
    arguments = (indptr(q_lens), given, indices, torch.tensor(LENS), HEADS, KV_HEADS, DIM, DIM, 16)
    wrapper.plan(*arguments, causal=True)
    check(wrapper.run(q, cache.cache), q, q_lens, cache.k, cache.v, causal=True)
    refused(lambda: wrapper.run(q, cache.cache, logits_soft_cap=2.0), "logits_soft_cap is 2.0")
    wrapper.plan(*arguments, sm_scale=0.2, logits_soft_cap=8.0)
    for given_cap, cap in ((0.0, 8.0), (8.0, 8.0), (2.0, 2.0)):
        out, lse = wrapper.run(q, cache.cache, k_scale=2.0, v_scale=0.5, logits_soft_cap=given_cap)
        check((out, lse), q, q_lens, cache.k, cache.v, sm_scale=0.4, v_scale=0.5,
              functors=SoftCap(cap))


# --- masks and position encodings -----------------------------------------------------------------

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
    """C11: the shares of the allowed keys, through packed and unpacked masks; wrong sizes are named."""
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


# --- planning again, forward(), graphs, workspaces ------------------------------------------------

def test_plan_run_plan_run(device):
    """Other lengths, more requests and other options between runs, and back; two wrappers on one
    workspace."""
    memory = workspace(device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory)
    for seed, lens in enumerate(([5], LENS, [300, 2], [70] * 9, [])):
        cache = paged(lens, 16, device, seed=seed + 1)
        q = values((len(lens), HEADS, DIM), BF16, device, seed)
        for window in (-1, 20):
            plan_decode(decode, cache, 16, window_left=window)
            plan_prefill(prefill, [1] * len(lens), cache, 16, causal=True)
            check(decode.run(q, cache.cache), q, [1] * len(lens), cache.k, cache.v,
                  window_left=window)
            check(prefill.run(q, cache.cache), q, [1] * len(lens), cache.k, cache.v, causal=True)


def test_attentions_are_kept(device):
    """A step within what was seen plans with the Attention there is, another makes a larger one."""
    wrapper = decode_wrapper(device)

    def planned(lens, **more):
        plan_decode(wrapper, paged(lens, 16, device), 16, **more)
        return wrapper._attention

    first = planned([100, 90])
    assert planned([128, 3]) is first and planned([1]) is first
    windowed = planned([100], window_left=3)
    assert windowed is not first and planned([5, 6]) is first
    larger = planned([1000])
    assert larger is not first and planned([100, 90]) is larger and planned([1008, 7]) is larger
    assert planned([5], window_left=3) is windowed
    for window in range(40, 60):  # the least recently used go
        planned([5], window_left=window)
    assert len(wrapper._pool._kept) == 8
    assert planned([5], window_left=3) is not windowed


def test_split_and_unsplit_plans(device):
    """disable_split_kv: no request's keys are cut; without it a long one's are."""
    cache = paged([5, 20000], 16, device)
    q = values((2, HEADS, DIM), BF16, device, 7)
    for wrapper, plan in ((decode_wrapper(device), plan_decode),
                          (prefill_wrapper(device), functools.partial(plan_prefill, q_lens=[1, 1]))):
        for disabled in (False, True):
            plan(wrapper, cache=cache, page_size=16, disable_split_kv=disabled)
            rows = wrapper._attention.current_plan.num_partial_rows
            assert rows == 0 if disabled else rows > 0 or wrapper._attention.num_ctas == 1
            check(wrapper.run(q, cache.cache), q, [1, 1], cache.k, cache.v)


def test_forward_means_its_arguments(device):
    """The deprecated forward() replaces what was planned, and drops no window or cap silently."""
    q_lens = [2, 5]
    cache = paged([40, 70], 16, device)
    q = values((sum(q_lens), HEADS, DIM), BF16, device, 7)
    wrapper = prefill_wrapper(device)
    wrapper.begin_forward(indptr(q_lens), *cache.tables(), HEADS, KV_HEADS, DIM, 16,
                          q_data_type=BF16)
    options = {"causal": True, "window_left": 9, "sm_scale": 0.3}
    check(wrapper.forward(q, cache.cache, logits_soft_cap=2.0, k_scale=2.0, **options), q, q_lens,
          cache.k, cache.v, **options | {"sm_scale": 0.6}, functors=SoftCap(2.0))
    check(wrapper.forward_return_lse(q, cache.cache), q, q_lens, cache.k, cache.v)

    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    k, v = (values((11, KV_HEADS, DIM), BF16, device, s) for s in (2, 3))
    ragged.begin_forward(indptr([7]), indptr([11]), HEADS, KV_HEADS, DIM, q_data_type=BF16)
    check(ragged.forward_return_lse(q, k, v, **options), q, [7], [numpy64(k)], [numpy64(v)],
          **options)
    check(ragged.forward(q, k, v), q, [7], [numpy64(k)], [numpy64(v)])

    decode = decode_wrapper(device)
    q = q[:2]
    plan_decode(decode, cache, 16)
    check(decode.forward(q, cache.cache, window_left=3, q_scale=2.0), q, [1, 1], cache.k, cache.v,
          window_left=3, scale=2.0)
    check(decode.forward_return_lse(q, cache.cache, sm_scale=0.1), q, [1, 1], cache.k, cache.v,
          sm_scale=0.1)


def graph_decode(device, batch, pages, cls=flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper):
    int32 = {"dtype": torch.int32, "device": device}
    return cls(workspace(device), torch.zeros(batch + 1, **int32), torch.zeros(pages, **int32),
               torch.zeros(batch, **int32))


def test_graph_mode_decode(device):
    """One Attention for every plan; what the graph could not follow is refused."""
    wrapper = graph_decode(device, 4, 40)
    assert wrapper.is_cuda_graph_enabled
    seen = set()
    for seed, lens in enumerate(([100, 90, 1, 33], [1, 0, 0, 500], [0, 0, 0, 0])):
        cache = paged(lens, 16, device, seed=seed + 1)
        q = values((4, HEADS, DIM), BF16, device, seed)
        plan_decode(wrapper, cache, 16)
        seen.add(id(wrapper._attention))
        check(wrapper.run(q, cache.cache, return_lse=True), q, [1] * 4, cache.k, cache.v)
    assert len(seen) == 1
    cache = paged([1, 2, 3], 16, device)
    refused(lambda: plan_decode(wrapper, cache, 16), "last_page_len", "[3]", "4")
    cache = paged([16 * 41, 1, 1, 1], 16, device)
    refused(lambda: plan_decode(wrapper, cache, 16), "indices has 44", "40")
    cache = paged([4, 5, 6, 7], 16, device)
    refused(lambda: plan_decode(wrapper, cache, 16, window_left=3), "window_left is 3", "-1")
    refused(lambda: plan_decode(wrapper, cache, 16, q_len_per_req=2), "causal is True", "graph")
    int32 = {"dtype": torch.int32, "device": device}
    refused(lambda: flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(device), torch.zeros(4, **int32), torch.zeros(4, **int32), torch.zeros(4, **int32)),
        "paged_kv_indptr_buffer", "5")
    refused(lambda: decode_wrapper(device, use_cuda_graph=True), "paged_kv_indptr_buffer is None")


def test_graph_mode_prefill(device):
    int32 = {"dtype": torch.int32, "device": device}
    buffers = [torch.zeros(n, **int32) for n in (4, 4, 30, 3)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    for q_lens, lens in (([5, 1, 30], [70, 1, 40]), ([0, 36, 0], [3, 300, 0]), ([1, 1, 1], [9, 8, 7])):
        cache = paged(lens, 16, device)
        q = values((sum(q_lens), HEADS, DIM), BF16, device, 7)
        plan_prefill(wrapper, q_lens, cache, 16, causal=True)
        check(wrapper.run(q, cache.cache), q, q_lens, cache.k, cache.v, causal=True)
    cache = paged([9, 8, 7], 16, device)
    refused(lambda: plan_prefill(wrapper, [20, 10, 7], cache, 16, causal=True), "qo_indptr", "37",
            "36")
    refused(lambda: plan_prefill(wrapper, [1, 1, 1], cache, 16), "causal is False", "graph")
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", True,
                                                             *buffers[:2])
    k, v = (values((11, KV_HEADS, DIM), BF16, device, s) for s in (2, 3))
    for kv_lens in ([5, 6, 0], [0, 0, 11]):
        ragged.plan(indptr([1, 2, 0]), indptr(kv_lens), HEADS, KV_HEADS, DIM, q_data_type=BF16)
        parts = [[numpy64(x[a:b]) for a, b in zip(np.cumsum([0, *kv_lens]), np.cumsum(kv_lens))]
                 for x in (k, v)]
        check(ragged.run(q[:3], k, v), q[:3], [1, 2, 0], *parts)
    refused(lambda: ragged.plan(indptr([1]), indptr([1]), HEADS, KV_HEADS, DIM, q_data_type=BF16),
            "qo_indptr", "4 entries")


def test_workspaces(device):
    """workspace_size() says what plan() needs; as much is enough, less is refused."""
    cache = paged(LENS, 16, device)
    arguments = (*cache.tables(), HEADS, KV_HEADS, DIM, 16)
    needed, int_bytes = decode_wrapper(device).workspace_size(*arguments, q_data_type=BF16)
    assert needed > 0 and int_bytes == 0
    q_indptr = indptr([1] * len(LENS))
    assert prefill_wrapper(device).workspace_size(q_indptr, *arguments)[0] > 0
    q = values((len(LENS), HEADS, DIM), BF16, device, 7)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device)[:needed])
    plan_decode(wrapper, cache, 16)
    check(wrapper.run(q, cache.cache), q, [1] * len(LENS), cache.k, cache.v)
    for less in (needed - 256, 0):
        wrapper.reset_workspace_buffer(workspace(device)[:less], None)
        refused(lambda: wrapper.run(q, cache.cache), "nothing is planned")
        refused(lambda: plan_decode(wrapper, cache, 16), "float_workspace_buffer", f"{less} bytes",
                str(needed))
    wrapper.reset_workspace_buffer(workspace(device)[3:].view(torch.uint8), None)  # any address
    plan_decode(wrapper, cache, 16)
    check(wrapper.run(q, cache.cache), q, [1] * len(LENS), cache.k, cache.v)
    refused(lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(None), "float_workspace_buffer",
            error=TypeError)


# --- refusals -------------------------------------------------------------------------------------

def test_index_arrays_are_refused_by_the_callers_names(device):
    """C20: malformed tables name the argument as the caller knows it, the request and the value."""
    cache = paged([20, 33], 16, device)
    good, indices, last = cache.tables()
    wrapper = decode_wrapper(device)

    def plan(i=good, x=indices, n=last):
        wrapper.plan(i, x, n, HEADS, KV_HEADS, DIM, 16, q_data_type=BF16)

    int32 = functools.partial(torch.tensor, dtype=torch.int32)
    for bad in (17, 0, -1):
        refused(lambda: plan(n=int32([4, bad])), "plan: last_page_len[1]", str(bad))  # noqa: B023
    refused(lambda: plan(i=int32([0, 3, 2])), "plan: indptr[2]", "2", "3")
    refused(lambda: plan(i=int32([1, 2, 5])), "plan: indptr[0]", "1")
    refused(lambda: plan(i=int32([0, 2, 9])), "plan: indptr[2]", "9", "indices", "5")
    refused(lambda: plan(n=int32([4])), "last_page_len has 1", "indptr")
    refused(lambda: plan(i=good[None]), "indptr", "[1, 3]", "1 dim")
    refused(lambda: plan(i=[0, 2, 5]), "indptr", "torch tensor", error=TypeError)
    refused(lambda: plan(i=good.float()), "indptr", "float32", "int32")
    # Without pages the last one's length is 0, or page_size as (0 - 1) % 16 + 1.
    for empty in (0, 16):
        plan(i=int32([0, 0, 3]), x=indices[:3], n=int32([empty, 1]))
    refused(lambda: plan(i=int32([0, 0, 3]), n=int32([5, 1])), "last_page_len[0]", "5")
    prefill = prefill_wrapper(device)
    refused(lambda: prefill.plan(indptr([1, 1, 1]), good, indices, last, HEADS, KV_HEADS, DIM, 16),
            "paged_kv_last_page_len has 2", "paged_kv_indptr 3", "3 requests")
    refused(lambda: prefill.plan(int32([0, 2, 1]), good, indices, last, HEADS, KV_HEADS, DIM, 16),
            "qo_indptr[2]")
    refused(lambda: prefill.plan(indptr([1, 1]), good, indices, int32([4, 17]), HEADS, KV_HEADS, DIM,
                                 16), "paged_kv_last_page_len[1]", "17")


def test_arguments_are_refused_by_name(device):
    cache = paged(LENS, 16, device)
    q = values((len(LENS), HEADS, DIM), BF16, device, 7)
    decode, prefill = decode_wrapper(device), prefill_wrapper(device)
    plan_decode(decode, cache, 16)
    plan_prefill(prefill, [1] * len(LENS), cache, 16)
    ones = torch.ones(HEADS, device=device)

    for more, words in (
        ({"window_left": -2}, ("window_left is -2", "-1")),
        ({"window_left": 1.5}, ("window_left is 1.5", "integer")),
        ({"logits_soft_cap": -1.0}, ("logits_soft_cap is -1.0", "> 0")),
        ({"pos_encoding_mode": "XPOS"}, ("pos_encoding_mode is 'XPOS'", "'NONE'")),
        ({"rope_theta": 0.0}, ("rope_theta is 0.0",)),
        ({"sm_scale": -1.0}, None),  # of run()
        ({"q_data_type": "float64"}, ("q_data_type is 'float64'", "bfloat16")),
        ({"kv_data_type": torch.float8_e4m3fn}, ("kv_data_type is 'float8_e4m3fn'", "bfloat16")),
        ({"o_data_type": torch.float16}, ("o_data_type is 'float16'", "bfloat16")),
        ({"fixed_split_size": 4}, ("fixed_split_size is 4", "None")),
        ({"block_tables": torch.zeros(5, 5)}, ("block_tables is a tensor float32 [5, 5]", "None")),
    ):
        if words is not None:
            options = {"q_data_type": BF16} | more
            for call in (
                lambda: decode.plan(*cache.tables(), HEADS, KV_HEADS, DIM, 16, **options),  # noqa: B023
                lambda: prefill.plan(indptr([1] * len(LENS)), *cache.tables(), HEADS, KV_HEADS,
                                     DIM, 16, **options),  # noqa: B023
            ):
                refused(call, "plan: ", *words, error=(ValueError, TypeError))
    refused(lambda: plan_decode(decode, cache, 16, window_right=1), "window_right is 1", "0")
    refused(lambda: plan_decode(decode, cache, 16, q_len_per_req=0), "q_len_per_req is 0")
    refused(lambda: plan_decode(decode, cache, 16, seq_lens=torch.ones(5)), "seq_lens")
    refused(lambda: plan_prefill(prefill, [1] * 5, cache, 16, token_pos_in_items_len=3), "3")

    for more, words in (
        ({"sinks": ones}, ("sinks is a tensor", "None")),
        ({"kv_cache_sf": ones}, ("kv_cache_sf", "None")),
        ({"window_left": 4}, ("window_left is 4", "-1")),
        ({"skip_softmax_threshold_scale_factor": 1.0}, ("skip_softmax", "None")),
        ({"k_scale": ones}, ("k_scale is a tensor", "one element")),
        ({"v_scale": "2"}, ("v_scale is '2'", "number")),
        ({"q_scale": -1.0}, ("sm_scale is -0.125", "> 0")),
        ({"out": torch.zeros_like(q[:, :, :32])}, ("out", "32", "64")),
        ({"lse": torch.zeros(len(q), HEADS, dtype=BF16, device=device), "return_lse": True}, ("lse",)),
    ):
        for wrapper in (decode, prefill):
            refused(lambda: wrapper.run(q, cache.cache, **more), *words)  # noqa: B023
    for wrapper in (decode, prefill):
        refused(lambda: wrapper.run(q, cache.cache, 1.0, 2.0), "2 positional", "k_scale=")  # noqa: B023
        refused(lambda: wrapper.run(q, (cache.cache[0],)), "paged_kv_cache has 1")  # noqa: B023
        refused(lambda: wrapper.run(q.half(), cache.cache), "q", "float16", "bfloat16")  # noqa: B023
    refused(lambda: prefill.run(q, cache.cache, use_fp16_softmax=True), "use_fp16_softmax is True")

    refused(lambda: decode_wrapper(device).run(q, cache.cache), "call plan() first")
    refused(lambda: decode_wrapper(device, backend="xqa"), "backend is 'xqa'", "'fa2'")
    refused(lambda: prefill_wrapper(device, backend="cudnn"), "backend is 'cudnn'", "elements")
    refused(lambda: prefill_wrapper(device, "BHSD"), "kv_layout is 'BHSD'", "HND")
    refused(lambda: prefill_wrapper(device, jit_args=["name"]), "jit_args", "plait.custom")
    single = functools.partial(flashinfer.single_prefill_with_kv_cache, q, q[:, :2], q[:, :2])
    for more, words in (
        ({"scale_q": ones}, ("scale_q", "None")),
        ({"kv_layout": "SHD"}, ("kv_layout is 'SHD'",)),
        ({"o_dtype": torch.float16}, ("o_dtype is 'float16'", "bfloat16")),
        ({"backend": "cutlass"}, ("backend is 'cutlass'", "'fa3'")),
    ):
        refused(lambda: single(**more), "single_prefill_with_kv_cache: ", *words)  # noqa: B023
    attention = flashinfer.BatchAttention("NHD", device)
    refused(lambda: attention.plan(indptr([1]), *cache.tables(), 4, 2, 64, 64, 16, use_profiler=True),
            "use_profiler is True")


# --- merging --------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
def test_c01_merge(device, dtype):
    """C01 in base 2: empty states are the identity bit for bit; 1 and 3 of equal weight give 2."""
    v_a, v_b = (values((4, 3, 64), dtype, device, s) for s in (1, 2))
    v_a[3], v_b[3] = 1, 3
    s_a = torch.tensor([-math.inf, -math.inf, 2, 2], device=device)[:, None].repeat(1, 3)
    s_b = torch.tensor([-math.inf, 2, -math.inf, 2], device=device)[:, None].repeat(1, 3)
    v_a[:2], v_b[0], v_b[2] = math.nan, math.nan, math.nan  # of empty states: never read
    v, s = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    for mask, merged in ((None, slice(0, 4)), ([True, False, True, True], [0, 2, 3])):
        in_v, in_s = v_a.clone(), s_a.clone()
        given = None if mask is None else torch.tensor(mask, device=device)
        flashinfer.merge_state_in_place(in_v, in_s, v_b, s_b, given)
        for got_v, got_s in ((v, s), (in_v, in_s)):
            if got_v is in_v and mask is not None:  # the row left alone was empty
                assert (got_v[1] == 0).all() and (got_s[1] == -math.inf).all()
            else:
                assert torch.equal(got_v[1], v_b[1]) and (got_s[1] == 2).all()
            assert (got_v[0] == 0).all() and (got_s[0] == -math.inf).all()
            assert torch.equal(got_v[2], v_a[2]) and (got_s[2] == 2).all()
            assert (got_v[3] == 2).all() and (got_s[3] == 3).all()
    for n in (1, 3, 5):
        many = torch.full((2, n, 3, 64), math.nan, dtype=dtype, device=device)
        many_s = torch.full((2, n, 3), -math.inf, device=device)
        many[1, -1], many_s[1, -1] = v_b[1], 2.5
        v, s = flashinfer.merge_states(many, many_s)
        assert (v[0] == 0).all() and (s[0] == -math.inf).all()
        assert torch.equal(v[1], v_b[1]) and (s[1] == 2.5).all()


def test_merges_are_unions(device):
    v = values((7, 3, HEADS, 64), torch.float32, device, 1)
    s = 4 * values((7, 3, HEADS), torch.float32, device, 2)
    natural = [(numpy64(v[:, i]), numpy64(s[:, i]) * math.log(2)) for i in range(3)]
    want, want_lse = reference.merge(natural)
    got = flashinfer.merge_states(v, s)
    for name, a, b in zip("vs", got, (want, want_lse / math.log(2))):
        compare(name, numpy64(a), b, 4e-6 * np.abs(b).max())
    got = flashinfer.merge_state(v[:, 0], s[:, 0].double(), v[:, 1], s[:, 1].double())
    want, want_lse = reference.merge(natural[:2])
    for name, a, b in zip("vs", got, (want, want_lse / math.log(2))):
        compare(name, numpy64(a), b, 4e-6 * np.abs(b).max())
    refused(lambda: flashinfer.merge_state_in_place(v[:, 0], s[:, 0].double(), v[:, 1], s[:, 1]),
            "s is a tensor float64", "float32")
    refused(lambda: flashinfer.merge_state_in_place(
        v[:, 0], s[:, 0], v[:, 1], s[:, 1], torch.ones(6, device=device)), "mask", "[7]")


def test_c04_lse_is_base_2(device):
    """C04: 4096 equal keys are 12 at every entry point, and a split merges to the whole."""
    k = torch.zeros(4096, KV_HEADS, 128, dtype=BF16, device=device)
    q = values((2, HEADS, 128), BF16, device, 1)
    _, lse = flashinfer.single_decode_with_kv_cache(q[0], k, k, return_lse=True)
    results = [lse, flashinfer.single_prefill_with_kv_cache_return_lse(q, k, k)[1]]
    pages = k.view(256, 16, KV_HEADS, 128)
    tables = indptr([256]), torch.arange(256).int(), torch.tensor([16])
    decode, prefill = decode_wrapper(device), prefill_wrapper(device)
    decode.plan(*tables, HEADS, KV_HEADS, 128, 16, q_data_type=BF16)
    results.append(decode.run_return_lse(q[:1], (pages, pages))[1])
    prefill.plan(indptr([2]), *tables, HEADS, KV_HEADS, 128, 16, q_data_type=BF16)
    results.append(prefill.run_return_lse(q, (pages, pages))[1])
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(indptr([2]), indptr([4096]), HEADS, KV_HEADS, 128, q_data_type=BF16)
    results.append(ragged.run_return_lse(q, k, k)[1])
    attention = flashinfer.BatchAttention(device=device)
    attention.plan(indptr([2]), *tables[:2], torch.tensor([4096]), HEADS, KV_HEADS, 128, 128, 16)
    results.append(attention.run(q, (pages, pages))[1])
    for lse in results:
        assert (lse - 12).abs().max() < 1e-5

    q = 3 * values((8, HEADS, 128), BF16, device, 4)
    k, v = (values((256, KV_HEADS, 128), BF16, device, s) for s in (5, 6))
    parts = [flashinfer.single_prefill_with_kv_cache_return_lse(q, k[a:b], v[a:b])
             for a, b in ((0, 224), (224, 256))]
    merged = flashinfer.merge_state(*parts[0], *parts[1])
    whole = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v)
    assert (merged[0].float() - whole[0].float()).abs().max() < 0.02
    assert (merged[1] - whole[1]).abs().max() < 1e-3


# --- appending, helpers ---------------------------------------------------------------------------

@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joint", [False, True])
def test_append(device, layout, joint):
    """Tokens appended through the helpers are read back by a decode."""
    before, new, page_size = [10, 0, 31, 5], [7, 3, 2, 0], 16
    lens = [a + b for a, b in zip(before, new)]
    cache = paged(lens, page_size, device, layout, joint)
    for i, n in enumerate(before):
        cache.k[i][n:], cache.v[i][n:] = np.nan, np.nan
    keys = values((sum(new), KV_HEADS, DIM), BF16, device, 5)
    vals = values((sum(new), KV_HEADS, DIM), BF16, device, 6)
    given, indices, last = cache.tables(device)
    seq_lens = flashinfer.get_seq_lens(given, last, page_size)
    assert seq_lens.tolist() == lens
    rows, positions = flashinfer.get_batch_indices_positions(indptr(new, device), seq_lens, sum(new))
    flashinfer.append_paged_kv_cache(keys, vals, rows, positions, cache.cache, indices, given, last,
                                     layout)
    at = 0
    for i, n in enumerate(new):
        cache.k[i][before[i]:] = numpy64(keys[at:at + n])
        cache.v[i][before[i]:] = numpy64(vals[at:at + n])
        at += n
    q = values((4, HEADS, DIM), BF16, device, 7)
    wrapper = decode_wrapper(device, layout)
    plan_decode(wrapper, cache, page_size)
    check(wrapper.run(q, cache.cache), q, [1] * 4, cache.k, cache.v)


def test_batch_indices_and_positions(device):
    new, lens = torch.tensor([0, 1, 1, 3, 6, 10], device=device), torch.tensor(
        [5, 5, 5, 5, 5], device=device)
    rows, positions = flashinfer.get_batch_indices_positions(new, lens, 12)
    assert rows.dtype == positions.dtype == torch.int32
    assert rows.tolist() == [0, 2, 2, 3, 3, 3, 4, 4, 4, 4, -1, -1]
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4, 0, 0]
    mine = [torch.full((12,), 9, dtype=torch.int32, device=device) for _ in range(2)]
    got = flashinfer.get_batch_indices_positions(new, lens, 12, *mine)
    assert all(a is b for a, b in zip(got, mine))
    assert torch.equal(mine[0], rows) and torch.equal(mine[1], positions)
    nothing = flashinfer.get_batch_indices_positions(new[:1], lens[:0], 2)
    assert nothing[0].tolist() == [-1, -1] and nothing[1].tolist() == [0, 0]
    refused(lambda: flashinfer.get_batch_indices_positions(new, lens, 12, mine[0].long()),
            "batch_indices", "int32 [12]")
    refused(lambda: flashinfer.get_batch_indices_positions(new, lens[:3], 12), "seq_lens", "5 entries")


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 100])
def test_packbits(device, n, bitorder):
    x = np.random.default_rng(n).integers(0, 2, n)
    want = np.packbits(x, bitorder=bitorder)
    for dtype in (torch.bool, torch.int32):
        got = flashinfer.packbits(torch.from_numpy(x).to(device, dtype), bitorder)
        assert got.dtype == torch.uint8 and np.array_equal(got.cpu().numpy(), want)
    segments = [0, 0, n // 3, n // 3, n]
    got, offsets = flashinfer.segment_packbits(torch.from_numpy(x).to(device),
                                               torch.tensor(segments, device=device), bitorder)
    parts = [np.packbits(x[a:b], bitorder=bitorder) for a, b in zip(segments, segments[1:])]
    assert np.array_equal(got.cpu().numpy(), np.concatenate(parts))
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, *np.cumsum([len(p) for p in parts])]


def test_c11_packed_bytes(device):
    """C11: each request's bits start at a byte of their own."""
    mask = [[(i + 2 * j + r) % 3 != 0 for i in range(q) for j in range(kv)]
            for r, (q, kv) in enumerate([(3, 5), (1, 7), (2, 9)])]
    flat = torch.tensor(sum(mask, []), device=device)
    packed, offsets = flashinfer.segment_packbits(flat, indptr([len(m) for m in mask], device), "little")
    assert bytes(packed.tolist()).hex(" ") == "b6 6d 6d db 6c 03"
    assert offsets.tolist() == [0, 2, 3, 6]
    for bad in ([0, 15, 22], [0, 15, 14, 40], [1, 15, 22, 40]):
        refused(lambda: flashinfer.segment_packbits(flat, torch.tensor(bad)), "indptr",  # noqa: B023
                str(len(flat)))
    refused(lambda: flashinfer.packbits(flat, "bit"), "bitorder is 'bit'", "'little'")
    refused(lambda: flashinfer.packbits(flat[None]), "x", "1 dim")


# --- cases from public reports, at these entry points ----------------------------------------------

def test_c05_large_negative_scores(device):
    """C05: scores of -262144 and below; decode, prefill and single agree with the closed form."""
    q = torch.full((4, 8, 128), 64.0, dtype=BF16, device=device)
    k = torch.full((16, 2, 128), -32.0, dtype=BF16, device=device)
    k[:, :, 0] -= torch.arange(16, device=device)[:, None].to(BF16) / 4
    v = torch.eye(16, 128, dtype=BF16, device=device)[:, None].repeat(1, 2, 1)
    weights = torch.exp(-math.sqrt(2) * torch.arange(16, dtype=torch.float64))
    weights = (weights / weights.sum()).numpy()
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(indptr([4]), indptr([16]), 8, 2, 128, q_data_type=BF16)
    prefill = prefill_wrapper(device)
    prefill.plan(indptr([4]), indptr([1]), torch.zeros(1).int(), torch.tensor([16]), 8, 2, 128, 16,
                 q_data_type=BF16)
    for out, lse in (flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v),
                     ragged.run_return_lse(q, k, v), prefill.run_return_lse(q, (k[None], v[None]))):
        compare("out", numpy64(out)[..., :16], np.broadcast_to(weights, (4, 8, 16)), 4e-3)
        assert (lse + 33427.528).abs().max() < 0.03


def test_c22_repeated_pages(device):
    """C22: the table is a plain list; a page may be in it twice."""
    cache = torch.full((9, 2, 4, 2, 64), math.nan, dtype=BF16, device=device)
    cache[[5, 7], 0] = 0
    cache[5, 1], cache[7, 1] = 1, 4
    q = torch.zeros(3, 2, 64, dtype=BF16, device=device)
    wrapper = decode_wrapper(device)
    wrapper.plan(indptr([3, 2, 2]), torch.tensor([5, 5, 7, 5, 7, 5, 7]), torch.tensor([3, 4, 4]), 2,
                 2, 64, 4, q_data_type=BF16)
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert (out[0] - 20 / 11).abs().max() < 0.01 and (out[1:] == 2.5).all()
    assert (lse[0] - math.log2(11)).abs().max() < 1e-5


def test_c28_requests_without_keys(device):
    """C28: most of a batch is empty, in graph mode and not; then all; then one long request."""
    for graph in (False, True):
        if graph:
            sizes = {"qo_indptr_buf": 25, "paged_kv_indptr_buf": 25, "paged_kv_indices_buf": 700,
                     "paged_kv_last_page_len_buf": 24}
            wrapper = prefill_wrapper(device, use_cuda_graph=True, **{
                name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in sizes.items()})
        else:
            wrapper = prefill_wrapper(device)
        for lens in ([5] * 3 + [0] * 21, [0] * 24, [0] * 11 + [10000] + [0] * 12):
            cache = paged(lens, 16, device)
            q = values((120, HEADS, DIM), BF16, device, 39)
            plan_prefill(wrapper, [5] * 24, cache, 16, causal=True)
            check(wrapper.run(q, cache.cache, return_lse=True), q, [5] * 24, cache.k, cache.v,
                  causal=True)


def test_documented_example():
    text = (Path(__file__).parent.parent / "docs/flashinfer.md").read_text()
    block = text.split("```python\n")[2].split("```")[0]
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(block, "flashinfer.md", "exec"), scope)
    assert scope["out"].shape == (2, 8, 64) and scope["lse"].shape == (2, 8)
