"""Layers of a model, one run behind the other: what lies between them in a stream and in a graph.

A layer has a cache of its own and one plan serves all. In front of them, and of the launches that
they are compared with, a read of 2 GiB keeps the GPU busy until the host has launched everything.
"""

import numpy as np

from plait import _plait
from plait.bench import row
from plait.bench.cases import CASES
from plait.bench.timing import options, time_plait
from plait.bench.workload import Pools, Workload
from plait.nvrtc import use_wheels
from plait.tensors import parse_device

_CASES, _LAYERS = ("d16_const1k", "d64_4k_page16"), (1, 2, 8)


def layers(device="cuda:0", seconds=0.5, cases=_CASES):
    """Rows of decode cases, 16 x 1024 and 64 x 4096: us of all layers. Raises RuntimeError where a
    layer's rows change between runs, or are off."""
    use_wheels()
    reader = _plait.MemoryReader(parse_device(device), 2 << 30)
    rows = []
    for name in cases:
        model = _Model(CASES[name], device)
        for count in _LAYERS:
            rows += model.time(count, reader, seconds)
        model.check()
    return rows


class _Model:
    def __init__(self, case, device):
        self.case, self.device = case, device
        self.workload = Workload(case, device)
        pools = Pools(device, [self.workload])
        caches = []
        for key, (pages, *page) in self.workload.shapes().items():
            if key[0] != "q":  # first of all, since pools do not grow
                whole = pools.take(key, (max(_LAYERS) * pages, *page))
                parts = [(i * pages, (i + 1) * pages) for i in range(max(_LAYERS))]
                caches.append([_rows(whole, *part) for part in parts])
        self.workload.compile()
        self.workload.lay_out(pools)
        self.workload.prepare()
        if problem := self.workload.check():
            raise RuntimeError(f"{case.name}: {problem}")
        self.layers = []
        for cache in zip(*caches):
            out, lse = self.workload.attention.run(self.workload.q, cache)
            self.layers.append((cache, out, lse))
            self.wanted = self._results()  # waits: alone nothing overlaps

    def time(self, count, reader, seconds):
        def run(stream):
            for cache, out, lse in self.layers[:count]:
                self.workload.attention.run(self.workload.q, cache, out=out, lse=lse, stream=stream)

        def plan_and_run(stream):
            self.plan(stream)
            run(stream)

        case = f"{self.case.name}, {count} layer{'s' if count > 1 else ''}"
        graph = time_plait(self.device, run, seconds, calls=8).median_us
        yield row(case, "graph, L2 read empty before", graph, "us")
        for what, work in (("run", run), ("plan and run", plan_and_run)):
            us = _in_stream(self.device, work, reader, seconds)
            yield row(case, f"stream, {what}, behind a long read", us, "us")

    def plan(self, stream):
        w = self.workload
        tables = dict(kv_page_indptr=w.page_indptr, kv_page_indices=w.page_indices, kv_len=w.kv_len)
        w.attention._plan(w.qo_indptr, tables, [], stream=stream)

    def check(self):
        if not all((a == b).all() for a, b in zip(self._results(), self.wanted)):
            raise RuntimeError(f"{self.case.name}: rows changed where layers follow each other")

    def _results(self):
        return [_to_numpy(x) for _, *results in self.layers for x in results]


def _rows(array, begin, end):
    return array[begin:end] if isinstance(array, np.ndarray) else array.rows(begin, end)


def _to_numpy(array):
    return array.copy() if isinstance(array, np.ndarray) else array.to_numpy()


def _in_stream(device, work, reader, seconds):
    def both(stream):
        reader(stream)
        work(stream)

    how = options(seconds, calls=1)
    return _plait.time_graphs(parse_device(device), both, reader, how).median_us
