"""`plait compile`: compiles every kernel that plait ships, on this machine, without a GPU."""

from typing import Annotated

import typer
from rich.progress import track

from plait import _plait
from plait.cli.tables import console, print_json, print_table
from plait.nvrtc import use_wheels


def compile_command(
    arch: Annotated[
        list[str] | None, typer.Option(help="sm_90a or 90a; again for more; default: all")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="a list of objects instead of a table")
    ] = False,
):
    """Compile every shipped kernel past the cache; exit 1 if one fails or spills registers."""
    use_wheels()
    names = [a.removeprefix("sm_") for a in arch or _plait.shipped_architectures()]
    kernels = []
    for name in track(names, "compiling", console=console, transient=True, disable=json):
        kernels += _plait.compile_shipped(name)
    rows = [
        dict(
            kernel=k.kernel,
            arch=k.arch,
            seconds=round(k.seconds, 3),
            registers=k.registers,
            spill_bytes=k.spill_bytes,
            smem_bytes=k.smem_bytes,
            **({"error": k.error} if k.error else {}),
        )
        for k in kernels
    ]
    if json:
        print_json(rows)
    else:
        print_table(
            ["kernel", "arch", ">seconds", ">registers", ">spill bytes", ">smem bytes"],
            [list(row.values())[:6] for row in rows],
        )
        seconds = sorted(k.seconds for k in kernels if not k.error)
        if seconds:
            console.print(
                f"{len(rows)} kernels, median {seconds[len(seconds) // 2]:.2f} s, worst "
                f"{seconds[-1]:.2f} s, {sum(k.spill_bytes for k in kernels)} bytes of spills"
            )
        for k in kernels:
            if k.error:
                console.print(f"[bold]{k.kernel}[/bold] {k.arch}: {k.error}")
    if any(k.error or k.spill_bytes for k in kernels):
        raise typer.Exit(1)
