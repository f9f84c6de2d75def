"""What needs no data: planning, balance, the overhead of a call, compiling."""

import statistics
import time

import numpy as np

from plait import _plait
from plait.attention import Attention, Bounds
from plait.bench import row
from plait.bench.timing import options
from plait.device_array import DeviceArray
from plait.formats import PagedKv
from plait.nvrtc import use_wheels
from plait.tensors import parse_device


def _rows(cpp_rows):
    return [row(r.case_name, r.metric, r.value, r.unit) for r in cpp_rows]


def plan():
    """Host time of a plan in C++, and where there is a GPU the time of its planner: decode of
    lengths (37 i mod 8000) + 1."""
    return _rows(_plait.bench_plan()) + (device_plan() if _plait.driver_info().gpus else [])


def _planning(attention, arrays):
    return lambda stream: attention.plan(**arrays, stream=stream)


def device_plan(device="cuda:0", seconds=0.5):
    """The kernel that plans lengths on the device: 32/8 heads, d 128, page 16."""
    use_wheels()
    rows = []
    for requests in (16, 256, 4096):
        attention = Attention(
            num_qo_heads=32,
            num_kv_heads=8,
            head_dim=128,
            kv=PagedKv(16),
            device=device,
            bounds=Bounds(requests=requests, query_tokens=requests, keys=8000, max_q_len=1),
        )
        arrays = {
            "qo_indptr": np.arange(requests + 1, dtype=np.int32),
            "kv_len": np.arange(requests, dtype=np.int32) * 37 % 8000 + 1,
            "block_table": np.zeros((requests, 500), np.int32),
        }
        arrays = {name: DeviceArray.from_numpy(a, device) for name, a in arrays.items()}
        attention.plan(**arrays)  # compiles
        case = f"batch {requests}, {attention.num_ctas} CTAs"
        for l2 in ("warm", "cold"):
            how = options(seconds)
            how.cold_l2 = l2 == "cold"
            time = _plait.time_on_gpu(parse_device(device), _planning(attention, arrays), how)
            rows.append(row(case, f"plan on the device, {l2} L2, median", time.median_us, "us"))
    return rows


def balance():
    """Modelled busiest CTA / mean of b x 4096 keys on 132 CTAs."""
    return _rows(_plait.bench_balance())


def compile(arch="90a"):
    """Cold NVRTC of every kernel shipped for an architecture, one after the other on one core."""
    kernels = _plait.compile_shipped(arch.removeprefix("sm_"))
    rows = []
    for k in kernels:
        if k.error:
            rows.append(row(k.kernel, f"failed: {k.error}", None, ""))
            continue
        rows.append(row(k.kernel, "cold NVRTC", k.seconds, "s"))
        rows.append(row(k.kernel, "spilled registers", k.spill_bytes, "bytes"))
    seconds = sorted(k.seconds for k in kernels if not k.error)
    if seconds:
        case = f"{len(kernels)} kernels of sm_{arch.removeprefix('sm_')}"
        rows.append(row(case, "worst", seconds[-1], "s"))
        rows.append(row(case, "median", seconds[len(seconds) // 2], "s"))
        rows.append(row(case, "spilled registers", sum(k.spill_bytes for k in kernels), "bytes"))
    return rows


def median_us(work, calls, rounds=9):
    """Median over rounds of the mean time of `calls` calls in a row."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def overhead():
    """Python calls on NumPy tensors whose work is nothing: one token, one key, one head."""
    attention = Attention(
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=8,
        dtype="float32",
        bounds=Bounds(requests=1, query_tokens=1, keys=1),
    )
    q = k = v = np.ones((1, 1, 8), np.float32)
    out, lse = np.empty_like(q), np.empty((1, 1), np.float32)
    indptr = np.array([0, 1], np.int32)
    attention.plan(qo_indptr=indptr, kv_indptr=indptr)
    case = "1 token, 1 key, 1 head of 8, NumPy"
    return [
        row(case, "run", median_us(lambda: attention.run(q, (k, v)), 2000), "us"),
        row(
            case,
            "run with out= and lse=",
            median_us(lambda: attention.run(q, (k, v), out=out, lse=lse), 2000),
            "us",
        ),
        row(
            case,
            "plan",
            median_us(lambda: attention.plan(qo_indptr=indptr, kv_indptr=indptr), 2000),
            "us",
        ),
    ]
