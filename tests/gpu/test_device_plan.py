"""Lengths and tables on the GPU, planned there: the bits of the host's plan, in graphs too."""

import numpy as np
import pytest
import torch

import plait

from harness import device_of, same_bits

BF16 = "bfloat16"
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16


class Batches:
    """Two Attentions of one shape, q and cache: one is planned on the host by prefix sums, the
    other on the device from arrays that stay where they are."""

    def __init__(self, kernel, requests, rows, keys, max_q_len=0, form="padded", seed=3, variant=None):
        torch.manual_seed(seed)
        self.form, self.requests, self.width = form, requests, -(-keys // PAGE)
        self.num_pages = 2 * self.width + 7
        ragged = form == "ragged"
        config = dict(num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="bfloat16",
                      kv=plait.RaggedKv() if ragged else plait.PagedKv(PAGE), device="cuda:0",
                      kernel=kernel, variant=variant or plait.causal(), scheduler="prefix_sum",
                      bounds=plait.Bounds(requests=requests, query_tokens=rows, keys=keys,
                                          max_q_len=max_q_len))
        self.on_host, self.on_device = plait.Attention(**config), plait.Attention(**config)
        self.q = 2 * torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        shape = (self.num_pages * PAGE, KV_HEADS, DIM) if ragged else (self.num_pages, PAGE, KV_HEADS, DIM)
        self.cache = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        self.out, self.lse = torch.empty_like(self.q), torch.empty(rows, HEADS, device="cuda")
        ints = dict(dtype=torch.int32, device="cuda")
        self.qo_indptr = torch.zeros(requests + 1, **ints)
        self.kv_len = torch.zeros(requests, dtype=torch.int64, device="cuda")
        self.table = torch.zeros(requests, self.width, **ints)
        self.page_indptr = torch.zeros(requests + 1, **ints)
        self.last_page_len = torch.zeros(requests, **ints)
        self.begin = torch.zeros(requests, **ints)

    def write(self, lengths):
        """The arrays on the device; requests beyond `lengths` get neither queries nor keys."""
        lengths = [*lengths, *[(0, 0)] * (self.requests - len(lengths))]
        kv_len = np.array([kv for _, kv in lengths])
        pages = -(-kv_len // PAGE)
        rng = np.random.default_rng(int(kv_len.sum()))
        host = {
            "qo_indptr": np.cumsum([0] + [q for q, _ in lengths]),
            "kv_len": kv_len,
            "table": rng.integers(0, self.num_pages, (self.requests, self.width)),
            "page_indptr": np.cumsum([0, *pages]),
            "last_page_len": np.where(pages > 0, kv_len - (pages - 1) * PAGE, 0),
            "begin": rng.integers(0, self.num_pages * PAGE - kv_len + 1),
        }
        for name, values in host.items():
            array = getattr(self, name)
            array.copy_(torch.from_numpy(values).to(array.dtype))
        return host

    def tables(self, source):
        get = source.get if isinstance(source, dict) else lambda name: getattr(self, name)
        indices = get("table").reshape(-1)
        return {
            "padded": lambda: dict(block_table=get("table"), kv_len=get("kv_len")),
            "csr": lambda: dict(kv_page_indptr=get("page_indptr"), kv_page_indices=indices,
                                kv_len=get("kv_len")),
            "csr_last": lambda: dict(kv_page_indptr=get("page_indptr"), kv_page_indices=indices,
                                     kv_last_page_len=get("last_page_len")),
            "ragged": lambda: dict(kv_begin=get("begin"), kv_len=get("kv_len")),
        }[self.form]()

    def expected(self, lengths):
        host = self.write(lengths)
        plan = self.on_host.plan(qo_indptr=host["qo_indptr"], **self.tables(host))
        assert plan.candidates[plan.chosen]["name"] == "prefix_sum"
        out, lse = self.on_host.run(self.q, self.cache)
        torch.cuda.synchronize()
        return plan, out.clone(), lse.clone()

    def plan_on_device(self):
        return self.on_device.plan(qo_indptr=self.qo_indptr, **self.tables(None))

    def run_on_device(self):
        self.on_device.run(self.q, self.cache, out=self.out, lse=self.lse)

    def check(self, want, what):
        torch.cuda.synchronize()
        dev = device_of("cuda:0")
        same_bits(dev.get(self.out, BF16), dev.get(want[1], BF16), f"{what} out ")
        same_bits(dev.get(self.lse), dev.get(want[2]), f"{what} lse ")
        self.out.fill_(7)
        self.lse.fill_(7)


DECODES = [
    [(1, 1000)] * 8,
    [(1, n) for n in (9000, 1, 17, 4096, 0, 63, 64, 65)],
    [(1, 9000)],
    [],
    [(0, 5), (1, 700), (0, 0), (1, 8999)],
]


@pytest.mark.parametrize("form", ["padded", "csr", "csr_last", "ragged"])
def test_the_bits_of_the_hosts_plan(kernel, form):
    batches = Batches(kernel, 8, 8, 9000, max_q_len=1, form=form)
    split = 0
    for lengths in DECODES:
        want = batches.expected(lengths)
        split += len(want[0].merge_indptr) > 0
        assert batches.plan_on_device() is None
        for _ in range(2):
            batches.run_on_device()
            batches.check(want, f"{lengths[:3]}...")
    assert split > 0
    with pytest.raises(ValueError, match="current_plan: the lengths lie on the device"):
        _ = batches.on_device.current_plan


@pytest.mark.parametrize("variant", [plait.causal(), plait.sliding_window(100, sink_tokens=4)],
                         ids=["causal", "window"])
def test_prefill_and_mixed_batches(kernel, variant):
    batches = Batches(kernel, 12, 600, 20000, variant=variant)
    for lengths in ([(600, 600)], [(300, 1000), (1, 15000)] + [(1, 37 * i) for i in range(10)],
                    [(1, 500), (200, 200), (0, 0), (7, 3)]):
        want = batches.expected(lengths)
        batches.plan_on_device()
        batches.run_on_device()
        batches.check(want, f"{lengths[:3]}...")


@pytest.mark.parametrize("first_call_is_captured", [False, True])
def test_plan_and_run_in_one_graph(kernel, first_call_is_captured):
    """Captured once; replayed for whatever lengths the arrays then have."""
    batches = Batches(kernel, 8, 8, 9000, max_q_len=1)
    wanted = [batches.expected(lengths) for lengths in DECODES]
    batches.write(DECODES[0])
    if not first_call_is_captured:
        batches.plan_on_device()
        batches.run_on_device()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batches.plan_on_device()
        batches.run_on_device()
        batches.run_on_device()  # a second layer
    for lengths, want in [*zip(DECODES, wanted), (DECODES[1], wanted[1])]:
        batches.write(lengths)
        graph.replay()
        batches.check(want, f"{lengths[:3]}...")


def test_plans_of_host_and_device_take_turns(kernel):
    """One run, captured once, serves both."""
    batches = Batches(kernel, 8, 8, 9000, max_q_len=1)
    wanted = [batches.expected(lengths) for lengths in DECODES]
    batches.plan_on_device()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batches.run_on_device()
    for i, (lengths, want) in enumerate(zip(DECODES, wanted)):
        host = batches.write(lengths)
        if i % 2:
            batches.on_device.plan(qo_indptr=host["qo_indptr"], **batches.tables(host))
        else:
            batches.plan_on_device()
        graph.replay()
        batches.check(want, f"{lengths[:3]}...")


def test_large_batches(kernel):
    batches = Batches(kernel, 4096, 4096, 600, max_q_len=1)
    rng = np.random.default_rng(5)
    for n in (4096, 257, 513):
        want = batches.expected([(1, int(kv)) for kv in rng.integers(0, 600, n)])
        batches.plan_on_device()
        batches.run_on_device()
        batches.check(want, f"batch {n}")


def test_refusals_name_the_array():
    batches = Batches("auto", 2, 2, 64)
    host = batches.write([(1, 5), (1, 6)])
    with pytest.raises(ValueError, match="kv_len is on the cpu, but qo_indptr is on cuda:0"):
        batches.on_device.plan(qo_indptr=batches.qo_indptr, block_table=batches.table,
                               kv_len=host["kv_len"])
    with pytest.raises(ValueError, match="kv_len is on the device; pass kv_len on the host"):
        batches.on_device.plan(qo_indptr=host["qo_indptr"], block_table=batches.table,
                               kv_len=batches.kv_len)
