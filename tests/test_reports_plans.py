"""Public reports: plan, workspace, repeatable results (reports.py)."""

import itertools
import time

import numpy as np
import pytest

import plait
from plait.reference import from_storage, to_storage

import harness
from harness import attend, compare, device_of, same_bits
from reports import BF16, against_reference, near, near_lse
from streams import std


C28_KV = {
    "three with keys": [5, 5, 5] + [0] * 21,
    "none with keys": [0] * 24,
    "one long": [0] * 7 + [100000] + [0] * 16,
}


@pytest.mark.parametrize("name", C28_KV)
def test_c28_requests_without_keys(device, kernel, name):
    """flashinfer-ai/flashinfer#726"""
    if device == "cpu" and name == "one long":
        lengths = [(5, n // 40) for n in C28_KV[name]]  # 100000 keys of 8 heads take GBs in float64
    else:
        lengths = [(5, n) for n in C28_KV[name]]
    data = std(39, lengths, 40, 8, 128, BF16)
    out, lse, _ = attend(data, device, kernel, format="csr_p16", dtype=BF16, q_lens=[5] * 24)
    for i, (_, kv_len) in enumerate(lengths):
        rows = slice(5 * i, 5 * i + 5)
        if kv_len == 0:
            compare(f"request {i} out", out[rows], np.zeros((5, 40, 128)), 0)
            compare(f"request {i} lse", lse[rows], np.full((5, 40), -np.inf), 0)
        else:
            alone = (data[0][rows], [data[1][i]], [data[2][i]])
            against_reference(out[rows], lse[rows], alone, BF16, causal=True)


C29 = {
    "a": dict(num_qo_heads=32, num_kv_heads=2, head_dim=256,
              bounds=dict(requests=512, query_tokens=512, keys=4096, max_q_len=1)),
    "b": dict(num_qo_heads=64, num_kv_heads=4, head_dim=128,
              bounds=dict(requests=1, query_tokens=1, keys=200000)),
    "c": dict(num_qo_heads=32, num_kv_heads=4, head_dim=256,
              bounds=dict(requests=128, query_tokens=128 * 577, keys=577)),
}


def aligned_bytes(dev, n):
    """n bytes of 0xA5 at a 256-byte boundary."""
    if dev.name == "cpu":
        memory = np.full(n + 256, 0xA5, np.uint8)
        start = -memory.ctypes.data % 256
        return memory[start:start + n]
    return dev.put(np.full(n, 0xA5, np.uint8))


@pytest.mark.parametrize("name", C29)
def test_c29_workspace_size(device, kernel, name):
    """vllm-project/vllm#25342; sgl-project/sglang#2102; flashinfer-ai/flashinfer#5177"""
    dev = device_of(device)
    config = dict(C29[name], bounds=plait.Bounds(**C29[name]["bounds"]), dtype=BF16,
                  kv=plait.PagedKv(16), device=device, kernel=kernel, variant=plait.causal())
    n = plait.workspace_bytes(**config)
    if name == "a":
        assert n <= 64 << 20
    for too_few in (n - 256, 0):
        with pytest.raises(ValueError) as error:
            if too_few:
                plait.Attention(**config, workspace=plait.Workspace(buffer=aligned_bytes(dev, too_few)))
            else:
                plait.Attention(**config, workspace=plait.Workspace(device=device, bytes=0))
        assert str(n) in str(error.value) and str(too_few) in str(error.value)
    if device == "cpu":  # the full batches take minutes on two cores; the plan is cut all the same
        lengths = {"a": [(1, 4096)] * 3 + [(1, 77)], "b": [(1, 200000)], "c": [(40, 577)] * 2}[name]
    else:
        lengths = {"a": [(1, 4096)] * 512, "b": [(1, 200000)], "c": [(577, 577)] * 128}[name]
    memory = aligned_bytes(dev, n + 4096)
    attn = plait.Attention(**config, workspace=plait.Workspace(buffer=memory[:n]))
    heads, kv_heads, d = config["num_qo_heads"], config["num_kv_heads"], config["head_dim"]
    pages = [-(-kv // 16) for _, kv in lengths]
    cached = min(max(pages), 64)  # all requests read the same pages: V of page p is 1 + p % 2
    table = np.concatenate([np.arange(p) % 64 for p in pages])
    qo_indptr = np.cumsum([0] + [q for q, _ in lengths])
    attn.plan(qo_indptr=qo_indptr, kv_len=np.array([kv for _, kv in lengths]),
              kv_page_indptr=np.cumsum([0] + pages), kv_page_indices=table)
    k = np.zeros((cached, 16, kv_heads, d), np.float32)
    v = k + (1 + np.arange(cached) % 2)[:, None, None, None]
    q = dev.put(to_storage(np.zeros((1, heads, d), np.float32), BF16), BF16)
    q = (np.tile(q, (qo_indptr[-1], 1, 1)) if device == "cpu"
         else q.expand(int(qo_indptr[-1]), -1, -1).contiguous())
    out, lse = attn.run(q, [dev.put(to_storage(x, BF16), BF16) for x in (k, v)])
    dev.synchronize()
    lse = dev.get(lse)
    ones = 1 + (np.arange(max(pages) * 16) // 16) % 2
    means = np.cumsum(ones) / np.arange(1, len(ones) + 1)
    for i, (q_len, kv_len) in enumerate(lengths):
        seen = np.arange(kv_len - q_len, kv_len) + 1
        rows = slice(qo_indptr[i], qo_indptr[i + 1])
        if i in (0, 1, len(lengths) // 2, len(lengths) - 1):  # all of (c) is 1.2 GB
            got = from_storage(dev.get(out[rows], BF16), BF16)
            near(f"request {i} out", got,
                 np.broadcast_to(means[seen - 1][:, None, None], got.shape), BF16)
        near_lse(f"request {i} lse", lse[rows],
                 np.broadcast_to(np.log(seen)[:, None], lse[rows].shape))
    guard = dev.get(memory)[n:]
    assert (guard == 0xA5).all(), f"byte {np.argmax(guard != 0xA5)} behind the workspace was written"


def test_c32_plan_time(device, kernel):
    """flashinfer-ai/flashinfer#3338; sgl-project/sglang#23500; flashinfer-ai/flashinfer#253

    The bars of planning are measured by `plait bench plan`; here only that a plan never waits.
    """
    batch = 4096
    attn = plait.Attention(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16,
                           kv=plait.PagedKv(16), device=device, kernel=kernel,
                           variant=plait.causal(),
                           bounds=plait.Bounds(requests=batch, query_tokens=batch, keys=8192))
    kv_len = (37 * np.arange(batch)) % 8000 + 1
    pages = -(-kv_len // 16)
    arguments = dict(qo_indptr=np.arange(batch + 1, dtype=np.int32), kv_len=kv_len.astype(np.int32),
                     kv_page_indptr=np.concatenate([[0], np.cumsum(pages)]).astype(np.int32),
                     kv_page_indices=np.arange(pages.sum(), dtype=np.int32))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        attn._plan(arguments["qo_indptr"], {n: x for n, x in arguments.items() if n != "qo_indptr"}, [])
        times.append(time.perf_counter() - start)
    assert sorted(times)[3] < 20e-3, f"plan of 4096 requests took {sorted(times)[3] * 1e3:.1f} ms"


C36 = list(itertools.product([1, 2, 8, 33, 64], ["first", "middle", "last"]))


@pytest.mark.parametrize("q_len", [1, 130])
def test_c36_repeatable(device, kernel, q_len):
    """flashinfer-ai/flashinfer#696, #1675; deepseek-ai/FlashMLA#212"""
    runs = 50 if device != "cpu" else (50 if q_len == 1 else 3)
    batches = C36 if device != "cpu" else [C36[0], (8, "last"), (64, "middle")]
    alone = {}
    for batch, place in batches:
        companions = [(7 * i) % 5000 + 1 for i in range(batch - 1)]
        at = {"first": 0, "middle": (batch - 1) // 2, "last": batch - 1}[place]
        lengths = [(1, kv) for kv in companions]
        lengths.insert(at, (q_len, 3001))
        q_lens = [n for n, _ in lengths]
        x = std(49, [(q_len, 3001)], 32, 8, 128, BF16)
        others = std(149, [(1, kv) for kv in companions] or [(0, 0)], 32, 8, 128, BF16)
        k, v = ([*others[n]] if companions else [] for n in (1, 2))
        k.insert(at, x[1][0])
        v.insert(at, x[2][0])
        data = np.concatenate([others[0][:at], x[0], others[0][at:]]), k, v
        out, lse, built = attend(data, device, kernel, format="csr_p16", dtype=BF16, q_lens=q_lens)
        first = (built.stored_out.copy(), lse.copy())
        for n in range(runs - 1):
            _, again, again_lse = harness.execute(built) if n % 10 == 0 else rerun(built)
            same_bits(again, first[0], f"batch {batch}, run {n}: out ")
            same_bits(again_lse, first[1], f"batch {batch}, run {n}: lse ")
        rows = slice(at, at + q_len)
        if not alone:
            against_reference(out, lse, data, BF16, q_lens, causal=True)
            alone = {"out": out[rows], "lse": lse[rows]}
        two_ulp = 2 * 2.0**-7 * np.abs(alone["out"])
        compare(f"batch {batch}, X {place}, out", out[rows], alone["out"], np.maximum(two_ulp, 1e-3))
        near_lse(f"batch {batch}, X {place}, lse", lse[rows], alone["lse"])


def rerun(built):
    """run() again on the same plan."""
    built.attention.run(built.q.tensor, built.kv, out=built.out.tensor, lse=built.lse.tensor)
    built.device.synchronize()
    return None, built.out.download(), built.lse.download()
