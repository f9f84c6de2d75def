"""The table that justifies the choice of the sm80 kernel's tiles: registers and shared memory of each,
how many CTAs a multiprocessor holds, the modelled cost of a key and, on a GPU, measured times."""

from plait import _plait
from plait.bench import row
from plait.bench.workload import Workload
from plait.tensors import parse_device


def tiles(arch=None, head_dim=128, device=None):
    """A row a figure, for each tile_q x tile_kv x stages that fits. With `device`, of its architecture
    and with times: 4 x 4096 causal, ragged, and 64 x 4096 decoded, page 16, 32/8 heads, bfloat16."""
    dev = parse_device(device) if device is not None else None
    if dev is not None:
        arch = _plait.driver_info().gpus[dev[1]].arch
    shared = dict(head_dim=head_dim, device=device, kernel="sm80")
    cases = (
        []
        if dev is None
        else [
            ("prefill", Workload(4, 4096, 4096, **shared)),
            ("decode", Workload(64, 1, 4096, page_size=16, **shared)),
        ]
    )
    rows, times = [], {}
    table = _plait.tile_table(arch, head_dim)
    for name, workload in cases:
        workload.prepare()
        for tile in table:
            workload.use_kernel(f"sm80 {tile.tile}")
            timing = _plait.time_on_gpu(dev, workload.run, _plait.CudaTimingOptions())
            times[tile.tile, name] = timing.median_us
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
        rows += [row(case, name, times[tile.tile, name], "us") for name, _ in cases]
    return rows
