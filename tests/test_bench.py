"""`plait bench` without a GPU: what it counts, its cases on the CPU, and what it says of each
result."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from browser import picture, rgb
from typer.testing import CliRunner

from plait.bench import cpu, figures, gpu, paper, peers, supervise, tiles, worker
from plait.bench.case_variants import CASE_VARIANTS
from plait.bench.cases import CASES, GROUPS, Case, draw, select
from plait.bench.workload import Pools, Workload
from plait.cli import app
from plait.cli import bench as command
from plait.counting import attention_work, visible_pairs
from plait.reference import from_storage, visible

SMALL = dict(num_qo_heads=4, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 1, 6, 50])
def test_pairs_are_those_of_the_reference(causal, window):
    lengths = [(0, 5), (1, 1), (1, 17), (7, 7), (9, 4), (13, 40), (3, 0)]
    want = 0
    for q, k in lengths:
        q_pos = np.arange(q)[:, None] + k - q
        seen = visible(q_pos, np.arange(k), causal=causal, window_left=window)
        want += int(seen.sum())
    q_len, kv_len = np.array(lengths).T
    assert visible_pairs(q_len, kv_len, causal=causal, window_left=window) == want


@pytest.mark.parametrize("q_len", [1, 9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_beside_the_cpu_computes_the_same(q_len, dtype):
    torch = pytest.importorskip("torch", reason="compares with torch's SDPA")
    workload = Workload(Case("", "decode", (q_len,) * 2, (9,) * 2, 4, dtype=dtype, **SMALL))
    workload.compile()
    workload.lay_out(Pools("cpu", [workload]))
    workload.prepare()
    theirs = cpu._sdpa(workload)().transpose(1, 2).reshape(workload.out.shape)
    bits = torch.int32 if dtype == "float32" else torch.int16
    ours = from_storage(workload.out, dtype)
    theirs = from_storage(theirs.contiguous().view(bits).numpy().view(workload.out.dtype), dtype)
    assert np.allclose(ours, theirs, atol=2e-2 if dtype == "bfloat16" else 1e-5)


def test_bytes_are_those_that_some_query_needs():
    config = dict(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, head_dim_vo=128)
    _, moved = attention_work([3, 0], [50, 7], **config, dtype="bfloat16")
    rows = 3 * 8 * (64 + 128) * 2 + 3 * 8 * 4  # q, out and lse
    assert moved == rows + 50 * 2 * (64 + 128) * 2
    _, moved = attention_work([3, 0], [50, 7], **config, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    assert moved == rows + 50 * 2 * (64 + 128)
    _, moved = attention_work([1, 2, 0], [50, 70, 50], **config, dtype="bfloat16", shared_len=40)
    assert moved == rows + (50 + 70 - 40) * 2 * (64 + 128) * 2
    _, moved = attention_work([3, 0], [50, 7], **config, dtype="bfloat16", window_left=10)
    assert moved == rows + (10 + 3) * 2 * (64 + 128) * 2


def test_the_table_of_cases_is_closed():
    assert {case.group for case in CASES.values()} == {*GROUPS, "paper"}
    same = dict(group="", beside=None)
    for case in paper.cases():  # under one name one case, whatever groups it is in
        named = CASES[case.name]
        assert dataclasses.replace(named, **same) == dataclasses.replace(case, **same)
    assert [c.name for c in select(("paper",)) if c.group != "paper"] != []
    assert {c.name for c in select(("paper",))} >= {c.name for c in paper.cases()}
    names = list(CASES)
    for i, (name, case) in enumerate(CASES.items()):
        assert case.name == name and case.variant in CASE_VARIANTS
        assert len(case.q_len) == len(case.kv_len)
        assert case.beside in (None, *names[:i])  # measured before it
    assert set(CASE_VARIANTS) == {case.variant for case in CASES.values()}
    with pytest.raises(ValueError, match="'p4_4k' is no case of decode"):
        select(("decode",), ["p4_4k"])
    assert [c.name for c in select(("spec",))] == ["spec32_8_4k", "spec32_8_4k_mask"]


def test_cases_of_tiles():
    """What a GPU is asked for: each tile beside what its template chose, which comes first."""
    assert tiles.parse_head_dim("192/128") == (192, 128) and tiles.parse_head_dim("64") == (64, 64)
    for bad in ("", "64/", "1/2/3", "d64", "-64"):
        with pytest.raises(ValueError, match="--head-dim is"):
            tiles.parse_head_dim(bad)
    names = ("sm80 1x64x2", "sm80 16x32x4", "sm80 16x64x3", "sm80 128x64x1", "sm80 128x64x2",
             "sm90 64x64x2", "sm90 64x80x2", "sm90 128x128x3", "sm90 128x144x2")  # fmt: skip
    chosen = ("sm80 16x64x3", "sm80 128x64x2", "sm90 64x80x2", "sm90 128x128x3")
    rows = [
        SimpleNamespace(kernel=name, tile_q=int(name[5:].split("x")[0]), chosen=name in chosen)
        for name in names
    ]
    found = tiles.cases(rows, (192, 128))
    assert [case.name for case in found] == [
        "prefill sm80 128x64x2", "prefill sm80 128x64x1", "prefill sm90 128x128x3",
        "prefill sm90 64x64x2", "prefill sm90 64x80x2", "prefill sm90 128x144x2",
        "decode sm80 16x64x3", "decode sm80 1x64x2", "decode sm80 16x32x4",
        "decode sm90 64x80x2", "decode sm90 64x64x2",
    ]  # fmt: skip
    for case in found:
        assert case.kernel in case.name and (case.head_dim, case.head_dim_vo) == (192, 128)
        assert (case.beside is None) == (case.kernel in chosen[:1] + chosen[1:2] + chosen[3:]
                                         or case.name == "decode sm90 64x80x2")  # fmt: skip


def test_drawn_lengths():
    assert draw("const", 3, 1024) == (1024,) * 3
    # As the peers of the published figures were measured: their first numbers.
    assert draw("uniform", 16)[:4] == (948, 838, 774, 650)
    assert draw("zipf", 16)[:4] == (460, 16, 3169, 3169)
    assert draw("zipf", 128, 4096)[:4] == (1726, 60, 11902, 11902)
    uniform, zipf = draw("uniform", 16), draw("zipf", 128, 4096)
    assert uniform == draw("uniform", 16) and 512 <= min(uniform) and max(uniform) <= 1024
    # Skewed: the mean is far above the median.
    assert min(zipf) >= 16 and abs(np.mean(zipf) / 4096 - 1) < 0.01
    assert np.median(zipf) < 1024 < 4096 < max(zipf)


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("variant", list(CASE_VARIANTS))
def test_a_workload_is_right_and_its_check_bites(variant, page_size):
    case = Case("x", "prefill", (5, 1, 8), (70, 300, 33), page_size, variant, **SMALL)
    if page_size == 1:
        case = dataclasses.replace(case, head_dim_vo=32, kv_dtype="float8_e4m3fn")
    workload = Workload(case)
    workload.compile()
    workload.lay_out(Pools("cpu", [workload]))
    workload.prepare()
    assert workload.check() == "" and workload.same_bits()
    workload.out[-1, 1] = 0
    assert not workload.same_bits()
    workload._sampled = workload._sample()
    workload.out[-1] = 0
    workload._sampled = workload._sample()
    assert "a sampled row is off" in workload.check()


@pytest.mark.parametrize("how", [
    dict(shared_len=64), dict(shared_len=64, num_levels=2), dict(num_levels=2),
    dict(requests_bound=5), dict(scheduler="unsplit"), dict(call="plan")])  # fmt: skip
def test_a_workload_is_planned_and_run_as_its_case_says(how):
    case = Case("x", "decode", (1,) * 3, (70, 300, 99), 16, **SMALL, **how)
    workload = Workload(case)
    workload.compile()
    pools = Pools("cpu", [workload])
    workload.lay_out(pools)
    workload.prepare()
    assert workload.check() == "" and workload.plan.num_levels == case.num_levels
    common = case.shared_len // 16
    first = [workload.page_indices[i : i + common].tolist() for i in workload.page_indptr[:3]]
    assert first[0] == first[1] == first[2]
    assert len(set(workload.page_indices)) == 5 + 19 + 7 - 2 * common == workload.cache[0].shape[0]
    assert len(workload.out) == max(case.requests_bound, 3)
    if case.scheduler == "unsplit":
        assert [c["name"] for c in workload.plan.candidates] == ["unsplit"]
    if case.call == "plan":
        none, zero = np.empty(0, np.int32), np.zeros(1, np.int32)
        workload.attention.plan(
            qo_indptr=zero, kv_page_indptr=zero, kv_page_indices=none, kv_len=none
        )
        workload.run()
        assert workload.same_bits()
    if case.padding:
        workload.out[-2, 1, 0] = 1
        assert workload.check() == "a padding row is not (0, -inf)"


def test_what_stands_beside_a_graph_case_is_a_difference(no_gpu):
    eager = Case("eager", "graph", (1,), (64,), 16, call="eager", **SMALL)
    bound = dataclasses.replace(eager, name="bound", call="graph", requests_bound=3, beside="eager")
    results, _ = measure([eager, bound], [_Fake("peer", 1.0)])
    assert not any(r.problem or r.wrong for r in results.values())
    rows = figures.rows(results["bound"], results, TOP)
    assert {"case": "bound", "metric": "more than eager", "value": -2.5, "unit": "us"} in rows
    assert "-2.50 us on eager" in figures.line(results["bound"], results, TOP)
    assert results["eager"].peers == {"peer": "ways to launch stand beside each other"}


def _tiny(case):
    """The case with a 64th of its requests' keys, and half as many heads."""
    lengths = [tuple(max(n // 64, 1) for n in x) for x in (case.q_len, case.kv_len)]
    return dataclasses.replace(
        case, q_len=lengths[0], kv_len=lengths[1], shared_len=case.shared_len // 64 // 16 * 16,
        num_qo_heads=case.num_qo_heads // 4, num_kv_heads=2, head_dim=32, head_dim_vo=32,
    )  # fmt: skip


def test_the_figures_of_the_paper(no_gpu, tmp_path):
    """Every case of them on the CPU, shrunk; what they judge; their page."""
    results, _ = measure([_tiny(case) for case in paper.cases()], [_Fake("peer", 150.0)])
    assert not any(r.problem or r.wrong for r in results.values())
    for i, r in enumerate(results.values()):
        r.us = 10.0 + i
    everything = paper.figures()
    assert {figure.mechanism for figure in everything} == {
        "scheduler", "balance", "shared prefix", "loader"}  # fmt: skip
    for figure in everything:
        rows = paper.rows(figure, results)
        assert len(rows) == len(figure.rows) * len(figure.judged)
        for row in rows:
            ours, other = results[row["case"]], results[row["metric"].split(" beside ")[1]]
            want = ours.flops / ours.us / (other.flops / other.us)
            assert row["metric"].startswith(figure.mechanism + ": ")
            assert row["value"] == pytest.approx(want, abs=1e-4)
        columns, lines = paper.lines(figure, results)
        assert columns[-1] == ">peer" and all(len(line) == len(columns) for line in lines)

    pytest.importorskip("jinja2")
    from plait.html.paper import BACKGROUND, COLOURS, PEER, paper_page

    run = supervise.Run(top=TOP, results=results)
    page = paper_page(everything, run, "a GPU")
    bars = sum(len(in_row) for figure in everything for in_row in figure.rows.values())
    peers_drawn = sum(len(figure.rows) for figure in everything)
    assert page.count("<rect") == bars + peers_drawn and "Algorithm 1" in page
    assert page.count('class="ceiling"') == len(everything)
    drawn = set(map(tuple, picture(page, tmp_path, 900).reshape(-1, 3).tolist()))
    assert drawn >= {tuple(rgb(c)) for c in (BACKGROUND, PEER, *COLOURS)}
    # Nothing was measured: a page that says so by having no figure.
    empty = paper_page(everything, supervise.Run(), "a GPU")
    assert "<rect" not in empty and "Scheduler" not in empty


class _Fake(peers.Peer):
    """A peer that answers with `outcome`: us, or an error."""

    def __init__(self, name, outcome):
        super().__init__("cpu")
        self.name, self.outcome = name, outcome

    def time(self, workload, seconds):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


TOP = {"read": 1e12, "gemm": 1e15}


@pytest.fixture
def no_gpu(monkeypatch):
    """measure() on the CPU: 100 us for everything, and ceilings of 1 TB/s and 1 PFLOP/s."""

    def timed(device, work, seconds):
        work()
        return type("Timing", (), {"median_us": 100.0})

    monkeypatch.setattr(gpu, "time_plait", timed)
    monkeypatch.setattr(gpu, "time_eager", lambda *a: SimpleNamespace(median_us=102.5))
    monkeypatch.setattr(gpu, "ceilings", lambda *a, **k: TOP)


def measure(cases, others=()):
    """(results by name, names of events). Events go through the worker's text, as in a run."""
    events = []

    def emit(kind, **more):
        events.append((kind, more))
        if "result" in more:
            fields = json.loads(worker.line(kind, **more))["result"]
            assert gpu.Result(**fields | {"case": more["result"].case}) == more["result"]

    gpu.measure(cases, emit, device="cpu", peers=others)
    results = [more["result"] for kind, more in events if kind == "result"]
    assert [r.case for r in results] == list(cases)
    return {r.case.name: r for r in results}, [kind for kind, _ in events]


def test_measure_reports_times_ratios_refusals_and_wrong_peers(no_gpu):
    base = Case("base", "prefill", (64,), (64,), **SMALL)
    half = Case("window", "variants", (64,), (64,), 16, "window1k", beside="base", **SMALL)
    fp8 = Case("fp8", "variants", (1,), (64,), 16, kv_dtype="float8_e9", **SMALL)
    e4m3 = Case("e4m3", "variants", (1,), (64,), 16, kv_dtype="float8_e4m3fn", **SMALL)
    others = [
        _Fake("right", 150.0),
        _Fake("broken", RuntimeError("no\nkernel")),
        _Fake("wrong", peers.Differs("its output differs from ours by 0.5")),
    ]
    results, events = measure([base, half, fp8, e4m3], others)
    assert events.count("ceilings") == 1 and "lost" not in events
    assert results["base"].us == 100 and figures.beside(results["base"], results) is None
    # The same work, as the window is wider than the keys.
    assert figures.beside(results["window"], results) == 1
    assert results["fp8"].us is None and results["fp8"].problem.startswith("not supported: ")
    assert results["e4m3"].us == 100 and not results["e4m3"].wrong, results["e4m3"].problem
    assert not results["fp8"].wrong and results["base"].wrong
    flops, moved = results["base"].flops, results["base"].bytes
    assert flops == 4 * (64 * 65 // 2) * 4 * 64
    want = max(moved / 1e12, flops / 1e15) * 1e4
    assert figures.of_ceiling(results["base"], TOP) == pytest.approx(want)

    rows = [row for r in results.values() for row in figures.rows(r, results, TOP)]
    assert all(set(row) == {"case", "metric", "value", "unit"} for row in rows)
    assert {"case": "base", "metric": "right / ours", "value": 1.5, "unit": "x"} in rows
    said = [row["metric"] for row in rows if row["value"] is None]
    assert "broken: failed: RuntimeError: no kernel" in said
    assert "wrong: its output differs from ours by 0.5" in said
    assert any(row["case"] == "fp8" and row["metric"].startswith("not supported") for row in rows)
    line = figures.line(results["base"], results, TOP)
    assert "right 150.00 (1.500)" in line and "wrong its output differs" in line
    assert "window1k is not among" not in figures.line(results["window"], results, TOP)


def test_a_wrong_result_is_reported(no_gpu, monkeypatch):
    monkeypatch.setattr(Workload, "same_bits", lambda self: False)
    results, _ = measure([Case("base", "prefill", (9,), (9,), **SMALL)])
    assert results["base"].wrong and "rows changed" in results["base"].problem


@pytest.mark.parametrize("where", ["compile", "lay_out", "prepare", "check"])
def test_an_error_of_one_case_is_not_that_of_the_next(no_gpu, monkeypatch, where):
    original = getattr(Workload, where)

    def fails(self, *args):
        if self.case.name == "bad":
            raise KeyError("k")
        return original(self, *args)

    monkeypatch.setattr(Workload, where, fails)
    cases = [Case(name, "prefill", (9,), (9,), **SMALL) for name in ("bad", "good")]
    results, events = measure(cases)
    assert results["bad"].problem == "failed: KeyError: 'k'" and results["bad"].wrong
    assert results["good"].us == 100 and "lost" not in events


def test_nothing_is_measured_on_a_device_that_is_lost(no_gpu, monkeypatch):
    monkeypatch.setattr(gpu, "_device_works", lambda device: False)
    monkeypatch.setattr(Workload, "check", lambda self: 1 / 0)
    cases = [Case(name, "prefill", (9,), (9,), **SMALL) for name in ("bad", "next")]
    events = []
    gpu.measure(cases, lambda kind, **more: events.append(kind), device="cpu")
    assert events[-1] == "lost" and events.count("result") == 1


# Stands for the process that measures: answers each case by its name, once for each line of `tries`.
_WORKER = """
import json, os, sys, time
def emit(event, **fields): print(json.dumps(dict(event=event, **fields)), flush=True)
def phase(text, case=None, peer=None): emit("phase", text=text, patience=PATIENCE, case=case, peer=peer)
job = json.load(sys.stdin)
emit("peers", found=job["peers"], absent={})
phase("3 modules of peers" if job["build"] else "compiling")
if "BUILD" and job["build"]: os._exit(7)
if job["top"] is None: emit("ceilings", top={"read": 1e12, "gemm": 1e15})
for case in (case["name"] for case in job["cases"]):
    phase(case, case)
    if case == "DIES": os.abort()
    if case == "HANGS": time.sleep(100)
    peers = {}
    for peer in job["peers"]:
        phase(peer, case, peer)
        if peer == "flex": os.abort()
        peers[peer] = 5.0
    emit("result", result=dict(case=case, us=1.0, flops=10**6, bytes=10**6, peers=peers))
    if case == "LOSES": emit("lost"); time.sleep(100)
"""


def supervised(dies="", hangs="", loses="", build="", limit=None, others=(), patience=30):
    text = _WORKER.replace("DIES", dies).replace("HANGS", hangs).replace("LOSES", loses)
    text = text.replace("BUILD", build).replace("PATIENCE", str(patience))
    reported = []
    run = supervise.measure(
        select(("decode",)), device="cuda", kernel="auto", peers=others, seconds=0.3, limit=limit,
        report=lambda run, result: reported.append(result.case.name),
        worker=[sys.executable, "-c", text],
    )  # fmt: skip
    assert sorted(reported) == sorted(c.name for c in select(("decode",))) and len(run.results) == 13
    return run, {name: r.problem for name, r in run.results.items() if r.problem}


def test_a_case_that_ends_its_process_costs_no_other():
    run, problems = supervised(dies="d1_128k", build="yes")
    assert problems == {"d1_128k": "failed: the process ended with SIGABRT"}
    assert run.results["d1_128k"].wrong and run.top == TOP
    run, problems = supervised(hangs="d8_8k", loses="d64_4k_page16", patience=2)
    assert problems == {"d8_8k": "failed: no end after 2 s"}


def test_a_peer_that_ends_the_process_is_left_out():
    run, problems = supervised(others=["cudnn", "flex"])
    assert not problems and all(r.peers["cudnn"] == 5 for r in run.results.values())
    said = {r.peers["flex"] for r in run.results.values()}
    assert said == {"left out: in d64_4k_page16 the process ended with SIGABRT"}


def test_the_limit_names_what_is_not_measured():
    run, problems = supervised(hangs="d8_8k", limit=3)
    assert set(problems.values()) == {"not measured: 3 s are over"}
    assert list(problems)[0] == "d8_8k" and "d64_4k_page16" not in problems
    assert not any(r.wrong for r in run.results.values())


def test_the_command_says_each_case_as_it_comes(monkeypatch):
    text = _WORKER.replace("HANGS", "").replace("BUILD", "").replace("PATIENCE", "30")
    text = text.replace("DIES", "d8_8k").replace("LOSES", "")
    monkeypatch.setattr(supervise, "_WORKER", [sys.executable, "-c", text])
    monkeypatch.setattr(command, "_plait", type("", (), {"describe_gpu": lambda device: "a GPU"}))
    call = ["bench", "decode", "--case", "d1_128k,d8_8k,d64_4k_page1", "--peers", "cudnn,fa3"]
    done = CliRunner().invoke(app, [*call, "--json"])
    rows = json.loads(done.stdout)
    assert done.exit_code == 1 and {row["case"] for row in rows} == {
        "d64_4k_page16", "d64_4k_page1", "d1_128k", "d8_8k", "ceiling"}  # fmt: skip
    ratios = [row["value"] for row in rows if row["metric"] == "fa3 / ours"]
    assert ratios == [5, 5, 5]
    lines = CliRunner().invoke(app, call).stdout.splitlines()
    assert lines[0] == "a GPU" and lines[1].split()[:3] == ["case", "us", "TFLOP/s"]
    assert "fa3 5.00 (5.000)" in lines[2] and "1.000 x d64_4k_page16" in lines[3]
    assert any("d8_8k" in x and "failed: the process ended with SIGABRT" in x for x in lines)
    assert lines[-1] == "ceiling: bf16 GEMM 8192^3: 1000 TFLOP/s"


def test_the_command_says_what_the_paper_judges(monkeypatch, tmp_path):
    pytest.importorskip("jinja2")
    text = _WORKER.replace("HANGS", "").replace("BUILD", "").replace("PATIENCE", "30")
    text = text.replace("DIES", "").replace("LOSES", "")
    monkeypatch.setattr(supervise, "_WORKER", [sys.executable, "-c", text])
    monkeypatch.setattr(command, "_plait", type("", (), {"describe_gpu": lambda device: "a GPU"}))
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["bench", "paper", "--html", str(page), "--json"])
    rows = json.loads(done.stdout)
    judged = {"case": "s64_8k_256", "metric": "shared prefix: FLOP/s beside s64_8k_256_flat",
              "value": 1.0, "unit": "x"}  # fmt: skip
    assert done.exit_code == 0 and judged in rows
    assert page.read_text().count("<svg") == len(paper.figures())
    text = CliRunner().invoke(app, ["bench", "paper"]).stdout
    assert "Scheduler, decode: us and TB/s, ratios of FLOP/s" in text and "composed /" in text
    refused = CliRunner().invoke(app, ["bench", "decode", "--html", str(page)])
    assert refused.exit_code == 2 and "--html goes with paper, not with decode" in refused.output


def test_the_worker_speaks_as_the_supervisor_listens(tmp_path):
    """The real one, whose first call of CUDA fails where there is no GPU."""
    (case,) = select(("mixed",))
    job = dict(cases=[dataclasses.asdict(case)], device="cuda:99", kernel="auto", peers=["cudnn"], seconds=0.1,
               top=None, build=True)  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "plait.bench.worker"], input=json.dumps(job), capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    kinds = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert kinds[:3] == ["phase", "peers", "phase"], done.stderr


def test_peers_refuse_what_they_do_not_take():
    ragged, paged = CASES["p4_4k"], CASES["d64_4k_page16"]
    refuses = lambda peer, case: bool(peer.refusal(peer.__new__(peer), case))  # noqa: E731
    assert refuses(peers.FlashInferDecode, ragged) and not refuses(peers.FlashInferDecode, paged)
    assert refuses(peers.Cudnn, CASES["p16_zipf1k"]) and not refuses(peers.Cudnn, paged)
    assert refuses(peers.Cudnn, CASES["a8_512_8k_page16"])  # a causal mask aligned at the top left
    assert refuses(peers.FlashInferFa3, CASES["spec32_8_4k_mask"])
    assert not refuses(peers.FlashInferFa2, CASES["spec32_8_4k_mask"])
    assert refuses(peers.FlashAttention3, CASES["p4_4k_rope"])
    assert refuses(peers.FlashInferCascade, CASES["s64_8k_256_flat"])
    assert refuses(peers.FlashInferCascade, CASES["d64_4k_composed"])
    assert not refuses(peers.FlashInferCascade, CASES["s64_8k_256"])
    assert refuses(peers.FlashInferDecode, CASES["s64_8k_256"])
    assert not refuses(peers.FlashInferDecode, CASES["s64_8k_256_flat"])


def test_absent_peers_are_named():
    torch = pytest.importorskip("torch")
    found, absent = peers.load(peers.resolve(["fa3"]), "cuda")
    names = {peer.name for peer in found} | {name for name, _ in absent}
    assert names == {"fa3", "cudnn"} and all(why for _, why in absent)
    if not torch.cuda.is_available():
        assert not found
    with pytest.raises(ValueError, match="'fa9' is no peer; known are cudnn, "):
        peers.resolve(["fa9"])


def test_a_peer_that_differs_is_not_timed(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(peers, "time_torch", lambda *a: type("Timing", (), {"median_us": 7.0}))
    workload = Workload(Case("x", "prefill", (5,), (70,), 16, dtype="float32", **SMALL))
    workload.compile()
    workload.lay_out(Pools("cpu", [workload]))
    workload.prepare()
    peer = peers.Peer("cpu")
    out = torch.from_dlpack(workload.out).clone()
    peer.work = lambda w: lambda: out
    assert peer.time(workload, 0.1) == 7
    # One that does its work once only, so that its graph would do nothing.
    outs = [out, torch.zeros_like(out)]
    peer.work = lambda w: lambda: outs.pop(0)
    monkeypatch.setattr(
        peers,
        "time_torch",
        lambda device, work, s: work() or type("Timing", (), {"median_us": 7.0}),
    )
    with pytest.raises(peers.Differs, match="output in the graph differs from ours by 1 of"):
        peer.time(workload, 0.1)
    peer.work = lambda w: lambda: out
    out[3, 1] *= 1.1  # one row of one head
    with pytest.raises(peers.Differs, match="output differs from ours by 0.1 of a row's norm"):
        peer.time(workload, 0.1)


def test_layers_have_caches_of_their_own(monkeypatch):
    """Timed by running once; rows are compared as on a GPU."""
    from plait.bench import layers

    timing = type("Timing", (), {"median_us": 5.0})

    def time_graphs(device, both, reads, how):
        both(None)
        reads(None)
        return timing

    reader = SimpleNamespace(MemoryReader=lambda *_: lambda stream: None, time_graphs=time_graphs)
    monkeypatch.setattr(layers, "_plait", reader)
    monkeypatch.setattr(layers, "parse_device", lambda device: (2, 0))
    monkeypatch.setattr(layers, "time_plait", lambda device, work, *a, **k: work(None) or timing)
    small = dataclasses.replace(CASES["d16_const1k"], q_len=(1,) * 3, kv_len=(40, 1, 17))
    monkeypatch.setattr(layers, "CASES", {small.name: small})
    rows = layers.layers("cpu", cases=[small.name])
    assert len(rows) == 9 and all(r["value"] == 5 for r in rows)
    model = layers._Model(small, "cpu")
    model.check()
    model.layers[7][1][0, 0, 0] ^= 1
    with pytest.raises(RuntimeError, match="d16_const1k: rows changed"):
        model.check()
