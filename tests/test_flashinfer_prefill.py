"""plait.flashinfer: the batch prefill wrappers, paged and ragged, and BatchAttention.

tests/gpu runs the same functions on CUDA.
"""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, DIM, HEADS, KV_HEADS, LENS, check, indptr, numpy64, paged, plan_prefill, prefill_wrapper,
    refused, values, workspace,
)
from harness import compare  # noqa: E402
from variants import SoftCap  # noqa: E402


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
