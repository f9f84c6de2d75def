"""`plait bench paper`: one mechanism of the design at a time, each a figure of cases that differ in
nothing else, and the ratio that judges it.

After the evaluation of FlashInfer (Ye et al., 2025, arXiv:2501.01005), section 4: 4.2 has 16
requests of lengths that are constant, uniform or Zipf; composable formats are decodes behind a
prefix.
"""

from dataclasses import dataclass, replace

from plait.bench import row
from plait.bench.case import Case, draw

GROUP_SIZES = (1, 4, 8)
_LENGTHS = {"constant": ("const1k", "const"), "uniform": ("uniform", "uniform"),
            "Zipf": ("zipf1k", "zipf")}  # fmt: skip
_PREFIXES, _REQUESTS, _OWN_KEYS = (1024, 8192), (16, 64), 256


@dataclass
class Figure:
    """Bars in groups. rows: {label: {series: Case}}, every series in each; judged: (series, the one
    it is held against), in FLOP/s needed."""

    title: str
    mechanism: str
    about: str
    unit: str  # "TB/s" or "TFLOP/s"
    rows: dict
    judged: tuple

    @property
    def series(self):
        return list(next(iter(self.rows.values())))

    def rate(self, result):
        """In its unit; None of a case without a time."""
        if result is None or not result.us:
            return None
        return (result.bytes if self.unit == "TB/s" else result.flops) / result.us / 1e6

    def ratio(self, label, pair, results):
        """Of a row: FLOP/s of series pair[0] over those of pair[1]; None where one has no time."""
        ours, other = (results.get(self.rows[label][series].name) for series in pair)
        if ours is None or other is None or not ours.us or not other.us:
            return None
        return (ours.flops / ours.us) / (other.flops / other.us)

    def peers(self, label, results):
        """{peer: its rate} of a row: that of whichever series' case it took."""
        found = {}
        for case in self.rows[label].values():
            result = results.get(case.name)
            for peer, us in (result.peers if result else {}).items():
                if not isinstance(us, str):
                    found[peer] = self.rate(replace(result, us=us))
        return found


def _requests(phase, kind, group_size, scheduler="auto"):
    """16 requests of a distribution. The names without suffix are those of the groups `decode` and
    `prefill`."""
    name, drawn = _LENGTHS[kind]
    name = f"{phase[0]}16_{name}" + ("" if group_size == 4 else f"_g{group_size}")
    lengths = draw(drawn, 16)
    decode = phase == "decode"
    return Case(
        name if scheduler == "auto" else f"{name}_{scheduler}",
        "paper",
        (1,) * 16 if decode else lengths,
        lengths,
        16 if decode else 0,
        num_qo_heads=8 * group_size,
        scheduler=scheduler,
    )


def _scheduler(phase, schedulers):
    return Figure(
        f"Scheduler, {phase}",
        "scheduler",
        "16 requests, 1024 tokens on average. unsplit: no list of keys is cut, what a grid of "
        "(request, head, row tile) does"
        + ("; Algorithm 1: that of the paper." if len(schedulers) > 2 else "."),
        "TB/s" if phase == "decode" else "TFLOP/s",
        {
            f"{kind}, group {g}": {
                name: _requests(phase, kind, g, s) for name, s in schedulers.items()
            }
            for g in GROUP_SIZES
            for kind in _LENGTHS
        },
        tuple(("plait", name) for name in schedulers if name != "plait"),
    )


def _distributions(phase):
    return Figure(
        f"Unequal lengths, {phase}",
        "balance",
        "The same cases by distribution: work of unequal requests as fast as that of equal ones.",
        "TB/s" if phase == "decode" else "TFLOP/s",
        {f"group {g}": {kind: _requests(phase, kind, g) for kind in _LENGTHS} for g in GROUP_SIZES},
        tuple((kind, "constant") for kind in _LENGTHS if kind != "constant"),
    )


def shared_prefix(requests, shared_len, own, name):
    """(flat, composed): `requests` decodes over shared_len keys in common and `own` of their own,
    page 16. The flat one reads the same pages request by request."""
    kv_len = (shared_len + own,) * requests
    flat = Case(f"{name}_flat", "shared", (1,) * requests, kv_len, 16, shared_len=shared_len)
    return flat, replace(flat, name=name, num_levels=2, beside=flat.name)


