"""`plait bench GROUP...`: what needs no GPU (plan, balance, overhead, cpu, compile), layers one
behind the other, the table of tiles, groups of the cases in plait.bench.cases, and the figures of
plait.bench.paper."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from plait import _plait
from plait.bench.cases import GROUPS, select
from plait.bench.peers import resolve
from plait.cli.tables import JsonRows, Text, console, print_json, print_table
from plait.nvrtc import use_wheels
from plait.tensors import parse_device

HOST = ("plan", "balance", "overhead", "cpu", "compile", "layers")
_CASES = (*GROUPS, "paper")
Bench = Enum("Bench", {name: name for name in (*HOST, "tiles", *_CASES, "gpu")}, type=str)
# What an option has a meaning for; "cases" stands for all groups of them.
_GOES_WITH = {
    "case": ("cases",),
    "list_": ("cases",),
    "device": ("cases", "tiles"),
    "kernel": ("cases",),
    "peers": ("cases",),
    "seconds": ("cases", "tiles"),
    "limit": ("cases", "tiles"),
    "arch": ("compile", "tiles"),
    "head_dim": ("tiles",),
    "html": ("paper",),
}


def bench_command(
    context: typer.Context,
    which: Annotated[
        list[Bench], typer.Argument(help="one or more; gpu: all groups of cases on a GPU")
    ],
    case: Annotated[
        list[str] | None, typer.Option(help="only these, comma-separated or given again")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="the cases, unmeasured")] = False,
    device: Annotated[str, typer.Option(help="a GPU")] = "cuda",
    kernel: Annotated[
        str,
        typer.Option(
            help="of plait.Attention: sm80, 'sm90 128x144x2', ...; of cases that name none"
        ),
    ] = "auto",
    peers: Annotated[
        list[str] | None,
        typer.Option(help="cudnn, fa3, flashinfer, flex, ... or all; comma-separated"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="of launches a case and peer; the first third settles the clocks")
    ] = 0.3,
    limit: Annotated[
        float | None, typer.Option(help="seconds for all cases; those beyond are named, unmeasured")
    ] = None,
    arch: Annotated[
        str,
        typer.Option(help="of compile (default: 90a); of tiles: compiled for it, nothing timed"),
    ] = "",
    head_dim: Annotated[str, typer.Option(help="of tiles: 128, or 192/128")] = "128",
    html: Annotated[
        Path | None, typer.Option(help="of paper: write a page of its figures to this file")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="a list of case, metric, value, unit")
    ] = False,
):
    """Measure; a row a figure. Results on data are checked on sampled rows; exit 1 if one is
    off."""
    names = list(dict.fromkeys(w.value for w in which))
    groups = tuple(g for g in _CASES if g in names or ("gpu" in names and g in GROUPS))
    given = {name for name in _GOES_WITH if context.get_parameter_source(name).name != "DEFAULT"}
    _refuse_idle(given, names, groups)
    if not seconds > 0:
        raise typer.BadParameter(f"--seconds is {seconds}; it must be > 0")
    if limit is not None and not limit > 0:
        raise typer.BadParameter(f"--limit is {limit}; it must be > 0")
    if list_:
        return _list(select(groups, _split(case)), json)
    cases = select(groups, _split(case))
    peer_names = resolve(_split(peers)) if peers else []
    wrong = False
    with JsonRows() if json else Text() as say:
        for name in names:
            if name in HOST:
                say(None, _host(name, arch))
        if "tiles" in names:
            cases = _tiles(arch, head_dim, device, say) + cases
        if cases:
            run, gpu_name = _gpu(cases, device, kernel, peer_names, seconds, limit, say)
            wrong = any(r.wrong for r in run.results.values())
            if "paper" in names:
                _paper(run, gpu_name, html, say)
    if wrong:
        raise typer.Exit(1)


def _refuse_idle(given, names, groups):
    """Refuses options that would do nothing."""
    kinds = {*names, "cases"} if groups else set(names)
    for name in sorted(given):
        if not kinds & set(_GOES_WITH[name]):
            takes = [*_CASES, "gpu"] if "cases" in _GOES_WITH[name] else []
            takes += [kind for kind in _GOES_WITH[name] if kind != "cases"]
            raise typer.BadParameter(
                f"--{name.strip('_').replace('_', '-')} goes with {', '.join(takes)}, not with "
                f"{', '.join(names)}"
            )
    if "list_" in given and given - {"list_", "case"}:
        raise typer.BadParameter("--list measures nothing; beside it only --case has a meaning")
    if "tiles" in names and {"arch", "device"} <= given:
        raise typer.BadParameter("tiles takes one of --arch and --device")


def _split(values):
    return [name for value in values or () for name in value.split(",") if name]


def _host(name, arch):
    from plait.bench import cpu, host, layers

    if name in ("compile", "cpu"):
        use_wheels()
    if name == "compile":
        return host.compile(arch or "90a")
    if name == "layers":
        return layers.layers()
    return cpu.cpu() if name == "cpu" else getattr(host, name)()


def _tiles(arch, head_dim, device, say):
    """Says the table; returns the cases that time it, none with --arch."""
    from plait.bench import tiles

    use_wheels()
    head_dims = tiles.parse_head_dim(head_dim)
    timed = not arch
    if timed:
        _plait.describe_gpu(parse_device(device))  # says what is missing
        arch = _plait.driver_info().gpus[parse_device(device)[1]].arch
    table = tiles.table(arch, head_dims)
    say.table(*tiles.lines(table, arch, head_dims), tiles.rows(table, arch, head_dims))
    return tiles.cases(table, head_dims) if timed else []


def _gpu(cases, device, kernel, peer_names, seconds, limit, say):
    """(Run, the GPU's name); say(text, rows) is called as soon as there is something."""
    from plait.bench import figures, row
    from plait.bench.supervise import measure

    gpu_name = _plait.describe_gpu(parse_device(device))
    say(f"{gpu_name}\n{figures.header()}", [])

    def report(run, result):
        text = figures.line(result, run.results, run.top)
        say(text, figures.rows(result, run.results, run.top))

    with console.status("") as status:
        run = measure(
            cases,
            device=device,
            kernel=kernel,
            peers=peer_names,
            seconds=seconds,
            limit=limit,
            report=report,
            progress=status.update,
        )
    rows = [row(gpu_name, f"{name} is absent: {why}", None, "") for name, why in run.absent.items()]
    rows += figures.ceiling_rows(run.top) if run.top else []
    for r in rows:
        value = "" if r["value"] is None else f": {r['value']:.5g} {r['unit']}"
        say(f"{r['case']}: {r['metric']}{value}", [r])
    return run, gpu_name


def _paper(run, gpu_name, html, say):
    """Says what the figures judge, and writes their page."""
    from plait.bench import paper

    for figure in paper.figures():
        say(f"{figure.title}: us and {figure.unit}, ratios of FLOP/s", [])
        say.table(*paper.lines(figure, run.results), paper.rows(figure, run.results))
    if html is not None:
        from plait.html.paper import paper_page

        html.write_text(paper_page(paper.figures(), run, gpu_name), encoding="utf-8")


def _list(cases, json):
    if json:
        print_json([{"case": c.name, "group": c.group, "is": c.describe()} for c in cases])
    else:
        print_table(["case", "group", ""], [(c.name, c.group, c.describe()) for c in cases])
