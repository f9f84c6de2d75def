"""`plait tune`: the planner's costs, measured on this GPU."""

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from plait import _plait
from plait.bench import row
from plait.cli.tables import JsonRows, Text, console
from plait.cost_model import SHAPES, write_cost_model
from plait.tensors import parse_device


def tune_command(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="write the costs to this file, for Attention"),
    ] = None,
    device: Annotated[str, typer.Option(help="a GPU")] = "cuda",
    kernel: Annotated[
        list[str] | None, typer.Option(help=f"only these: {', '.join(SHAPES)}; or given again")
    ] = None,
    seconds: Annotated[float, typer.Option(help="of launches a batch")] = 0.15,
    json: Annotated[
        bool, typer.Option("--json", help="a list of case, metric, value, unit")
    ] = False,
):
    """Measure what tiles cost on this GPU, beside the costs in use, and what plans gain by it."""
    from plait.bench.tune import compare, tune

    kinds = [name for value in kernel or () for name in value.split(",") if name]
    for kind in kinds:
        if kind not in SHAPES:
            raise typer.BadParameter(f"--kernel {kind!r} is none of {', '.join(SHAPES)}")
    if not seconds > 0:
        raise typer.BadParameter(f"--seconds is {seconds}; it must be > 0")
    _plait.describe_gpu(parse_device(device))  # says what is missing
    with JsonRows() if json else Text() as say, console.status("") as status:
        gpu, arch, kernels = tune(
            device, seconds, kinds, status.update, lambda measured: _say(measured, say)
        )
        how = f"plait tune --seconds {seconds:g}, least squares over the times of forced plans"
        with tempfile.TemporaryDirectory() as folder:
            path = output or Path(folder) / "costs.json"
            write_cost_model(path, gpu=gpu, arch=arch, kernels=kernels, how=how)
            lines, rows = [], []
            for name, model, shipped, tuned, same in compare(
                device, seconds, kinds, arch, path, status.update
            ):
                note = "the same cuts" if same else ""
                lines.append((name, model, f"{shipped:.2f}", f"{tuned:.2f}", note))
                case = f"{name}, {model.split(', ')[1]}"
                rows += [row(case, "time, shipped costs", shipped, "us"),
                         row(case, "time, tuned costs", tuned, "us")]  # fmt: skip
            say(f"\n{gpu}\nBatches planned by either:", [])
            say.table(["", "costs", ">shipped us", ">tuned us", ""], lines, rows)
        if output is not None:
            say(f"{output} written: plait.Attention(cost_model={str(output)!r})", [])


def _say(measured, say):
    """The costs of a kernel and how well the model meets each time with them."""
    from plait.bench import cost_fit

    m, fit = measured, measured.fit
    names = [f"{name}, {rows} rows" for name in ("fixed_us", "us_per_key") for rows in m.tile_q]
    lines, rows = [], []
    for name, *values in zip([*names, "merge_us"], m.in_use, fit.costs, fit.errors):
        if np.isnan(values[1]):
            continue
        lines.append((name, *(f"{value:.4g}" for value in values)))
        for what, value in zip(("in use", "measured", "standard error"), values):
            rows.append(row(m.kernel_name, f"{name}, {what}", 1e3 * value, "ns"))
    lines.append(("launch", f"{m.launch_in_use:.4g}", f"{fit.launch_us:.4g}", ""))
    say(f"\n{m.kernel.kind}: {m.kernel_name}", [])
    say.table(["", ">in use", ">measured", ">+-"], lines, rows)
    before = cost_fit.modelled(m.points, m.in_use, m.launch_in_use)
    lines, rows = [], []
    for p, old, new in zip(m.points, before, fit.modelled):
        off = [f"{100 * (us / p.us - 1):+.1f}" for us in (old, new)]
        lines.append((p.name, f"{p.us:.2f}", f"{old:.2f}", off[0], f"{new:.2f}", off[1]))
        case = f"{m.kernel_name}, {p.name}"
        rows += [row(case, "time", p.us, "us"), row(case, "modelled, in use", old, "us"),
                 row(case, "modelled, measured costs", new, "us")]  # fmt: skip
    say.table(["", ">us", ">in use", ">%", ">measured", ">%"], lines, rows)
