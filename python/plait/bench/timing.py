"""Times on a GPU, of plait and of others by one method: graphs of [read the L2 empty, work] x n and
of [read the L2 empty] x n, launched in turn; the median of one less that of the other."""

import statistics
import time

from plait import _plait
from plait.tensors import parse_device


def options(seconds, calls=25):
    """`seconds` of launches, of which the first third settles the clocks and does not count."""
    result = _plait.CudaTimingOptions()
    result.warm_seconds, result.min_seconds = seconds / 3, 2 * seconds / 3
    result.calls_a_graph = calls
    return result


def time_plait(device, work, seconds, **more):
    """CudaTiming of work(stream)."""
    return _plait.time_on_gpu(parse_device(device), work, options(seconds, **more))


_HIDING_BYTES = 1 << 30  # a quarter of a millisecond's reading


def time_eager(device, work, seconds):
    """CudaTiming of work(stream) called from Python each time, as by an engine without graphs. The
    reads before each call are long enough that the device never waits for the host, which is
    checked: RuntimeError."""
    how = options(seconds)
    reader = _plait.MemoryReader(parse_device(device), _HIDING_BYTES)
    host_us = []
    work(None)

    def launch(with_work):
        def on(stream):
            start = time.perf_counter()
            for _ in range(how.calls_a_graph):
                reader(stream)
                if with_work:
                    work(stream)
            if with_work:
                host_us.append((time.perf_counter() - start) / how.calls_a_graph * 1e6)

        return on

    timing = _plait.time_graphs(parse_device(device), launch(True), launch(False), how)
    if statistics.median(host_us) > timing.reads_us:
        raise RuntimeError(
            f"the host takes {statistics.median(host_us):.0f} us to launch a call, longer than the "
            f"{timing.reads_us:.0f} us of reading that are to hide it"
        )
    return timing


def time_torch(device, work, seconds, **more):
    """CudaTiming of what work() puts on torch's current stream; torch captures, since its
    allocator must know of it."""
    import torch

    how = options(seconds, **more)
    reader = _plait.MemoryReader(parse_device(device), 0)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        reader(side.cuda_stream)
        work()
        work()
    side.synchronize()

    def graph(with_work):
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=side):
            for _ in range(how.calls_a_graph):
                reader(side.cuda_stream)
                if with_work:
                    work()
        return captured

    def launch(captured):
        def on(stream):
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=side.device)):
                captured.replay()

        return on

    return _plait.time_graphs(parse_device(device), launch(graph(True)), launch(graph(False)), how)


def ceilings(device, seconds, gemm=True):
    """What this chip does now: {"read": bytes a second of 2 GiB, "gemm": FLOP a second of a bf16
    matrix product of 8192^3 through torch, or why there is none}."""
    reader = _plait.MemoryReader(parse_device(device), 2 << 30)
    read_us = time_plait(device, reader, seconds, calls=5).median_us
    found = {"read": reader.bytes / read_us * 1e6}
    if not gemm:
        return found | {"gemm": "not asked for"}
    torch, why = torch_on(device)
    if torch is None:
        return found | {"gemm": why}
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    gemm_us = time_torch(device, lambda: torch.mm(a, b, out=out), seconds, calls=10).median_us
    return found | {"gemm": 2 * 8192**3 / gemm_us * 1e6}


def torch_on(device):
    """(torch, "") where it sees the device, else (None, why not)."""
    try:
        import torch
    except ImportError as error:
        return None, str(error)
    if not torch.cuda.is_available():
        return None, "torch sees no GPU"
    torch.cuda.set_device(torch.device(device if ":" in device else device + ":0"))
    return torch, ""
