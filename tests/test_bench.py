"""`plait bench` without a GPU: what it counts, its cases on the CPU, and what it says of each result."""

import numpy as np
import pytest

from plait.bench import gpu, peers
from plait.bench.case_variants import CASE_VARIANTS
from plait.bench.cases import CASES, GROUPS, Case, draw, select
from plait.bench.workload import Pools, Workload
from plait.counting import attention_work, visible_pairs
from plait.reference import visible

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


def test_bytes_are_those_that_some_query_needs():
    config = dict(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, head_dim_vo=128)
    _, moved = attention_work([3, 0], [50, 7], **config, dtype="bfloat16")
    rows = 3 * 8 * (64 + 128) * 2 + 3 * 8 * 4  # q, out and lse
    assert moved == rows + 50 * 2 * (64 + 128) * 2
    _, moved = attention_work([3, 0], [50, 7], **config, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    assert moved == rows + 50 * 2 * (64 + 128)
    _, moved = attention_work([3, 0], [50, 7], **config, dtype="bfloat16", window_left=10)
    assert moved == rows + (10 + 3) * 2 * (64 + 128) * 2


def test_the_table_of_cases_is_closed():
    assert {case.group for case in CASES.values()} == set(GROUPS)
    for name, case in CASES.items():
        assert case.name == name and case.variant in CASE_VARIANTS
        assert len(case.q_len) == len(case.kv_len)
        assert case.beside is None or CASES[case.beside].beside in (None, "p4_4k")
    assert set(CASE_VARIANTS) == {case.variant for case in CASES.values()}
    with pytest.raises(ValueError, match="'p4_4k' is no case of decode"):
        select(("decode",), ["p4_4k"])
    assert [c.name for c in select(("spec",))] == ["spec32_8_4k", "spec32_8_4k_mask"]


def test_drawn_lengths():
    assert draw("const", 3, 1024) == (1024,) * 3
    uniform, zipf = draw("uniform", 16), draw("zipf", 128, 4096)
    assert uniform == draw("uniform", 16) and 512 <= min(uniform) and max(uniform) <= 1024
    # Skewed: the mean is far above the median.
    assert min(zipf) >= 16 and abs(np.mean(zipf) / 4096 - 1) < 0.01
    assert np.median(zipf) < 1024 < 4096 < max(zipf)


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("variant", list(CASE_VARIANTS))
def test_a_workload_is_right_and_its_check_bites(variant, page_size):
    case = Case("x", "prefill", (5, 1, 8), (70, 300, 33), page_size, variant, **SMALL)
    workload = Workload(case)
    workload.compile()
    workload.prepare(Pools("cpu", [workload]))
    assert workload.check() == "" and workload.same_bits()
    workload.out[-1, 1] = 0
    assert not workload.same_bits()
    workload._sampled = workload._sample()
    workload.out[-1] = 0
    workload._sampled = workload._sample()
    assert "a sampled row is off" in workload.check()


class _Fake(peers.Peer):
    """A peer that answers with `outcome`: us, or an error."""

    def __init__(self, name, outcome):
        super().__init__("cpu")
        self.name, self.outcome = name, outcome

    def time(self, workload, seconds):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def no_gpu(monkeypatch):
    """measure() on the CPU: 100 us for everything, and ceilings of 1 TB/s and 1 PFLOP/s."""

    def timed(device, work, seconds):
        work()
        return type("Timing", (), {"median_us": 100.0})

    monkeypatch.setattr(gpu, "time_plait", timed)
    monkeypatch.setattr(gpu, "ceilings", lambda *a, **k: {"read": 1e12, "gemm": 1e15})


def test_measure_reports_times_ratios_refusals_and_wrong_peers(no_gpu):
    base = Case("base", "prefill", (64,), (64,), **SMALL)
    half = Case("window", "variants", (64,), (64,), 16, "window1k", beside="base", **SMALL)
    fp8 = Case("fp8", "variants", (1,), (64,), 16, kv_dtype="float8_e9", **SMALL)
    others = [_Fake("right", 150.0), _Fake("broken", RuntimeError("no\nkernel")),
              _Fake("wrong", peers.Differs("its output differs from ours by 0.5"))]
    results, top = gpu.measure([base, half, fp8], device="cpu", peers=others)
    by_name = {r.case.name: r for r in results}
    assert by_name["base"].us == 100 and by_name["base"].beside is None
    assert by_name["window"].beside == 1  # the same work, as the window is wider than the keys
    assert by_name["fp8"].us is None and by_name["fp8"].problem.startswith("not supported: ")
    assert not by_name["fp8"].wrong and by_name["base"].wrong
    flops, moved = by_name["base"].flops, by_name["base"].bytes
    assert flops == 4 * (64 * 65 // 2) * 4 * 64
    assert by_name["base"].of_ceiling == pytest.approx(max(moved / 1e12, flops / 1e15) * 1e4)

    rows = gpu.rows(results, top)
    assert all(set(row) == {"case", "metric", "value", "unit"} for row in rows)
    assert {"case": "base", "metric": "right / ours", "value": 1.5, "unit": "x"} in rows
    said = [row["metric"] for row in rows if row["value"] is None]
    assert "broken: failed: RuntimeError: no kernel" in said
    assert "wrong: its output differs from ours by 0.5" in said
    assert "window1k: window1k is not among causal, full" not in said
    assert any(row["case"] == "fp8" and row["metric"].startswith("not supported") for row in rows)
    columns, lines = gpu.table(results, others)
    assert len(lines) == 3 and all(len(line) == len(columns) for line in lines)


def test_a_wrong_result_is_reported(no_gpu, monkeypatch):
    monkeypatch.setattr(Workload, "same_bits", lambda self: False)
    (result,), _ = gpu.measure([Case("base", "prefill", (9,), (9,), **SMALL)], device="cpu")
    assert result.wrong and "rows changed" in result.problem


def test_peers_refuse_what_they_do_not_take():
    ragged, paged = CASES["p4_4k"], CASES["d64_4k_page16"]
    refuses = lambda peer, case: bool(peer.refusal(peer.__new__(peer), case))  # noqa: E731
    assert refuses(peers.FlashInferDecode, ragged) and not refuses(peers.FlashInferDecode, paged)
    assert refuses(peers.Cudnn, CASES["p16_zipf1k"]) and not refuses(peers.Cudnn, paged)
    assert refuses(peers.Cudnn, CASES["a8_512_8k_page16"])  # a causal mask aligned at the top left
    assert refuses(peers.FlashInferFa3, CASES["spec32_8_4k_mask"])
    assert not refuses(peers.FlashInferFa2, CASES["spec32_8_4k_mask"])
    assert refuses(peers.FlashAttention3, CASES["p4_4k_rope"])


def test_absent_peers_are_named():
    torch = pytest.importorskip("torch")
    found, absent = peers.find(["fa3"], "cuda")
    names = {peer.name for peer in found} | {name for name, _ in absent}
    assert names == {"fa3", "cudnn"} and all(why for _, why in absent)
    if not torch.cuda.is_available():
        assert not found
    with pytest.raises(ValueError, match="'fa9' is no peer; known are cudnn, "):
        peers.find(["fa9"], "cuda")


def test_a_peer_that_differs_is_not_timed(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(peers, "time_torch", lambda *a: type("Timing", (), {"median_us": 7.0}))
    workload = Workload(Case("x", "prefill", (5,), (70,), 16, dtype="float32", **SMALL))
    workload.compile()
    workload.prepare(Pools("cpu", [workload]))
    peer = peers.Peer("cpu")
    out = torch.from_dlpack(workload.out).clone()
    peer.work = lambda w: lambda: out
    assert peer.time(workload, 0.1) == 7
    out[3, 1] *= 1.1  # one row of one head
    with pytest.raises(peers.Differs, match="by 0.1 of a row's norm"):
        peer.time(workload, 0.1)
