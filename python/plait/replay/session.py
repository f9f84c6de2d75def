"""The replay itself: every step of the engine is appended, planned and run; some are checked."""

import time
from dataclasses import dataclass, field

import numpy as np

from plait.attention import Attention, Bounds
from plait.checking import RowCheck
from plait.compose import compose_radix
from plait.counting import DTYPE_BYTES, attention_work
from plait.formats import ComposedKv, PagedKv
from plait.operations import append_kv
from plait.replay.engine import Engine
from plait.replay.memory import memory_on
from plait.replay.model import Model
from plait.variants import causal

_STEP_MS = 20.0  # of trace time that a step takes at scale 1
_CACHE_BYTES = {"cpu": 1 << 30, "cuda": 16 << 30}
_SHARED_LEVELS = 4  # of a replay with `share`, the requests' own among them


@dataclass
class Options:
    device: str = "cpu"
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    kernel: str = "auto"
    scheduler: str = "auto"
    max_batch: int = 64
    chunk: int = 512
    pages: int | None = None  # None: as many as fit the cache's default size
    step_ms: float = _STEP_MS  # of trace time a step
    share: bool = False  # requests with equal hash_ids read the keys of these blocks once
    max_steps: int | None = None
    check_every: int = 10  # steps; 0: no step is checked
    check_rows: int = 8  # of a checked step
    seed: int = 0


@dataclass
class Report:
    """What a replay did. Times in us; errors are of sampled rows against the float64 reference."""

    kernel: str = ""
    steps: int = 0
    tokens: int = 0
    requests: int = 0
    preempted: int = 0
    shared_tokens: int = 0  # found in pages of other requests
    max_batch: int = 0
    flops: int = 0
    bytes: int = 0  # that are read: without those that sharing saves
    bytes_not_read: int = 0  # of keys and values, since requests share them
    nodes: int = 0  # over several requests, of all steps
    nodes_shared: int = 0
    compose_us: list = field(default_factory=list)
    append_us: list = field(default_factory=list)
    plan_us: list = field(default_factory=list)
    run_us: list = field(default_factory=list)
    balance: list = field(default_factory=list)
    steps_checked: int = 0
    rows_checked: int = 0
    largest_error: float = 0.0
    largest_lse_error: float = 0.0
    worst: float = 0.0  # largest error / what is allowed; more than 1: a check failed
    failures: list = field(default_factory=list)


def default_pages(options, max_pages):
    """As many pages as max_batch requests need, within the default size of the cache."""
    page_bytes = (
        2 * options.page_size * options.num_kv_heads * options.head_dim * DTYPE_BYTES[options.dtype]
    )
    fitting = _CACHE_BYTES[options.device.partition(":")[0]] // page_bytes
    return max(min(options.max_batch * max_pages, fitting), max_pages)