def _composed():
    rows = {}
    for g in GROUP_SIZES:
        for requests in _REQUESTS:
            for prefix in _PREFIXES:
                name = f"s{requests}_{prefix // 1024}k_{_OWN_KEYS}" + ("" if g == 4 else f"_g{g}")
                more = dict(group="paper", num_qo_heads=8 * g, beside=None)
                pair = shared_prefix(requests, prefix, _OWN_KEYS, name)
                in_row = zip(("flat", "composed"), (replace(case, **more) for case in pair))
                rows[f"{requests} x {prefix} shared, group {g}"] = dict(in_row)
    return Figure(
        "Composed formats",
        "shared prefix",
        f"Decodes over a prefix that all requests share and {_OWN_KEYS} keys of their own; bytes "
        "are those of the prefix once. flat: each request reads the same pages; composed: as "
        "compose_radix() decides.",
        "TB/s",
        rows,
        (("composed", "flat"),),
    )


def _loaders(phase):
    decode = phase == "decode"
    name, page = ("d64_4k", 16) if decode else ("p4_4k", 0)
    lengths = (4096,) * (64 if decode else 4)
    case = Case("", "paper", (1,) * 64 if decode else lengths, lengths)
    affine = replace(case, name=f"{name}_ragged" if page else name)
    paged = {n: replace(case, name=f"{name}_page{n}", page_size=n) for n in (16, 1)}
    return Figure(
        f"Loaders, {phase}",
        "loader",
        f"{len(lengths)} x 4096. affine: ragged, TMA; boxes: pages of 16, a TMA box each; gather: "
        "pages of 1, row by row.",
        "TB/s" if decode else "TFLOP/s",
        {phase: dict(affine=affine, boxes=paged[16], gather=paged[1])},
        (("boxes", "affine"), ("gather", "affine")),
    )


def figures():
    """All of them."""
    decode = {"plait": "auto", "Algorithm 1": "lpt", "unsplit": "unsplit"}
    prefill = {"plait": "auto", "unsplit": "unsplit"}
    return [
        _scheduler("decode", decode),
        _scheduler("prefill", prefill),
        _distributions("decode"),
        _distributions("prefill"),
        _composed(),
        _loaders("decode"),
        _loaders("prefill"),
    ]


def cases():
    """The cases of the figures, each once; some are those of other groups under the same name."""
    found = {}
    for figure in figures():
        for in_row in figure.rows.values():
            found |= {case.name: case for case in in_row.values()}
    return list(found.values())


def rows(figure, results):
    """A row a ratio that there is, {case, metric, value, unit}; the metric begins with the
    mechanism."""
    found = []
    for label, in_row in figure.rows.items():
        for pair in figure.judged:
            ratio = figure.ratio(label, pair, results)
            if ratio is not None:
                ours, other = (in_row[series].name for series in pair)
                metric = f"{figure.mechanism}: FLOP/s beside {other}"
                found.append(row(ours, metric, ratio, "x"))
    return found


def lines(figure, results):
    """(columns, a line a row of the figure): us and rate of each series, ratios, peers' rates."""
    peers = list(dict.fromkeys(p for label in figure.rows for p in figure.peers(label, results)))
    columns = [""]
    for series in figure.series:
        columns += [f">{series}", ">"]
    columns += [f">{ours} / {other}" for ours, other in figure.judged]
    columns += [f">{peer}" for peer in peers]
    found = []
    for label, in_row in figure.rows.items():
        line = [label]
        for case in in_row.values():
            result = results.get(case.name)
            us = result.us if result else None
            line += [_text(us, ".2f"), _text(figure.rate(result), ".2f")]
        line += [_text(figure.ratio(label, pair, results), ".3f") for pair in figure.judged]
        of_peers = figure.peers(label, results)
        found.append(line + [_text(of_peers.get(peer), ".2f") for peer in peers])
    return columns, found


def _text(value, form):
    return "" if value is None else format(value, form)
