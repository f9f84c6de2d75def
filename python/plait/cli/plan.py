"""`plait plan`: how a batch would be cut, without a device."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from plait.plan import make_plan
from plait.replay.engine import Engine
from plait.replay.trace import read_trace
from plait.variants import causal, full, sliding_window


def _lengths(text, what):
    try:
        values = [int(x) for x in text.split(",") if x.strip()]
    except ValueError:
        raise typer.BadParameter(
            f"{what} is {text!r}; wanted are integers, comma-separated"
        ) from None
    if any(x < 0 for x in values):
        raise typer.BadParameter(f"{what} has a negative length: {text!r}")
    if any(x >= 2**31 for x in values):
        raise typer.BadParameter(f"{what} has a length of 2^31 or more: {text!r}")
    return np.array(values, np.int64)


def trace_step(path, scale, number, max_batch, chunk, page_size=16):
    """(q_len, kv_len) of step `number` (from 0) of a replay of the trace."""
    trace = read_trace(path, scale)
    pages = sum(-(-(r.input_len + r.output_len) // page_size) for r in trace) + 1
    engine = Engine(trace, page_size=page_size, num_pages=pages, max_batch=max_batch, chunk=chunk)
    count = 0
    while not engine.done:
        step = engine.schedule(float("inf"))
        if count == number:
            return np.diff(step.qo_indptr), step.kv_len
        engine.finish(step)
        count += 1
    raise ValueError(f"the trace has {count} steps; step {number} is not among them")


def plan_command(
    context: typer.Context,
    kv_len: Annotated[str | None, typer.Option(help="keys of each request: 4096,17,300")] = None,
    q_len: Annotated[
        str | None, typer.Option(help="query tokens of each request; default: 1 each")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="take the lengths from a step of its replay", exists=True)
    ] = None,
    step: Annotated[int, typer.Option(help="which step of the trace, from 0")] = 0,
    scale: Annotated[str, typer.Option(help="of the trace")] = "1",
    max_batch: Annotated[int, typer.Option(help="of the trace", min=1)] = 64,
    chunk: Annotated[int, typer.Option(help="of the trace")] = 2048,
    num_qo_heads: Annotated[int, typer.Option()] = 32,
    num_kv_heads: Annotated[int, typer.Option()] = 8,
    num_ctas: Annotated[int, typer.Option(help="CTAs of the grid")] = 132,
    tile_q: Annotated[str, typer.Option(help="packed rows of each shape, descending")] = "128,64",
    tile_kv: Annotated[int, typer.Option(help="cuts fall on multiples of it")] = 128,
    causal_: Annotated[bool, typer.Option("--causal/--full")] = True,
    window_left: Annotated[int, typer.Option(help="-1: no window", min=-1, max=2**30)] = -1,
    scheduler: Annotated[str, typer.Option(help="auto, lpt, unsplit, prefix_sum")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="the whole plan as one object")] = False,
    html: Annotated[
        Path | None, typer.Option(help="write a page that shows the plan to this file")
    ] = None,
):
    """Plan a batch, given by lengths or by a step of a trace; print choices, items and merges."""
    if (kv_len is None) == (trace is None):
        raise typer.BadParameter("give either --kv-len or --trace")
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise typer.BadParameter(
            f"--num-qo-heads {num_qo_heads} is no multiple of --num-kv-heads {num_kv_heads}"
        )
    if trace is not None:
        if q_len is not None:
            raise typer.BadParameter("--q-len goes with --kv-len; a trace has its own")
        q_lens, kv_lens = trace_step(trace, scale, step, max_batch, chunk)
    else:
        for name in ("step", "scale", "max_batch", "chunk"):
            if context.get_parameter_source(name).name != "DEFAULT":
                raise typer.BadParameter(
                    f"--{name.replace('_', '-')} goes with --trace, not with --kv-len"
                )
        kv_lens = _lengths(kv_len, "--kv-len")
        q_lens = np.ones_like(kv_lens) if q_len is None else _lengths(q_len, "--q-len")
        if len(q_lens) != len(kv_lens):
            raise typer.BadParameter(
                f"{len(q_lens)} lengths in --q-len, {len(kv_lens)} in --kv-len"
            )
    variant = causal() if causal_ else full()
    if window_left >= 0:
        variant = variant | sliding_window(window_left)
    plan = make_plan(
        np.concatenate([[0], np.cumsum(q_lens)]),
        kv_lens,
        variant=variant,
        group_size=num_qo_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        num_ctas=num_ctas,
        tile_kv=tile_kv,
        tile_q=[int(t) for t in _lengths(tile_q, "--tile-q")],
        scheduler=scheduler,
    )
    if html is not None:
        html.write_text(plan.to_html(), encoding="utf-8")
    print(plan.to_json() if json else plan)
