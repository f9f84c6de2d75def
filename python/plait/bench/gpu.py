"""Measures cases on a GPU: kernels compiled side by side first, then every case checked and timed,
beside the ceilings of the same run and the peers asked for."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from plait.bench import row
from plait.bench.cases import Case
from plait.bench.peers import Differs
from plait.bench.timing import ceilings, time_plait
from plait.bench.workload import Pools, Workload


@dataclass
class Result:
    """Of one case. `problem`: why there is no time ("not supported: ..."), or what is wrong."""

    case: Case
    kernel: str = ""
    us: float | None = None
    flops: int = 0
    bytes: int = 0
    balance: float = 0
    of_ceiling: float | None = None  # 1: as fast as the chip's ceilings allow
    beside: float | None = None  # FLOP/s over those of the case it stands beside
    peers: dict = field(default_factory=dict)  # name -> us, or why not
    problem: str = ""
    wrong: bool = False  # the problem is one of plait or a peer, not something left out


def measure(cases, *, device="cuda", kernel="auto", peers=(), seconds=0.3, progress=lambda text: 0):
    """(results, ceilings). peers: objects of plait.bench.peers."""
    workloads = [Workload(case, device, kernel) for case in cases]
    results = {w.case.name: Result(w.case) for w in workloads}
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        progress("compiling")
        for workload, problem in zip(workloads, executor.map(_compile, workloads)):
            results[workload.case.name].problem = problem
            results[workload.case.name].wrong = problem.startswith("failed")
        ready = [w for w in workloads if not results[w.case.name].problem]
        pools = Pools(device, ready)
        _compile_peers(ready, pools, peers, executor, progress)
        progress("ceilings")
        top = ceilings(device, seconds, gemm=bool(ready))
        checks = []
        for workload in ready:
            result = results[workload.case.name]
            progress(workload.case.name)
            try:
                workload.prepare(pools)
            except (ValueError, RuntimeError) as error:
                result.problem, result.wrong = _refusal(error)
                continue
            checks.append((result, executor.submit(workload.check)))
            _time(workload, result, peers, seconds)
            workload.release()
        progress("checks")
        for result, check in checks:
            if check.result():
                result.problem, result.wrong = check.result(), True
    for result in results.values():
        _compare(result, results, top)
    return list(results.values()), top


def _refusal(error):
    """(problem, wrong) of an error: ValueError is the library's own refusal."""
    if isinstance(error, ValueError):
        return f"not supported: {error}", False
    return f"failed: {error}", True


def _compile(workload):
    try:
        workload.compile()
    except (ValueError, RuntimeError) as error:
        return _refusal(error)[0]
    return ""


def _compile_peers(workloads, pools, peers, executor, progress):
    """Once through each module that a peer compiles at first use, side by side; what fails here
    fails again, and is reported, where it is timed."""
    first = {}
    for peer in peers:
        for workload in workloads:
            if peer.compiles and not peer.refusal(workload.case):
                first.setdefault((peer.name, peer.module(workload.case)), (peer, workload))
    if not first:
        return
    progress(f"{len(first)} modules of peers")

    def build(pair):
        try:
            peer, workload = pair
            peer.work(workload)()
        except Exception:  # any error of another's code
            pass

    for _, workload in first.values():
        try:
            workload.prepare(pools)
        except (ValueError, RuntimeError):  # said where it is measured
            pass
    list(executor.map(build, first.values()))


def _time(workload, result, peers, seconds):
    result.kernel = workload.attention.kernel_name
    result.flops, result.bytes = workload.work()
    result.balance = workload.plan.balance
    try:
        result.us = time_plait(workload.device, workload.run, seconds).median_us
        if not workload.same_bits():
            result.problem, result.wrong = "rows changed between runs of one plan", True
    except RuntimeError as error:
        result.problem, result.wrong = _refusal(error)
        return
    for peer in peers:
        why = peer.refusal(workload.case)
        if why:
            result.peers[peer.name] = why
            continue
        try:
            result.peers[peer.name] = peer.time(workload, seconds)
        except Differs as error:
            result.peers[peer.name], result.wrong = str(error), True
        except Exception as error:  # any error of another's code
            text = " ".join(str(error).split())
            result.peers[peer.name] = f"failed: {type(error).__name__}: {text[:200]}"


def _compare(result, results, top):
    if result.us is None:
        return
    floor = result.bytes / top["read"] * 1e6
    if not isinstance(top["gemm"], str):
        floor = max(floor, result.flops / top["gemm"] * 1e6)
        result.of_ceiling = floor / result.us
    elif result.case.group == "decode":  # memory is the ceiling whatever the other is
        result.of_ceiling = floor / result.us
    other = results.get(result.case.beside)
    if other is not None and other.us:
        result.beside = (result.flops / result.us) / (other.flops / other.us)


def rows(results, top):
    """As `--json` gives them: case, metric, value, unit; value null where there is none."""
    out = [row("ceiling", "read of 2 GiB", top["read"] / 1e12, "TB/s")]
    if isinstance(top["gemm"], str):
        out.append(row("ceiling", f"bf16 GEMM absent: {top['gemm']}", None, ""))
    else:
        out.append(row("ceiling", "bf16 GEMM 8192^3", top["gemm"] / 1e12, "TFLOP/s"))
    for result in results:
        name = result.case.name
        if result.problem:
            out.append(row(name, result.problem, None, ""))
        if result.us is None:
            continue
        out.append(row(name, "time", result.us, "us"))
        out.append(row(name, "work", result.flops / result.us / 1e6, "TFLOP/s"))
        out.append(row(name, "bandwidth", result.bytes / result.us / 1e6, "TB/s"))
        out.append(row(name, "modelled balance", result.balance, "busiest / mean"))
        if result.of_ceiling is not None:
            out.append(row(name, "of ceiling", 100 * result.of_ceiling, "%"))
        if result.beside is not None:
            out.append(row(name, f"FLOP/s beside {result.case.beside}", result.beside, "x"))
        for peer, us in result.peers.items():
            if isinstance(us, str):
                out.append(row(name, f"{peer}: {us}", None, ""))
            else:
                out.append(row(name, peer, us, "us"))
                out.append(row(name, f"{peer} / ours", us / result.us, "x"))
    return out


def table(results, peers):
    """(columns, rows) for print_table: a line a case."""
    names = [peer.name for peer in peers]
    columns = ["case", ">us", ">TFLOP/s", ">TB/s", ">% of ceiling", ">beside", "", "kernel"]
    columns[-1:-1] = [f">{name}" for name in names]
    lines = []
    for r in results:
        if r.us is None:
            lines.append([r.case.name] + [""] * (len(columns) - 2) + [r.problem])
            continue
        line = [r.case.name, f"{r.us:.2f}", f"{r.flops / r.us / 1e6:.0f}"]
        line += [f"{r.bytes / r.us / 1e6:.2f}"]
        line += ["" if r.of_ceiling is None else f"{100 * r.of_ceiling:.1f}"]
        line += ["", ""] if r.beside is None else [f"{r.beside:.3f} x", f"of {r.case.beside}"]
        for name in names:
            us = r.peers.get(name, "")
            line.append("-" if isinstance(us, str) else f"{us:.2f} ({us / r.us:.3f} x)")
        lines.append(line + [r.kernel + (f"; WRONG: {r.problem}" if r.problem else "")])
    return columns, lines
