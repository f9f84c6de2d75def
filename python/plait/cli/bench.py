"""`plait bench plan|balance|overhead|cpu|prefill|decode|tiles`."""

from enum import Enum
from typing import Annotated

import typer

from plait import _plait
from plait.cli.tables import console, print_json, print_table
from plait.nvrtc import use_wheels
from plait.tensors import parse_device


class Bench(str, Enum):
    plan = "plan"
    balance = "balance"
    overhead = "overhead"
    cpu = "cpu"
    prefill = "prefill"
    decode = "decode"
    tiles = "tiles"


def bench_command(
    which: Annotated[Bench, typer.Argument(help="prefill and decode need a GPU")],
    device: Annotated[str, typer.Option(help="of prefill and decode")] = "cuda",
    kernel: Annotated[str, typer.Option(help="of prefill and decode: auto, plain, sm80, sm90a")] = "auto",
    arch: Annotated[
        str, typer.Option(help="of tiles: compiles for it and times nothing (default: the GPU)")
    ] = "",
    head_dim: Annotated[int, typer.Option(help="of tiles")] = 128,
    json: Annotated[
        bool, typer.Option("--json", help="a list of case, metric, value, unit")
    ] = False,
):
    """Measure; a row a figure. Results on data are checked on sampled rows first."""
    from plait.bench import cpu, gpu, host, tiles

    if which is not Bench.tiles and (arch, head_dim) != ("", 128):
        raise typer.BadParameter(f"--arch and --head-dim go with tiles, not with {which.value}")
    on_gpu = which in (Bench.prefill, Bench.decode)
    if not on_gpu and (device, kernel) != ("cuda", "auto") and which is not Bench.tiles:
        raise typer.BadParameter(
            f"--device and --kernel go with prefill and decode, not with {which.value}"
        )
    if on_gpu:
        use_wheels()
        if not json:
            console.print(_plait.describe_gpu(parse_device(device)))
        rows = (gpu.prefill if which is Bench.prefill else gpu.decode)(device, kernel)
    elif which is Bench.tiles:
        if kernel != "auto" or (arch and device != "cuda"):
            raise typer.BadParameter(
                "tiles has kernels of its own (no --kernel), and one of --arch and --device"
            )
        use_wheels()
        rows = tiles.tiles(arch, head_dim) if arch else tiles.tiles(None, head_dim, device)
    else:
        rows = {
            Bench.plan: host.plan,
            Bench.balance: host.balance,
            Bench.overhead: host.overhead,
            Bench.cpu: cpu.cpu,
        }[which]()
    if json:
        print_json(rows)
        return
    for case in dict.fromkeys(r["case"] for r in rows):
        console.print(case, style="bold", soft_wrap=True)
        print_table(
            ["", ">", ""],
            [
                ("  " + r["metric"], f"{r['value']:.5g}", r["unit"])
                for r in rows
                if r["case"] == case
            ],
        )
