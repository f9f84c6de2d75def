"""The table that justifies the choice of the sm80 kernel's tiles: registers and shared memory of
each, how many CTAs a multiprocessor holds, the modelled cost of a key and, on a GPU, measured
times."""

from plait import _plait
from plait.bench import row
from plait.bench.cases import Case
from plait.bench.timing import time_plait
from plait.bench.workload import Pools, Workload
from plait.tensors import parse_device


def tiles(arch=None, head_dim=128, device=None):
    """A row a figure, for each tile_q x tile_kv x stages that fits. With `device`, of its
    architecture and with times: 4 x 4096 causal, ragged, and 64 x 4096 decoded, page 16, 32/8
    heads, bfloat16."""
    dev = parse_device(device) if device is not None else None
    if dev is not None:
        arch = _plait.driver_info().gpus[dev[1]].arch
    cases = (
        Case("prefill", "tiles", (4096,) * 4, (4096,) * 4, head_dim=head_dim),
        Case("decode", "tiles", (1,) * 64, (4096,) * 64, page_size=16, head_dim=head_dim),
    )
    rows, times = [], {}
    table = _plait.tile_table(arch, head_dim)
    if dev is not None:
        pools = Pools(device, [Workload(case) for case in cases])
        for case, tile in ((case, tile) for case in cases for tile in table):
            workload = Workload(case, device, f"sm80 {tile.tile}")
            workload.compile()
            workload.lay_out(pools)
            workload.prepare()
            wrong = workload.check()
            if wrong:
                raise RuntimeError(f"{workload.kernel}, {case.describe()}: {wrong}")
            times[tile.tile, case.name] = time_plait(device, workload.run, 0.2).median_us
    for tile in table:
        case = f"sm_{arch}, d {head_dim}: {tile.tile}{' (chosen)' if tile.chosen else ''}"
        rows += [
            row(case, "warps", tile.num_warps, ""),
            row(case, "registers", tile.registers, ""),
            row(case, "spilled", tile.spill_bytes, "bytes"),
            row(case, "shared memory", tile.smem_bytes, "bytes"),
            row(case, "CTAs", tile.ctas_per_sm, "a multiprocessor"),
            row(case, "modelled", tile.clocks_per_key, "clocks a key"),
        ]
        rows += [row(case, n, us, "us") for (name, n), us in times.items() if name == tile.tile]
    return rows
