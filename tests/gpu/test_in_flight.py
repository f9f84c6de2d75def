"""Nothing waits and nothing races: plans and runs in flight from several objects, streams and
threads, and kernels that begin while the ones before them end. What is in flight must have the bits
of the same calls waited for one by one; a kernel that spins holds the device meanwhile."""

import threading
import time

import numpy as np
import pytest
import torch

import plait

from harness import device_of, same_bits
from test_device_plan import DECODES, Batches
from test_graph import Step, check_replays
from test_streams_gpu import BF16, PLAN_A, PLAN_B, plan_arguments, spin, step

HELD_MS = 200  # by a spin kernel; what is called meanwhile takes far less


def bits(x):
    return device_of("cuda:0").get(x, BF16 if x.dtype == torch.bfloat16 else None)


def same(results, wanted, what):
    for (out, lse), (want, want_lse) in zip(results, wanted, strict=True):
        same_bits(bits(out), want, f"{what}: out ")
        same_bits(bits(lse), want_lse, f"{what}: lse ")


def waited_for(calls):
    """What each call leaves, alone on the device."""
    wanted = []
    for call in calls:
        out, lse = call()
        torch.cuda.synchronize()
        wanted.append((bits(out), bits(lse)))
    return wanted


@pytest.mark.parametrize("streams", [1, 2])
def test_two_threads_plan_while_the_device_is_held(kernel, streams):
    """Of an object each. Fifty plans are staged before the first is read: none may be written over,
    and none may wait."""
    steps = [step(kernel, 42), step(kernel, 43)]
    plans = [PLAN_A, PLAN_B, PLAN_A[::-1], [(1, 1)]]

    def call(s, lengths, results=None):
        queries, tables, levels = plan_arguments(lengths, s)
        s.attn._plan(queries, tables, levels)
        out, lse = results or (torch.empty_like(s.q), torch.empty(64, 8, device="cuda"))
        return s.attn.run(s.q, s.cache, out=out, lse=lse)

    wanted = [waited_for([lambda s=s, p=p: call(s, p) for p in plans]) for s in steps]
    rooms = [
        [(torch.empty_like(s.q), torch.empty(64, 8, device="cuda")) for _ in range(25)]
        for s in steps
    ]  # now: torch may wait when it allocates
    sides = [torch.cuda.Stream() for _ in range(streams)]
    results, errors = [[], []], []

    def work(i):
        try:
            with torch.cuda.stream(sides[i % streams]):
                for n in range(25):
                    results[i].append(call(steps[i], plans[n % 4], rooms[i][n]))
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    for side in sides:
        with torch.cuda.stream(side):
            spin(HELD_MS)
    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    held = not all(side.query() for side in sides)
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    assert held and took < HELD_MS / 1e3, f"planning waited for the stream: {took:.3f} s"
    for i in (0, 1):
        same(results[i], [wanted[i][n % 4] for n in range(25)], f"thread {i}")


