"""plait.flashinfer: the batch decode wrapper, its arguments and its ways to plan.

tests/gpu runs the same functions on CUDA.
"""

import functools
import math

import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, DIM, HEADS, KV_HEADS, LENS, check, decode_wrapper, indptr, paged, plan_decode, refused,
    values,
)
from variants import SoftCap  # noqa: E402


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
