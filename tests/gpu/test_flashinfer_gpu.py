"""plait.flashinfer on CUDA: the tests of the host, and what needs a device: graphs, workspaces full
of other data, arrays on the device."""

import pytest
import torch

from plait import flashinfer

from flashinfer_cases import (
    BF16, DIM, HEADS, check, paged, plan_decode, plan_prefill, prefill_wrapper, values, workspace,
)
from test_flashinfer_decode import *  # noqa: F403
from test_flashinfer_fp8 import *  # noqa: F403
from test_flashinfer_helpers import *  # noqa: F403
from test_flashinfer_masks import *  # noqa: F403
from test_flashinfer_planning import *  # noqa: F403
from test_flashinfer_prefill import *  # noqa: F403
from test_flashinfer_refusals import *  # noqa: F403
from test_flashinfer_single import *  # noqa: F403
from test_flashinfer_states import *  # noqa: F403


def capture(run):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("unsplit", [False, True])
def test_c26_c27_replanned_decode_graph(on_device, unsplit):
    """C26, C27: a captured decode serves later plans of the wrapper, bit for bit as eager calls, on
    a workspace full of something else; also without splits."""
    memory = workspace("cuda")
    batch, int32 = 8, {"dtype": torch.int32, "device": "cuda"}
    buffers = [torch.zeros(n, **int32) for n in (batch + 1, 8000, batch)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(memory, *buffers)
    eager = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda"))
    q = values((batch, HEADS, DIM), BF16, "cuda", 1)
    out, lse = torch.empty_like(q), torch.empty(batch, HEADS, device="cuda")
    cache = paged([100000, 1, 17, 4096, 0, 0, 999, 1001], 16, "cuda")  # large enough for every plan
    pool = tuple(x.clone() for x in cache.cache)
    graph = None
    for seed, lens in enumerate(([1000] * batch, cache.lens, [5, 900] + [0] * 6, [7] * batch)):
        step = paged(lens, 16, "cuda", seed=seed + 1)
        for mine, theirs in zip(pool, step.cache):
            mine.fill_(float("nan"))
            mine[: len(theirs)] = theirs
        memory.fill_(0x7F)
        tables = step.tables("cuda" if on_device else "cpu")
        plan_decode(wrapper, step, 16, tables, disable_split_kv=unsplit)
        if graph is None:
            graph = capture(lambda: wrapper.run(q, pool, out=out, lse=lse, return_lse=True))
        out.fill_(7)
        lse.fill_(7)
        graph.replay()
        check((out, lse), q, [1] * batch, step.k, step.v)
        plan_decode(eager, step, 16, tables, disable_split_kv=unsplit)
        want = eager.run(q, pool, return_lse=True)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_indices_rewritten_between_replays():
    """Page ids in the indices buffer are read by the graph: permuting them there permutes the
    keys."""
    int32 = {"dtype": torch.int32, "device": "cuda"}
    buffers = [torch.zeros(n, **int32) for n in (3, 3, 20, 2)]
    wrapper = prefill_wrapper("cuda", use_cuda_graph=True, **dict(zip(
        ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf",
         "paged_kv_last_page_len_buf"), buffers)))
    cache = paged([32, 48], 16, "cuda")
    q = values((3, HEADS, DIM), BF16, "cuda", 1)
    out = torch.empty_like(q)
    plan_prefill(wrapper, [1, 2], cache, 16)
    graph = capture(lambda: wrapper.run(q, cache.cache, out=out))
    buffers[2][:2] = cache.indices[2:4].cuda()  # request 0 reads the first two pages of request 1
    graph.replay()
    k, v = ([x[1][:32], x[1]] for x in (cache.k, cache.v))
    check(out, q, [1, 2], k, v)


def test_single_calls_on_two_streams():
    """Each stream has Attentions of its own, so that neither overwrites the other's plan."""
    q = values((64, HEADS, DIM), BF16, "cuda", 1)
    keys = [values((n, 2, DIM), BF16, "cuda", n) for n in (4000, 77)]
    want = [flashinfer.single_prefill_with_kv_cache(q, k, k, causal=True) for k in keys]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in keys]
    results = []
    for _ in range(20):
        for stream, k, expected in zip(streams, keys, want):
            with torch.cuda.stream(stream):
                results.append((flashinfer.single_prefill_with_kv_cache(q, k, k, causal=True),
                                expected))
    torch.cuda.synchronize()
    for got, expected in results:
        assert torch.equal(got, expected)
