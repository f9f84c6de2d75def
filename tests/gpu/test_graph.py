"""One captured CUDA graph serves every later plan within the bounds."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import plait
from plait.reference import from_storage

from harness import attend, device_of, same_bits
from streams import std

BF16 = "bfloat16"


class Step:
    """An Attention with fixed q, cache and outputs, run eagerly or as one captured graph."""

    def __init__(self, kernel, rows, heads, kv_heads, num_pages, seed, keys, requests, max_q_len=0,
                 fill_workspace=False, device_table=False, variant=None, num_levels=1):
        torch.manual_seed(seed)
        config = dict(num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=128, dtype=BF16,
                      kv=plait.ComposedKv(plait.PagedKv(16), num_levels), device="cuda:0", kernel=kernel,
                      variant=variant or plait.causal(),
                      bounds=plait.Bounds(requests=requests, query_tokens=rows, keys=keys,
                                          total_pages=0 if device_table else num_pages,
                                          max_q_len=max_q_len))
        self.memory = torch.zeros(plait.workspace_bytes(**config), dtype=torch.uint8, device="cuda")
        self.fill_workspace = fill_workspace
        self.attn = plait.Attention(**config, workspace=plait.Workspace(buffer=self.memory))
        self.q = 2 * torch.randn(rows, heads, 128, device="cuda", dtype=torch.bfloat16)
        shape = (num_pages, 16, kv_heads, 128)
        self.cache = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(rows, heads, device="cuda")
        self.num_pages = num_pages
        width = -(-keys // 16)
        self.table = torch.zeros(requests, width, dtype=torch.int32, device="cuda") if device_table else None

    def plan(self, lengths):
        if self.fill_workspace:
            self.memory.fill_(0x7F)
        pages = [-(-kv // 16) for _, kv in lengths]
        rng = np.random.default_rng(sum(pages))
        ids = rng.permutation(self.num_pages)[:sum(pages)] if sum(pages) <= self.num_pages else \
            rng.integers(0, self.num_pages, sum(pages))
        tables = {"kv_len": np.array([kv for _, kv in lengths], np.int32)}
        if self.table is None:
            tables |= {"kv_page_indptr": np.cumsum([0, *pages]), "kv_page_indices": ids}
        else:
            at = 0
            for row, n in enumerate(pages):  # rewritten in place between replays
                self.table[row, :n] = torch.from_numpy(ids[at:at + n].astype(np.int32)).cuda()
                at += n
            tables["block_table"] = self.table[:len(lengths)]
        return self.attn.plan(qo_indptr=np.cumsum([0] + [q for q, _ in lengths]), **tables,
                              **self.mask(lengths))

    def mask(self, lengths):
        return {}

    def eager(self):
        self.attn.run(self.q, self.cache, out=self.out, lse=self.lse)
        return self.results()

    def capture(self):
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.attn.run(self.q, self.cache, out=self.out, lse=self.lse)

    def replay(self):
        self.out.fill_(7)
        self.lse.fill_(7)
        self.graph.replay()
        return self.results()

    def results(self):
        torch.cuda.synchronize()
        dev = device_of("cuda:0")
        return dev.get(self.out, BF16), dev.get(self.lse)


def check_replays(step, first, later):
    """Captures with the plan `first`; each of `later` replays with the bits of its eager run."""
    eager = {}
    for lengths in (first, *later):
        step.plan(lengths)
        eager[tuple(lengths)] = step.eager()
        rows = sum(q for q, _ in lengths)
        out, lse = (x[rows:] for x in eager[tuple(lengths)])
        assert (out == 0).all() and np.isneginf(lse).all(), "padding rows are (0, -inf)"
        assert not np.isnan(from_storage(eager[tuple(lengths)][0], BF16)).any()
    step.plan(first)
    step.capture()
    for lengths in (first, *later, first):
        plan = step.plan(lengths)
        for _ in range(2):  # a plan serves any number of runs
            out, lse = step.replay()
            same_bits(out, eager[tuple(lengths)][0], f"{lengths[:3]}... out ")
            same_bits(lse, eager[tuple(lengths)][1], f"{lengths[:3]}... lse ")
    return plan


class MaskedStep(Step):
    """Every plan brings mask bits over the last keys, on the device or (long ones) on the host."""

    def mask(self, lengths):
        rng = np.random.default_rng(sum(kv for _, kv in lengths))
        covered = [(q, min(kv, 3 * q)) for q, kv in lengths]
        bits = np.concatenate([np.packbits(rng.random(q * n) < 0.7, bitorder="little")
                               for q, n in covered])
        on_device = len(bits) < 200
        return {"packed_custom_mask": torch.from_numpy(bits).cuda() if on_device else bits,
                "first_masked_key": np.array([kv - n for (_, kv), (_, n) in zip(lengths, covered)])}


def test_later_masks_serve_a_captured_run(kernel):
    step = MaskedStep(kernel, 80, 8, 2, 900, 44, 4000, 4, variant=plait.custom_mask())
    check_replays(step, [(8, 600), (8, 41)],
                  [[(5, 9)], [(70, 3000), (1, 1), (0, 7), (9, 900)], [(8, 4000), (8, 8)], [(80, 80)]])


class SharingStep(Step):
    """Requests with equal lengths agree on the first half of their blocks of 64; the first 512 keys are
    everybody's. In the order of the batch none are neighbours."""

    def plan(self, lengths):
        rng = np.random.default_rng(len(lengths))
        order = rng.permutation(len(lengths))
        qo_indptr = np.cumsum([0] + [lengths[i][0] for i in order])
        kv_len = np.array([lengths[i][1] for i in order], np.int64)
        ids = [[*range(min(8, n // 64)), *(1000 * n + j for j in range(8, n // 128))] for n in kv_len]
        width = -(-max(kv_len, default=1) // 16)
        table = rng.permutation(self.num_pages)[:len(order) * width].reshape(len(order), width)
        levels = plait.compose_radix(self.attn, qo_indptr=qo_indptr, hash_ids=ids, block_tokens=64,
                                     kv_len=kv_len, block_table=table)
        plan = self.attn.plan(qo_indptr=qo_indptr, levels=levels)
        self.most_levels = max(plan.nodes["level"], default=-1) + 1
        return plan


def test_tables_on_the_device_are_not_composed(kernel):
    """What levels are made of is read on the host."""
    step = SharingStep(kernel, 4, 16, 4, 64, 47, 256, 4, num_levels=2)
    with pytest.raises(ValueError, match="compose_radix: block_table is on cuda:0.* on the cpu"):
        plait.compose_radix(step.attn, qo_indptr=np.arange(3), hash_ids=[[1], [1]], block_tokens=16,
                            kv_len=np.array([17, 18]),
                            block_table=torch.zeros(2, 2, dtype=torch.int32, device="cuda"))


def test_composed_plans_serve_a_captured_run(kernel):
    """Trees of any depth, batches that share nothing, and empty ones."""
    step = SharingStep(kernel, 48, 16, 4, 48 * 160, 47, 2560, 48, num_levels=4)
    deep = [(1, 2000)] * 12 + [(1, 2500)] * 12 + [(1, 700)] * 8
    step.plan(deep)
    assert step.most_levels >= 1, "the case is there for shared nodes"
    check_replays(step, deep, [[(1, 5), (1, 900)], [(1, 2400)] * 40, [], [(1, 0), (0, 9), (3, 600)],
                               [(1, 1500), (7, 1500), (1, 1500)]])


@pytest.mark.parametrize("fill", [False, True])
def test_c26_replan_after_capture(kernel, fill):
    """flashinfer-ai/flashinfer#4002, #5176"""
    step = Step(kernel, 16, 16, 2, 16 * 188 + 5, 36, 3000, 16, max_q_len=1, fill_workspace=fill)
    step.plan([(1, 3000)] * 16)
    step.eager()
    check_replays(step, [(1, 5), (1, 900)], [[(1, 7), (1, 33)], [(1, 3000)] * 16])


@pytest.mark.parametrize("device_table", [False, True])
def test_c27_lengths_beyond_the_captured(kernel, device_table):
    """flashinfer-ai/flashinfer#187, #2046"""
    step = Step(kernel, 8, 32, 8, 7000, 38, 100000, 8, max_q_len=1, device_table=device_table)
    later = [(1, n) for n in (100000, 1, 17, 4096, 0, 0, 999, 1001)]
    padded = [(1, n) for n in (100, 2000, 3, 64, 65, 700)]  # six requests, two rows of padding
    with_empty = padded + [(0, 0), (1, 0)]
    check_replays(step, [(1, 1000)] * 8, [later, padded, with_empty])


def test_mixed_batches(kernel):
    """Prefill, decode and split rows in one graph."""
    step = Step(kernel, 512, 16, 4, 2000, 40, 20000, 12)
    check_replays(step, [(1, 500), (200, 200), (1, 3)],
                  [[(300, 1000), (1, 15000)] + [(1, 37 * i) for i in range(10)], [(5, 9)], [],
                   [(512, 512)]])


def test_the_plan_is_split_in_one_and_not_in_the_other(kernel):
    step = Step(kernel, 2, 8, 1, 1300, 41, 20000, 2, max_q_len=1)
    assert len(step.plan([(1, 20000), (1, 1)]).merge_indptr) > 0
    check_replays(step, [(1, 20), (1, 1)], [[(1, 20000), (1, 1)], [(1, 64), (1, 3)]])


def test_planning_while_capturing_is_refused(kernel):
    step = Step(kernel, 2, 8, 1, 30, 41, 200, 2)
    step.plan([(1, 20)])
    step.eager()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises((ValueError, RuntimeError)) as error:
            step.plan([(1, 30)])
        step.attn.run(step.q, step.cache, out=step.out, lse=step.lse)
    assert "captur" in str(error.value)
    want = step.eager()
    graph.replay()
    same_bits(step.results()[0], want[0], "out ")


def test_a_captured_q_with_fewer_rows_than_the_plan(kernel):
    """A replay computes the rows that its q has, and writes nothing beyond them; split rows too."""
    step = Step(kernel, 16, 8, 2, 700, 43, 9000, 16)
    step.plan([(8, 16)])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.attn.run(step.q[:8], step.cache, out=step.out[:8], lse=step.lse[:8])
    for lengths in ([(9, 9)], [(16, 16)], [(1, 9000), (15, 900)], [(3, 5)]):
        step.plan(lengths)
        out, lse = (x.copy() for x in step.eager())
        step.out.fill_(7)
        step.lse.fill_(7)
        graph.replay()
        got, got_lse = step.results()
        same_bits(got[:8], out[:8], f"{lengths}: out ")
        same_bits(got_lse[:8], lse[:8], f"{lengths}: lse ")
        assert (step.out[8:] == 7).all() and (step.lse[8:] == 7).all()


def test_planning_beside_a_capture(kernel):
    """On a stream of its own, while another one captures in global mode: neither disturbs the
    other."""
    captured, other = (Step(kernel, 64, 8, 1, 4000, seed, 20000, 64) for seed in (41, 42))
    captured.plan([(1, 20)])
    want = captured.eager()
    beside = torch.cuda.Stream()
    long = [(1, 900)] * 64  # of a size that pins and allocates anew
    slots = np.arange(2, dtype=np.int64)
    rows = torch.ones(2, 1, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        captured.attn.run(captured.q, captured.cache, out=captured.out, lse=captured.lse)
        with torch.cuda.stream(beside):
            for lengths in ([(1, 30)], long, long):
                other.plan(lengths)
            plait.append_kv(rows, rows, other.cache, kv=plait.PagedKv(16), slot_mapping=slots)
    beside.synchronize()
    got = other.eager()
    other.plan(long)
    same_bits(got[0], other.eager()[0], "out ")
    captured.out.fill_(7)
    graph.replay()
    same_bits(captured.results()[0], want[0], "out ")


def test_c28_in_a_graph(kernel):
    """flashinfer-ai/flashinfer#726"""
    step = Step(kernel, 120, 40, 8, 6260, 39, 100000, 24)
    check_replays(step, [(5, 5)] * 3 + [(5, 0)] * 21,
                  [[(5, 0)] * 24, [(5, 0)] * 7 + [(5, 100000)] + [(5, 0)] * 16])


def test_eager_means_the_reference(kernel):
    """So that equal bits are also right: the same kernels over the same format."""
    data = std(36, [(1, 900), (1, 5)], 16, 2, 128, BF16)
    from reports import against_reference
    out, lse, _ = attend(data, "cuda:0", kernel, format="csr_p16", dtype=BF16, q_lens=[1, 1],
                         decode_only=True)
    against_reference(out, lse, data, BF16, [1, 1], causal=True)


# In a process of its own, whose first call of either operation is captured.
FIRST_CALLS = """
import numpy as np, torch, plait
attn = plait.Attention(num_qo_heads=4, num_kv_heads=2, head_dim=64, dtype="float16", kv=plait.PagedKv(16),
                       device="cuda:0", bounds=plait.Bounds(requests=1, query_tokens=1, keys=16))
v = torch.randn(5, 2, 4, 64, device="cuda", dtype=torch.float16)
lse = torch.randn(5, 2, 4, device="cuda")
out, out_lse = torch.empty_like(v[:, 0]), torch.empty_like(lse[:, 0])
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    plait.merge_states(v, lse, out=out, out_lse=out_lse)
graph.replay()
torch.cuda.synchronize()
want, want_lse = plait.merge_states(v, lse)
torch.cuda.synchronize()
assert torch.equal(out, want) and torch.equal(out_lse, want_lse)
"""


def test_a_first_merge_can_be_captured():
    result = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
