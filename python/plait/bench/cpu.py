"""The CPU backend beside PyTorch SDPA (where installed) and the copy bandwidth of the same run."""

import statistics
import time

from plait import _plait
from plait.bench import row
from plait.bench.workload import Workload


def _seconds(work, min_seconds=1.0, min_calls=5):
    work()
    times = []
    while len(times) < min_calls or sum(times) < min_seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _sdpa(workload):
    """The same attention in torch, its inputs dense and ready; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    import numpy as np

    def tensor(array):
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    w = workload
    q = tensor(w.q).view(w.batch, w.q_len, w.num_qo_heads, w.head_dim).transpose(1, 2).contiguous()
    k, v = (
        torch.stack([tensor(w.keys_values(i)[n]) for i in range(w.batch)])
        .transpose(1, 2)
        .contiguous()
        for n in (0, 1)
    )
    causal = w.causal and w.q_len > 1  # top left and bottom right agree: q_len is 1 or kv_len
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )


def cpu():
    """Decode 8 x 2048 keys and prefill 2 x 1024, 32/8 heads, d 128, float32 and bfloat16."""
    copy = _plait.copy_bandwidth()
    rows = [row("copy of 256 MiB, all threads", "read and written", copy / 1e9, "GB/s")]
    for dtype in ("float32", "bfloat16"):
        for workload in (Workload(8, 1, 2048, dtype, page_size=16), Workload(2, 1024, 1024, dtype)):
            workload.prepare()
            seconds = _seconds(workload.run)
            flops, moved = workload.work()
            case = workload.name
            rows.append(row(case, "time", seconds * 1e6, "us"))
            if workload.q_len == 1:
                rows.append(row(case, "bandwidth", moved / seconds / 1e9, "GB/s"))
                rows.append(row(case, "copy bandwidth / ours", copy / (moved / seconds), "x"))
            else:
                rows.append(row(case, "work", flops / seconds / 1e9, "GFLOP/s"))
            sdpa = _sdpa(workload)
            if sdpa is not None:
                theirs = _seconds(sdpa)
                rows.append(row(case, "torch SDPA", theirs * 1e6, "us"))
                rows.append(row(case, "torch SDPA / ours", theirs / seconds, "x"))
    return rows
