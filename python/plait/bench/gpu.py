"""Prefill and decode on a GPU: CUDA-graph replays over an L2 made cold by reads."""

from plait import _plait
from plait.bench import row
from plait.bench.workload import Workload
from plait.tensors import parse_device


def _measure(workload):
    workload.prepare()
    timing = _plait.time_on_gpu(
        parse_device(workload.device), workload.run, _plait.CudaTimingOptions()
    )
    seconds = timing.median_us * 1e-6
    flops, moved = workload.work()
    case = f"{workload.name}, {workload.attention.kernel_name}"
    rows = [
        row(case, "time", timing.median_us, "us"),
        row(case, "fastest graph", timing.min_us, "us"),
    ]
    if workload.q_len == 1:
        rows.append(row(case, "bandwidth", moved / seconds / 1e12, "TB/s"))
    else:
        rows.append(row(case, "work", flops / seconds / 1e12, "TFLOP/s"))
    rows.append(row(case, "modelled balance", workload.plan.balance, "busiest / mean"))
    return rows


def prefill(device="cuda", kernel="auto"):
    """4 x 4096, ragged, causal and full, 32/8 heads, d 128, bfloat16."""
    return [
        r
        for causal in (True, False)
        for r in _measure(Workload(4, 4096, 4096, causal=causal, device=device, kernel=kernel))
    ]


def decode(device="cuda", kernel="auto"):
    """64 x 4096 keys in shuffled pages of 16 and of 1, 32/8 heads, d 128, bfloat16."""
    return [
        r
        for page_size in (16, 1)
        for r in _measure(Workload(64, 1, 4096, page_size=page_size, device=device, kernel=kernel))
    ]