def test_more_plans_in_flight_than_are_reserved(kernel):
    """Pinned memory grows while the device is held, whatever the sizes, and a body that has grown
    leaves the one before to the runs that read it."""
    attn = plait.Attention(
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=128,
        dtype=BF16,
        device="cuda:0",
        kv=plait.PagedKv(1),
        kernel=kernel,
        variant=plait.causal(),
        bounds=plait.Bounds(
            requests=64, query_tokens=64, keys=9000, total_pages=64 * 9000, max_q_len=1
        ),
    )
    torch.manual_seed(5)
    q = torch.randn(64, 8, 128, device="cuda", dtype=torch.bfloat16)
    cache = [torch.randn(9000, 1, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def call(requests, keys):
        rng = np.random.default_rng(requests + keys)
        attn._plan(
            np.arange(requests + 1),
            {
                "kv_len": np.full(requests, keys),
                "kv_page_indptr": np.arange(requests + 1) * keys,
                "kv_page_indices": rng.integers(0, 9000, requests * keys),
            },
            [],
        )
        return attn.run(q, cache)

    sizes = [(1, 1), (64, 9000), (3, 17), (64, 8999), (64, 9000), (2, 5000), (64, 64)] * 3
    calls = [lambda s=s: call(*s) for s in sizes]
    wanted = waited_for(calls)
    spin(HELD_MS)
    results = [c() for c in calls]
    torch.cuda.synchronize()
    same(results, wanted, "in flight")


@pytest.mark.parametrize("captured", [False, True])
def test_layers_follow_each_other(kernel, captured):
    """Each reads what the one before has just written, and writes partial rows and counters where
    that one's were: nothing but waiting for it keeps them apart."""
    s = Step(kernel, 4, 8, 1, 3000, 45, 20000, 4, max_q_len=1)
    assert len(s.plan([(1, 20000), (1, 900), (1, 1), (1, 7000)]).merge_indptr) > 0
    layers = 8
    x = [s.q, *(torch.empty_like(s.q) for _ in range(layers))]
    lse = [torch.empty(4, 8, device="cuda") for _ in range(layers)]

    def layer(i):
        return s.attn.run(x[i], s.cache, out=x[i + 1], lse=lse[i])

    def all_layers():
        for i in range(layers):
            layer(i)

    wanted = waited_for([lambda i=i: layer(i) for i in range(layers)])
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_layers()
    for n in range(50):
        for y in (*x[1:], *lse):
            y.fill_(7)
        graph.replay() if captured else all_layers()
        torch.cuda.synchronize()
        same(zip(x[1:], lse), wanted, f"round {n}")


@pytest.mark.parametrize("captured", [False, True])
def test_kernels_of_others_before_and_behind(kernel, captured):
    """torch writes q just before a run and reads out just behind it; tokens are appended to the
    cache between runs."""
    s = Step(kernel, 4, 8, 2, 1500, 46, 5000, 4, max_q_len=1)
    s.plan([(1, 5000), (1, 900), (1, 1), (1, 4000)])
    new = [torch.randn(64, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.randperm(1500 * 16, device="cuda")[:64]
    first = s.q.clone(), *(x.clone() for x in s.cache)
    copies = [torch.empty_like(s.q) for _ in range(6)]

    def rounds(wait):
        for i, copy in enumerate(copies):
            s.q.mul_(-0.5 if i % 2 else 2)
            wait()
            plait.append_kv(
                *(x * (i + 1) for x in new), s.cache, kv=plait.PagedKv(16), slot_mapping=slots
            )
            wait()
            s.attn.run(s.q, s.cache, out=s.out, lse=s.lse)
            wait()
            copy.copy_(s.out)
            wait()

    def restore():
        for x, y in zip((s.q, *s.cache), first):
            x.copy_(y)

    rounds(torch.cuda.synchronize)
    wanted = [bits(x) for x in copies]
    assert (wanted[0] != wanted[1]).any()
    restore()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rounds(lambda: None)
    for n in range(20):
        restore()
        graph.replay() if captured else rounds(lambda: None)
        torch.cuda.synchronize()
        for i, (copy, want) in enumerate(zip(copies, wanted)):
            same_bits(bits(copy), want, f"round {n}, run {i}: ")


def test_device_plans_in_flight(kernel):
    """Planned again and again while the device is held: a plan's memory is its run's until that is
    over, and lengths are those that the planner finds when it runs."""
    batches = Batches(kernel, 8, 8, 9000, max_q_len=1)
    wanted = [batches.expected(lengths) for lengths in DECODES]
    names = ("qo_indptr", "kv_len", "table", "page_indptr", "last_page_len", "begin")
    arrays = []
    for lengths in DECODES:
        batches.write(lengths)
        arrays.append({name: getattr(batches, name).clone() for name in names})
    batches.plan_on_device()  # loads the planner
    torch.cuda.synchronize()
    rooms = [(torch.empty_like(batches.q), torch.empty_like(batches.lse)) for _ in range(20)]
    begin = time.perf_counter()
    spin(HELD_MS)
    results = []
    for n in range(20):
        for name, values in arrays[n % len(arrays)].items():
            getattr(batches, name).copy_(values)  # in place, behind the plan that reads them
        batches.plan_on_device()
        out, lse = rooms[n]
        results.append(batches.on_device.run(batches.q, batches.cache, out=out, lse=lse))
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    assert took < HELD_MS / 1e3, f"planning waited for the stream: {took:.3f} s"
    for n, (out, lse) in enumerate(results):
        _, want, want_lse = wanted[n % len(wanted)]
        same_bits(bits(out), bits(want), f"plan {n}: out ")
        same_bits(bits(lse), bits(want_lse), f"plan {n}: lse ")


def test_device_planners_in_two_streams(kernel):
    """Of an object each: tables, plans and workspaces are their own."""
    both = [Batches(kernel, 8, 8, 9000, max_q_len=1, seed=seed) for seed in (3, 4)]
    lengths = [DECODES[1], DECODES[0]]
    wanted = [b.expected(n) for b, n in zip(both, lengths)]
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    for b in both:
        b.plan_on_device()
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(50):
        for i in (0, 1):
            with torch.cuda.stream(sides[i]):
                both[i].plan_on_device()
                results[i].append(both[i].on_device.run(both[i].q, both[i].cache))
    torch.cuda.synchronize()
    for i in (0, 1):
        _, want, want_lse = wanted[i]
        same(results[i], [(bits(want), bits(want_lse))] * 50, f"stream {i}")


def test_an_object_changes_streams(kernel):
    """Made to wait for each other, as the order of its calls is the caller's to keep."""
    batches = Batches(kernel, 8, 8, 9000, max_q_len=1)
    wanted = [batches.expected(lengths) for lengths in DECODES[:2]]
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    torch.cuda.synchronize()
    for n in range(10):
        now, before = sides[n % 2], sides[(n + 1) % 2]
        now.wait_stream(before)
        with torch.cuda.stream(now):
            host = batches.write(DECODES[n % 2])
            if n % 4 < 2:
                batches.plan_on_device()
            else:
                batches.on_device.plan(qo_indptr=host["qo_indptr"], **batches.tables(host))
            results.append(batches.on_device.run(batches.q, batches.cache))
    torch.cuda.synchronize()
    same(results, [tuple(map(bits, wanted[n % 2][1:])) for n in range(10)], "streams in turn")


class Model:
    """Layers of a model whose full and window layers have plans of their own and one workspace."""

    LENGTHS = [(1, 20000), (1, 3000), (1, 1), (1, 700)]

    def __init__(self, kernel, workspace=None):
        torch.manual_seed(48)
        variants = plait.causal(), plait.sliding_window(1023)
        configs = [
            dict(
                num_qo_heads=8,
                num_kv_heads=heads,
                head_dim=128,
                dtype=BF16,
                device="cuda:0",
                kv=plait.PagedKv(16),
                kernel=kernel,
                variant=variant,
                bounds=plait.Bounds(requests=4, query_tokens=4, keys=20000, max_q_len=1),
            )
            for variant, heads in zip(variants, (1, 2))
        ]
        bytes_ = max(plait.workspace_bytes(**c) for c in configs)
        self.workspace = workspace or plait.Workspace(device="cuda:0", bytes=bytes_)
        self.layers = [plait.Attention(**c, workspace=self.workspace) for c in configs]
        self.q = torch.randn(4, 8, 128, device="cuda", dtype=torch.bfloat16)
        self.caches = [
            [
                torch.randn(1500, 16, heads, 128, device="cuda", dtype=torch.bfloat16)
                for _ in range(2)
            ]
            for heads in (1, 2)
        ]

    def plan(self):
        kv_len = np.array([kv for _, kv in self.LENGTHS])
        pages = -(-kv_len // 16)
        tables = dict(
            kv_len=kv_len,
            kv_page_indptr=np.cumsum([0, *pages]),
            kv_page_indices=np.random.default_rng(1).permutation(1500)[: pages.sum()],
        )
        return [layer.plan(qo_indptr=np.arange(5), **tables) for layer in self.layers]

    def run(self, i):
        return self.layers[i].run(self.q, self.caches[i])


def test_full_and_window_layers_share_a_workspace(kernel):
    model = Model(kernel)
    plans = model.plan()
    assert len(plans[0].merge_indptr) > 0, "partial rows are there to be mixed up"
    wanted = waited_for([lambda i=i: model.run(i) for i in (0, 1)])
    spin(20)
    results = []
    for n in range(40):
        if n % 10 == 0:
            model.plan()
        results.append(model.run(n % 2))
    torch.cuda.synchronize()
    same(results, [wanted[n % 2] for n in range(40)], "in turn")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [model.run(n % 2) for n in range(8)]
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        same(results, [wanted[n % 2] for n in range(8)], "in a graph")


def test_a_workspace_in_two_streams(kernel):
    """One run at a time: streams that share one are made to wait for each other; with a workspace
    each they need not."""
    model, other = Model(kernel), Model(kernel)
    model.plan()
    other.plan()
    wanted = waited_for([lambda i=i: model.run(i) for i in (0, 1)])
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for n in range(20):
        sides[n % 2].wait_stream(sides[(n + 1) % 2])
        with torch.cuda.stream(sides[n % 2]):
            results.append(model.run(n % 2))
    torch.cuda.synchronize()
    same(results, [wanted[n % 2] for n in range(20)], "ordered streams")
    results = [[], []]
    for _ in range(20):
        for i, m in enumerate((model, other)):
            with torch.cuda.stream(sides[i]):
                results[i].append(m.run(i))
    torch.cuda.synchronize()
    for i in (0, 1):
        same(results[i], [wanted[i]] * 20, f"workspace {i}")


def test_one_graph_serves_every_batch_size(kernel):
    """0 to all of the bound's requests, each of 1 to all of its keys, padded by empty rows."""
    s = Step(kernel, 33, 8, 2, 33 * 40, 49, 640, 33, max_q_len=1)
    rng = np.random.default_rng(49)
    sizes = [0, 1, 2, 7, 16, 17, 31, 32, 33]
    batches = [[(1, int(n)) for n in rng.integers(1, 641, size)] for size in sizes]
    batches += [[(1, n)] * 33 for n in (1, 63, 64, 65, 640)]
    check_replays(s, [(1, 640)] * 5, batches)
