"""The process that measures: `python -m plait.bench.worker`, a job as JSON on stdin, an event a
line of JSON on stdout (plait.bench.gpu.measure says which). supervise.py starts it and may end it.
"""

import dataclasses
import json
import os
import sys

from plait.bench import gpu
from plait.bench.case import Case
from plait.bench.peers import load
from plait.nvrtc import use_wheels


def line(event, **fields):
    """An event as it is written."""
    if "result" in fields:
        fields["result"] = dataclasses.asdict(fields["result"])
        fields["result"]["case"] = fields["result"]["case"]["name"]
    return json.dumps({"event": event, **fields})


def main():
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what peers print is no event

    def emit(event, **fields):
        print(line(event, **fields), file=events, flush=True)

    job = json.load(sys.stdin)
    use_wheels()
    emit("phase", text="loading peers", patience=120, case=None, peer=None)
    peers, absent = load(job.pop("peers"), job["device"])
    emit("peers", found=[peer.name for peer in peers], absent=dict(absent))
    cases = [
        Case(**fields | {name: tuple(fields[name]) for name in ("q_len", "kv_len")})
        for fields in job.pop("cases")
    ]
    gpu.measure(cases, emit, peers=peers, **job)


if __name__ == "__main__":
    main()
