"""Measures cases in a process of its own, and in another one where that ends before it should: a
kernel that hangs or breaks the device costs its case, not the run.
"""

import dataclasses
import json
import queue
import signal
import subprocess
import sys
import threading
import time

from plait.bench.gpu import Result

_WORKER = [sys.executable, "-m", "plait.bench.worker"]


@dataclasses.dataclass
class Run:
    """What is known so far: ceilings, absent peers with the reason, and the results in order."""

    top: dict | None = None
    absent: dict = dataclasses.field(default_factory=dict)
    results: dict = dataclasses.field(default_factory=dict)


def measure(
    cases, *, device, kernel, peers, seconds, limit, report, progress=lambda text: None, worker=None
):
    """The Run over `cases`. peers: names; limit: seconds of all together, None for no end;
    report(run, result) is called with each case's result, in order. worker: its command line."""
    run, left, left_out, build = Run(), list(cases), {}, True
    end = None if limit is None else time.monotonic() + limit

    def finish(result):
        result.peers |= {name: why for name, why in left_out.items() if name not in result.peers}
        run.results[result.case.name] = result
        left[:] = [case for case in left if case.name != result.case.name]
        report(run, result)

    while left:
        job = dict(
            cases=[dataclasses.asdict(case) for case in left],
            device=device,
            kernel=kernel,
            peers=[name for name in peers if name not in left_out],
            seconds=seconds,
            top=run.top,
            build=build,
        )
        at, why = _one_process(job, left, run, end, finish, progress, worker or _WORKER)
        if why is None:  # all done, or the device is lost in a case that is reported
            continue
        if why == _OVER:
            for case in list(left):
                finish(Result(case, problem=f"not measured: {limit:g} s are over"))
        elif at["peer"] is not None:
            # Its case is measured again, without it.
            left_out[at["peer"]] = f"left out: in {at['case']} {why}"
        elif at["case"] is not None:
            (case,) = (case for case in left if case.name == at["case"])
            finish(Result(case, problem=f"failed: {why}", wrong=True))
        elif build and "modules" in at["text"]:
            build = False  # each is built where it is timed
        else:
            for case in list(left):
                finish(Result(case, problem=f"failed: {at['text']}: {why}", wrong=True))
    return run


_OVER = "over"


def _one_process(job, left, run, end, finish, progress, command):
    """(the last phase, None) if it did what it could; else why it had to end."""
    at = dict(text="start", patience=120, case=None, peer=None)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    lines = queue.SimpleQueue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        try:
            json.dump(job, process.stdin)
            process.stdin.close()
        except BrokenPipeError:  # said below, by its end
            pass
        known = {case.name: case for case in left}
        while left:
            wait = at["patience"]
            if end is not None:
                wait = min(wait, end - time.monotonic())
            try:
                line = lines.get(timeout=max(wait, 0))
            except queue.Empty:
                over = end is not None and time.monotonic() >= end
                return at, _OVER if over else f"no end after {at['patience']:g} s"
            if line is None:
                return at, f"the process ended with {_status(process.wait())}"
            event = json.loads(line)
            kind = event.pop("event")
            if kind == "phase":
                at = event
                progress(at["text"])
            elif kind == "peers":
                run.absent |= event["absent"]
            elif kind == "ceilings":
                run.top = event["top"]
            elif kind == "result":
                at = dict(text=f"after {at['text']}", patience=120, case=None, peer=None)
                fields = event["result"]
                finish(Result(**fields | {"case": known[fields["case"]]}))
            else:  # lost
                return at, None
        return at, None
    finally:
        process.kill()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:  # a driver that waits for its kernel
            pass


def _status(code):
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
