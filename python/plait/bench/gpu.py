"""Measures cases on a GPU, in this process: kernels compiled side by side first, then every case
checked and timed, beside the ceilings of the same run and the peers asked for.

`plait bench` does this in a process of its own (worker.py, supervise.py): a kernel that never ends
can only be stopped with its process.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from plait import _plait
from plait.bench.case import Case
from plait.bench.peers import Differs
from plait.bench.timing import ceilings, time_eager, time_plait
from plait.bench.workload import Pools, Workload
from plait.tensors import parse_device

_BUILD_SECONDS = 420  # of a peer's modules: FlashInfer's fa3 takes 93 s a head_dim on 16 cores


@dataclass
class Result:
    """Of one case. `problem`: why there is no time ("not supported: ..."), or what is wrong."""

    case: Case
    kernel: str = ""
    us: float | None = None
    flops: int = 0
    bytes: int = 0
    balance: float = 0
    workspace_bytes: int = 0
    peers: dict = field(default_factory=dict)  # name -> us, or why not
    problem: str = ""
    wrong: bool = False  # the problem is one of plait or a peer, not something left out


def measure(
    cases, emit, *, device="cuda", kernel="auto", peers=(), seconds=0.3, top=None, build=True
):
    """Calls emit(event, **fields) as it goes:
      phase: text, patience (seconds after which it hangs), case and peer (names or None)
      ceilings: top, of timing.ceilings; not where `top` is given
      result: result, a Result; in the order of `cases`, each once
      lost: nothing more can be measured in this process; the last event
    peers: objects of plait.bench.peers; build: their modules beforehand, side by side."""

    def phase(text, patience, case=None, peer=None):
        emit("phase", text=text, patience=patience, case=case, peer=peer)

    workloads = [Workload(case, device, kernel) for case in cases]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as executor:
        phase(f"compiling for {len(workloads)} cases", 120)
        problems = list(executor.map(_compile, workloads))
        ready = [w for w, problem in zip(workloads, problems) if not problem]
        pools = Pools(device, ready)
        if build:
            _build_peers(ready, pools, peers, executor, phase)
    if top is None:
        phase("ceilings", 60)
        top = ceilings(device, seconds, gemm=bool(ready))
        emit("ceilings", top=top)
    for workload, problem in zip(workloads, problems):
        result = Result(workload.case)
        if problem:
            result.problem, result.wrong = problem
        else:
            name = workload.case.name
            phase(name, 60 + 20 * seconds, case=name)
            _measure(
                workload,
                result,
                pools,
                peers,
                seconds,
                lambda peer, name=name: phase(
                    f"{name}, {peer}",
                    (60 if build else _BUILD_SECONDS) + 20 * seconds,
                    name,
                    peer,
                ),
            )
        emit("result", result=result)
        workload.release()
        if (problem or result.problem or result.wrong) and not _device_works(device):
            emit("lost")
            return


def _device_works(device):
    """False after a kernel's illegal access, say: every later call in this process fails."""
    if device == "cpu":
        return True
    try:
        _plait.synchronize(parse_device(device))
    except RuntimeError:
        return False
    return True


def _problem(error):
    """(problem, wrong) of an exception; a ValueError is the library's own refusal."""
    if isinstance(error, ValueError):
        return f"not supported: {error}", False
    return f"failed: {describe(error)}", True


def describe(error):
    """One line of an exception of anybody's code."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _compile(workload):
    try:
        workload.compile()
    except Exception as error:  # no case may take others down
        return _problem(error)
    return None


def _build_peers(workloads, pools, peers, executor, phase):
    """Once through each module that a peer compiles at first use, side by side; what fails here
    fails again, and is reported, where it is timed."""
    first = {}
    for peer in peers:
        for workload in workloads:
            if peer.compiles and not peer.refusal(workload.case):
                first.setdefault((peer.name, peer.module(workload.case)), (peer, workload))
    if not first:
        return
    phase(f"{len(first)} modules of peers", _BUILD_SECONDS)

    def build(pair):
        try:
            peer, workload = pair
            workload.lay_out(pools)
            peer.work(workload)()
        except Exception:
            pass

    list(executor.map(build, first.values()))


def _measure(workload, result, pools, peers, seconds, peer_begins):
    """Fills in `result`. The check is done before anything is timed: a busy host would be felt."""
    try:
        workload.lay_out(pools)
        workload.prepare()
        result.kernel = workload.attention.kernel_name
        result.flops, result.bytes = workload.work()
        result.balance = workload.plan.balance
        result.workspace_bytes = workload.attention.workspace_bytes
        result.problem = workload.check()
        result.wrong = bool(result.problem)
        timed = time_plait if workload.case.call == "graph" else time_eager
        result.us = timed(workload.device, workload.run, seconds).median_us
        if not workload.same_bits():
            result.problem, result.wrong = "rows changed between runs of one plan", True
    except Exception as error:
        result.problem, result.wrong = _problem(error)
        return
    for peer in peers:
        why = peer.refusal(workload.case)
        if why:
            result.peers[peer.name] = why
            continue
        peer_begins(peer.name)
        try:
            result.peers[peer.name] = peer.time(workload, seconds)
        except Differs as error:
            result.peers[peer.name], result.wrong = str(error), True
        except Exception as error:
            result.peers[peer.name] = f"failed: {describe(error)}"
            if not _device_works(workload.device):
                result.wrong = True
                result.peers[peer.name] += "; it broke the device"
                return
