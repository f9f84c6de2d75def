"""Nothing waits: plans and runs behind work that spins on the device; streams side by side."""

import statistics
import time

import numpy as np
import pytest
import torch

import plait

from harness import device_of, same_bits
from test_graph import Step

BF16 = "bfloat16"


def spin(milliseconds):
    torch.cuda._sleep(int(milliseconds * 1.9e6))  # clock cycles


PLAN_A = [(1, 37 * i + 1) for i in range(64)]
PLAN_B = [(1, 9000)] * 3


def step(kernel, seed=42):
    return Step(kernel, 64, 8, 2, 5000, seed, 9000, 64, max_q_len=1)


@pytest.mark.parametrize("objects", [1, 2])
def test_c30_no_waits_between_plans(kernel, objects):
    """sgl-project/mini-sglang#103; vllm-project/vllm#40756; flashinfer-ai/flashinfer#4476"""
    steps = [step(kernel) for _ in range(objects)]
    plans = [PLAN_A, PLAN_B, PLAN_A[::-1], PLAN_B]
    waited = []
    for n, lengths in enumerate(plans):
        s = steps[n % objects]
        s.plan(lengths)
        waited.append(s.eager())
    outs = []
    torch.cuda.synchronize()
    spin(50)
    for n, lengths in enumerate(plans):
        s = steps[n % objects]
        s.plan(lengths)
        outs.append(s.attn.run(s.q, s.cache))
    torch.cuda.synchronize()
    dev = device_of("cuda:0")
    for n, (out, lse) in enumerate(outs):
        same_bits(dev.get(out, BF16), waited[n][0], f"plan {n}: out ")
        same_bits(dev.get(lse), waited[n][1], f"plan {n}: lse ")


def test_c30_two_streams(kernel):
    """A workspace each, 100 interleaved rounds of two differing batches."""
    steps = [step(kernel, 42), step(kernel, 43)]
    plans = [PLAN_A, PLAN_B]
    want = []
    for s, lengths in zip(steps, plans):
        s.plan(lengths)
        want.append(s.eager())
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outs = [[], []]
    torch.cuda.synchronize()
    for _ in range(100):
        for n in (0, 1):
            with torch.cuda.stream(streams[n]):
                steps[n].plan(plans[n])
                outs[n].append(steps[n].attn.run(steps[n].q, steps[n].cache))
    torch.cuda.synchronize()
    dev = device_of("cuda:0")
    for n in (0, 1):
        for out, lse in outs[n]:
            same_bits(dev.get(out, BF16), want[n][0], f"stream {n}: out ")
            same_bits(dev.get(lse), want[n][1], f"stream {n}: lse ")


def test_stream_arguments(kernel):
    """stream= takes torch's stream, its handle, and the current stream by default."""
    s = step(kernel)
    s.plan(PLAN_A)
    want = s.eager()
    side = torch.cuda.Stream()
    for stream in (side, side.cuda_stream):
        s.attn._plan(*plan_arguments(PLAN_A, s), stream=stream)
        out, _ = s.attn.run(s.q, s.cache, stream=stream)
        torch.cuda.synchronize()
        same_bits(device_of("cuda:0").get(out, BF16), want[0], "out ")


