"""The CPU backend beside PyTorch SDPA (where installed) and the copy bandwidth of the same run."""

import statistics
import time

import numpy as np

from plait import _plait
from plait.bench import row
from plait.bench.case import Case
from plait.bench.workload import Pools, Workload


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
    w, case = workload, workload.case

    def tensor(array):
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    q = tensor(w.q).view(len(w.q_len), -1, case.num_qo_heads, case.head_dim)
    q = q.transpose(1, 2).contiguous()
    slots = np.stack([w.slots(i) for i in range(len(w.q_len))])
    k, v = (
        tensor(x.reshape(-1, case.num_kv_heads, case.head_dim)[slots]).transpose(1, 2).contiguous()
        for x in w.cache
    )
    causal = bool(w.q_len[0] > 1)  # top left and bottom right agree: q_len is 1 or kv_len
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )


def cpu():
    """Decode 8 x 2048 keys and prefill 2 x 1024, 32/8 heads, d 128, float32 and bfloat16."""
    copy = _plait.copy_bandwidth()
    rows = [row("copy of 256 MiB, all threads", "read and written", copy / 1e9, "GB/s")]
    for dtype in ("float32", "bfloat16"):
        for case in (
            Case("decode", "decode", (1,) * 8, (2048,) * 8, page_size=16, dtype=dtype),
            Case("prefill", "prefill", (1024,) * 2, (1024,) * 2, dtype=dtype),
        ):
            workload = Workload(case)
            workload.compile()
            workload.lay_out(Pools("cpu"))
            workload.prepare()
            wrong = workload.check()
            if wrong:
                raise RuntimeError(f"{case.describe()}: {wrong}")
            seconds = _seconds(workload.run)
            flops, moved = workload.work()
            name = case.describe()
            rows.append(row(name, "time", seconds * 1e6, "us"))
            if case.group == "decode":
                rows.append(row(name, "bandwidth", moved / seconds / 1e9, "GB/s"))
                rows.append(row(name, "copy bandwidth / ours", copy / (moved / seconds), "x"))
            else:
                rows.append(row(name, "work", flops / seconds / 1e9, "GFLOP/s"))
            sdpa = _sdpa(workload)
            if sdpa is not None:
                theirs = _seconds(sdpa)
                rows.append(row(name, "torch SDPA", theirs * 1e6, "us"))
                rows.append(row(name, "torch SDPA / ours", theirs / seconds, "x"))
    return rows