def replay(trace, options, on_step=lambda engine, report: None):
    """Replays a trace. Calls on_step(engine, report) after every step; returns the Report.

    Raises ValueError for options that the library or the engine refuses. A step that fails its
    check is in report.failures.
    """
    kv = PagedKv(options.page_size)
    if options.share:
        if not any(request.hash_ids for request in trace):
            raise ValueError("share: the trace has no hash_ids, which say what requests share")
        kv = ComposedKv(kv, _SHARED_LEVELS)
    longest = max((r.input_len + r.output_len for r in trace), default=1)
    max_pages = -(-longest // options.page_size)
    attention = Attention(
        num_qo_heads=options.num_qo_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
        kv=kv,
        device=options.device,
        variant=causal(),
        kernel=options.kernel,
        scheduler=options.scheduler,
        bounds=Bounds(
            requests=options.max_batch,
            query_tokens=options.chunk,
            keys=max_pages * options.page_size,
            total_pages=options.max_batch * max_pages,
        ),
    )
    num_pages = default_pages(options, max_pages) if options.pages is None else options.pages
    engine = Engine(
        trace,
        page_size=options.page_size,
        num_pages=num_pages,
        max_batch=options.max_batch,
        chunk=options.chunk,
    )
    heads = dict(
        num_qo_heads=options.num_qo_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
    )
    model = Model(**heads, seed=options.seed)
    memory = memory_on(options.device, options.dtype)
    cache = tuple(
        memory.nan((num_pages, options.page_size, options.num_kv_heads, options.head_dim))
        for _ in "kv"
    )
    checker = _Checker(model, options)
    report = Report(kernel=attention.kernel_name)
    now_ms = trace[0].arrival_ms if trace else 0.0
    while not engine.done and (options.max_steps is None or report.steps < options.max_steps):
        step = engine.schedule(now_ms)
        if step is None:  # everything that arrived is done
            now_ms = max(now_ms, engine.next_arrival_ms())
            continue
        out, lse = _run_step(step, options, attention, model, memory, cache, report)
        if options.check_every and report.steps % options.check_every == 0:
            checker.check(step, memory.download(out), memory.download(lse), report)
        report.flops, report.bytes = (
            a + b
            for a, b in zip(
                (report.flops, report.bytes),
                attention_work(
                    np.diff(step.qo_indptr),
                    step.kv_len,
                    num_qo_heads=options.num_qo_heads,
                    num_kv_heads=options.num_kv_heads,
                    head_dim_qk=options.head_dim,
                    head_dim_vo=options.head_dim,
                    dtype=options.dtype,
                ),
            )
        )
        engine.finish(step)
        now_ms += options.step_ms
        report.steps += 1
        report.tokens += int(step.qo_indptr[-1])
        report.max_batch = max(report.max_batch, len(step.running))
        report.requests, report.preempted = engine.num_finished, engine.num_preempted
        report.shared_tokens = engine.num_shared_tokens
        on_step(engine, report)
    return report


def _run_step(step, options, attention, model, memory, cache, report):
    """Append, plan, run; each timed apart, the device idle in between."""
    spans = [(r, np.arange(r.num_cached, r.num_cached + r.num_new)) for r in step.running]
    q = memory.upload("q", np.concatenate([model.query(*span) for span in spans]))
    new = [model.keys_values(*span) for span in spans]
    k_new = memory.upload("k", np.concatenate([k for k, _ in new]))
    v_new = memory.upload("v", np.concatenate([v for _, v in new]))
    tables = dict(block_table=step.block_table, request_map=step.request_map)

    def timed(times, work):
        memory.synchronize()
        start = time.perf_counter()
        result = work()
        memory.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        return result

    timed(
        report.append_us,
        lambda: append_kv(
            k_new,
            v_new,
            cache,
            kv=PagedKv(options.page_size),
            batch_indices=step.batch_indices,
            positions=step.positions,
            **tables,
        ),
    )
    start = time.perf_counter()  # of the host alone: plan waits for nothing
    tables["kv_len"] = step.kv_len
    if options.share:
        tables = {"levels": _compose(step, attention, tables)}
        report.compose_us.append((time.perf_counter() - start) * 1e6)
        start = time.perf_counter()
    plan = attention.plan(qo_indptr=step.qo_indptr, **tables)
    report.plan_us.append((time.perf_counter() - start) * 1e6)
    report.balance.append(plan.balance)
    not_read = int(plan.nodes["keys_not_read"].sum()) * plan.kv_bytes
    report.bytes_not_read += not_read
    report.bytes -= not_read
    report.nodes += len(plan.nodes)
    report.nodes_shared += int((plan.nodes["level"] >= 0).sum())
    out = memory.scratch("out", q.shape, options.dtype)
    lse = memory.scratch("lse", q.shape[:2], "float32")
    return timed(report.run_us, lambda: attention.run(q, cache, out=out, lse=lse))


def _compose(step, attention, tables):
    """Levels in which the requests of a step share the prompt blocks that their ids say are equal.
    Generated tokens follow in the last block, which the ids then stand for in part."""
    requests = [r.request for r in step.running]
    block = next((r.block_tokens for r in requests if r.block_tokens), 1)
    return compose_radix(
        attention,
        qo_indptr=step.qo_indptr,
        hash_ids=[r.hash_ids for r in requests],
        hashed_len=np.array([r.input_len if r.hash_ids else 0 for r in requests], np.int32),
        block_tokens=block,
        **tables,
    )


class _Checker:
    """Sampled rows of a step, the query heads of one kv head each. Keys and values are drawn again
    from the model, so that append, page tables and sharing are checked with the attention."""

    def __init__(self, model, options):
        self._model, self._options = model, options
        self._rng = np.random.default_rng(options.seed + 1)

    def check(self, step, out, lse, report):
        rows = self._rng.choice(len(out), min(self._options.check_rows, len(out)), replace=False)
        check = RowCheck(self._options.dtype)
        group = self._options.num_qo_heads // self._options.num_kv_heads
        for row in rows:
            r = step.running[step.batch_indices[row]]
            keys = np.arange(step.positions[row] + 1)
            head = self._rng.integers(self._options.num_kv_heads)  # one a row: keys may be many
            heads = slice(head * group, (head + 1) * group)
            k, v = (x[:, head : head + 1] for x in self._model.keys_values(r, keys))
            check.add(
                self._model.query(r, keys[-1:])[0, heads], k, v, out[row, heads], lse[row, heads]
            )
        report.steps_checked += 1
        report.rows_checked += len(rows)
        report.largest_error, report.largest_lse_error = np.maximum(  # NaN stays
            (report.largest_error, report.largest_lse_error), check.error
        )
        report.worst = np.maximum(report.worst, check.worst)
        if not check.worst <= 1:  # NaN fails too
            report.failures.append(f"step {report.steps}, rows {sorted(rows)}: {check.describe()}")