def plan_arguments(lengths, s):
    pages = [-(-kv // 16) for _, kv in lengths]
    rng = np.random.default_rng(sum(pages))
    ids = rng.permutation(s.num_pages)[:sum(pages)]
    return np.arange(len(lengths) + 1), {
        "kv_len": np.array([kv for _, kv in lengths], np.int32),
        "kv_page_indptr": np.cumsum([0, *pages]), "kv_page_indices": ids}, []


@pytest.mark.parametrize("batch,ceiling_ms", [(1, 5), (256, 5), (1024, 5), (4096, 5)])
def test_c32_plan_does_not_wait(kernel, batch, ceiling_ms):
    """flashinfer-ai/flashinfer#3338; sgl-project/sglang#23500; flashinfer-ai/flashinfer#253"""
    attn = plait.Attention(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16,
                           kv=plait.PagedKv(16), device="cuda:0", kernel=kernel,
                           variant=plait.causal(),
                           bounds=plait.Bounds(requests=batch, query_tokens=batch, keys=8192))
    kv_len = (37 * np.arange(batch)) % 8000 + 1
    pages = -(-kv_len // 16)
    tables = {"kv_len": kv_len, "kv_page_indptr": np.concatenate([[0], np.cumsum(pages)]),
              "kv_page_indices": np.arange(pages.sum(), dtype=np.int32)}
    qo_indptr = np.arange(batch + 1)
    for _ in range(3):
        attn._plan(qo_indptr, tables, [])
    torch.cuda.synchronize()
    spin(200)
    start = time.perf_counter()
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        attn._plan(qo_indptr, tables, [])
        times.append((time.perf_counter() - begin) * 1e3)
    assert time.perf_counter() - start < 0.15, "planning waited for the stream"
    assert statistics.median(times) < ceiling_ms, f"plan took {times} ms"
    torch.cuda.synchronize()


def test_c32_lengths_half_on_the_device_are_refused(kernel):
    attn = plait.Attention(num_qo_heads=2, num_kv_heads=1, head_dim=128, dtype=BF16,
                           kv=plait.PagedKv(16), device="cuda:0", kernel=kernel,
                           bounds=plait.Bounds(requests=2, query_tokens=2, keys=64))
    tables = {"qo_indptr": np.array([0, 1]), "kv_len": np.array([3]),
              "kv_page_indptr": np.array([0, 1]), "kv_page_indices": np.array([0])}
    for name, where in (("qo_indptr", "on cuda:0"), ("kv_len", "is on the device")):
        bad = tables | {name: torch.from_numpy(tables[name]).cuda()}
        with pytest.raises(ValueError) as error:
            attn.plan(**bad)
        assert name in str(error.value) and where in str(error.value)
    attn.plan(**tables)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="C31 needs two GPUs")


@needs_two
def test_c31_second_gpu(kernel):
    """flashinfer-ai/flashinfer#452, #349; Dao-AILab/flash-attention#1793"""
    torch.manual_seed(43)
    q = torch.randn(3, 8, 128, dtype=torch.bfloat16)
    k, v = (torch.randn(70, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    results = []
    torch.cuda.set_device(0)
    for n in (1, 0):
        device = f"cuda:{n}"
        before = torch.cuda.memory_allocated(0)
        free = torch.cuda.mem_get_info(0)[0]
        attn = plait.Attention(num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16, device=device,
                               kernel=kernel, variant=plait.causal(),
                               bounds=plait.Bounds(requests=1, query_tokens=3, keys=70))
        attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 70]))
        on = [x.to(device) for x in (q, k, v)]
        out, lse = attn.run(on[0], on[1:])
        merged, merged_lse = plait.merge_state(out, lse, out, torch.full_like(lse, -torch.inf))
        cache = torch.zeros(5, 16, 2, 128, dtype=torch.bfloat16, device=device), \
            torch.zeros(5, 16, 2, 128, dtype=torch.bfloat16, device=device)
        plait.append_kv(on[1], on[2], cache, kv=plait.PagedKv(16), slot_mapping=np.arange(70))
        assert torch.cuda.current_device() == 0, "the current device was changed"
        if n == 1:
            assert torch.cuda.memory_allocated(0) == before
            assert free - torch.cuda.mem_get_info(0)[0] < 1 << 20, "device 0 was allocated from"
        results.append([x.cpu() for x in (out, lse, merged, merged_lse, *cache)])
        if n == 1:
            with pytest.raises(ValueError):
                attn.run(on[0].to("cuda:0"), on[1:])
    assert all(torch.equal(a, b) for a, b in zip(*results))
