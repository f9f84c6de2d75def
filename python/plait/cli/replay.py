"""`plait replay TRACE`."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from plait.cli.tables import console, print_json, print_table, rate
from plait.nvrtc import use_wheels
from plait.replay.session import Options, replay
from plait.replay.trace import read_trace


def replay_command(
    trace: Annotated[
        Path, typer.Argument(help="Mooncake JSONL or Azure CSV", exists=True, dir_okay=False)
    ],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:<index>")] = "cpu",
    num_qo_heads: Annotated[int, typer.Option()] = Options.num_qo_heads,
    num_kv_heads: Annotated[int, typer.Option()] = Options.num_kv_heads,
    head_dim: Annotated[int, typer.Option()] = Options.head_dim,
    page_size: Annotated[int, typer.Option(help="tokens a page")] = Options.page_size,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16")] = Options.dtype,
    kernel: Annotated[str, typer.Option(help="auto, plain, sm80, sm90a")] = Options.kernel,
    scheduler: Annotated[
        str, typer.Option(help="auto, lpt, unsplit, prefix_sum")
    ] = Options.scheduler,
    scale: Annotated[
        str, typer.Option(help="of lengths and of the 512-token blocks alike")
    ] = "1/32",
    max_batch: Annotated[int, typer.Option(help="requests a step", min=1)] = Options.max_batch,
    chunk: Annotated[int, typer.Option(help="query tokens a step")] = Options.chunk,
    pages: Annotated[
        int | None, typer.Option(help="of the cache; default: 1 GiB of them, 16 GiB on a GPU")
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(help="trace time a step; default 20 / scale")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="read keys of equal hash_ids once, where that pays")
    ] = False,
    requests: Annotated[int | None, typer.Option(help="only the first ones", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="stop after so many", min=0)] = None,
    check: Annotated[
        int, typer.Option(help="check every Nth step; 0: none", min=0)
    ] = Options.check_every,
    check_rows: Annotated[
        int, typer.Option(help="rows of a checked step", min=1)
    ] = Options.check_rows,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="one object instead of a table")] = False,
):
    """Replay a serving trace: every step append_kv, plan, run; exit 1 if a checked row is off."""
    use_wheels()
    rows = read_trace(trace, scale, requests)
    if step_ms is None:  # lengths shrink with the scale, time does not
        numerator, _, denominator = scale.partition("/")
        step_ms = Options.step_ms * float(denominator or 1) / float(numerator)
    if not step_ms > 0:
        raise typer.BadParameter(f"--step-ms is {step_ms}; it must be > 0")
    options = Options(
        device=device,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        kernel=kernel,
        scheduler=scheduler,
        max_batch=max_batch,
        chunk=chunk,
        pages=pages,
        step_ms=step_ms,
        share=share,
        max_steps=steps,
        check_every=check,
        check_rows=check_rows,
        seed=seed,
    )
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=console,
        disable=json,
    ) as progress:
        task = progress.add_task("replay", total=len(rows))

        def on_step(engine, report):
            progress.update(
                task,
                completed=report.requests,
                description=f"step {report.steps}, {len(engine.running)} running",
            )

        report = replay(rows, options, on_step)
    summary = summarise(report)
    if json:
        print_json(summary)
    else:
        print_table(["", ">"], summary.items())
    for failure in report.failures[:10]:
        console.print(f"check failed: {failure}")
    if report.failures:
        raise typer.Exit(1)


def _spread(values):
    if not values:
        return "-"
    return f"median {np.median(values):.1f}, p99 {np.percentile(values, 99):.1f}"


def summarise(report):
    """The table's rows."""
    seconds = sum(report.run_us) * 1e-6
    balance = "-"
    if report.balance:
        balance = f"mean {np.mean(report.balance):.3f}, worst {np.max(report.balance):.3f}"
    shared = {}
    if report.compose_us:
        shared = {
            "compose us": _spread(report.compose_us),
            "nodes shared": f"{report.nodes_shared} of {report.nodes} over several requests",
            "bytes not read": report.bytes_not_read,
            "bytes without sharing": report.bytes + report.bytes_not_read,
        }
    return {
        "kernel": report.kernel,
        "steps": report.steps,
        "tokens": report.tokens,
        "requests finished": report.requests,
        "most requests in a step": report.max_batch,
        "prompt tokens found in shared pages": report.shared_tokens,
        "preemptions": report.preempted,
        "append us": _spread(report.append_us),
        **shared,
        "plan us": _spread(report.plan_us),
        "run us": _spread(report.run_us),
        "work": rate(report.flops, seconds, "FLOP"),
        "memory": rate(report.bytes, seconds, "B"),
        "balance (busiest CTA / mean)": balance,
        "steps checked": report.steps_checked,
        "rows checked": report.rows_checked,
        "largest error": f"{report.largest_error:.3g}",
        "largest lse error": f"{report.largest_lse_error:.3g}",
        "largest error / allowed": f"{report.worst:.3g}",
    }
