"""plait.flashinfer: planning again, graph mode, workspaces, the deprecated forward().

tests/gpu runs the same functions on CUDA.
"""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, DIM, HEADS, KV_HEADS, LENS, check, decode_wrapper, indptr, numpy64, paged, plan_decode,
    plan_prefill, prefill_wrapper, refused, values, workspace,
)
from variants import SoftCap  # noqa: E402


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
