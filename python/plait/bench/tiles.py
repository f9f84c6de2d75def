"""The table that justifies the choice of tiles of the sm80 and sm90 kernels: registers and shared
memory of each tile, CTAs a multiprocessor, the modelled cost of a key and, on a GPU, its times as
cases of gpu.py."""

from dataclasses import replace

from plait import _plait
from plait.bench import row
from plait.bench.case import Case


def parse_head_dim(text):
    """(head_dim_qk, head_dim_vo) of "128" or "192/128"."""
    parts = text.split("/")
    if not 1 <= len(parts) <= 2 or not all(part.isdigit() for part in parts):
        raise ValueError(f"--head-dim is {text!r}; it is written 128, or 192/128 for two dims")
    return int(parts[0]), int(parts[-1])


def table(arch, head_dims):
    """Every tile that fits, compiled: rows of _plait.tile_table."""
    return _plait.tile_table(arch.removeprefix("sm_"), *head_dims)


def _case(tile, arch, head_dims):
    dims = "/".join(map(str, dict.fromkeys(head_dims)))
    chosen = " (chosen)" if tile.chosen else ""
    return f"sm_{arch.removeprefix('sm_')}, d {dims}: {tile.kernel}{chosen}"


def _figures(tile):
    """(metric, value, unit) of a tile."""
    is_sm90 = tile.kernel.startswith("sm90")
    yield "warps", tile.num_warps, ""
    yield "registers", tile.registers, "a consumer's thread" if is_sm90 else "a thread"
    yield "wanted", tile.wanted_registers, "for O, S and P alone" if is_sm90 else "by the model"
    yield "spilled", tile.spill_bytes, "bytes"
    yield "shared memory", tile.smem_bytes, "bytes"
    yield "CTAs", tile.ctas_per_sm, "a multiprocessor"
    if not is_sm90:  # it has no model
        yield "modelled", tile.clocks_per_key, "clocks a key"


def rows(tiles, arch, head_dims):
    """A row a figure."""
    return [row(_case(t, arch, head_dims), *figure) for t in tiles for figure in _figures(t)]


def lines(tiles, arch, head_dims):
    """(columns, a line a tile) for print_table."""
    columns = ["", *(f">{name}" for name in _COLUMNS)]
    found = []
    for tile in tiles:
        values = [f"{value:g}" for _, value, _ in _figures(tile)]
        found.append([_case(tile, arch, head_dims), *values, *[""] * (len(_COLUMNS) - len(values))])
    return columns, found


_COLUMNS = ("warps", "registers", "wanted", "spilled", "smem bytes", "CTAs", "clocks a key")


def cases(tiles, head_dims):
    """Tiles of 64 rows and more on 4 x 4096 causal, ragged; of 64 and fewer on 64 x 4096 decoded,
    page 16; 32/8 heads, bfloat16. Beside what each template chooses, which comes first."""
    of_all = dict(head_dim=head_dims[0], head_dim_vo=head_dims[1])
    prefill = Case("prefill", "tiles", (4096,) * 4, (4096,) * 4, **of_all)
    decode = Case("decode", "tiles", (1,) * 64, (4096,) * 64, page_size=16, **of_all)
    out = []
    for case in (prefill, decode):
        many = case is prefill
        fitting = [t for t in tiles if (t.tile_q >= 64 if many else t.tile_q <= 64)]
        for template in ("sm80", "sm90"):
            of_template = [t for t in fitting if t.kernel.startswith(template)]
            chosen = [t for t in of_template if t.chosen and t.tile_q == (128 if many else _FEW)]
            chosen = chosen or [t for t in of_template if t.chosen]
            of_template.sort(key=lambda tile: tile not in chosen[:1])
            names = [f"{case.name} {t.kernel}" for t in of_template]
            out += [
                replace(case, name=name, kernel=t.kernel, beside=names[0] if i else None)
                for i, (t, name) in enumerate(zip(of_template, names))
            ]
    return out


_FEW = 16  # rows of 4 query heads fit the smallest tile on tensor cores
