"""The page of `plait bench paper`: what its template (paper.html) shows, taken from the figures of
plait.bench.paper and their results."""

from dataclasses import dataclass

from plait.bench import paper
from plait.html import render

COLOURS = ("#2f6f4f", "#b5651d", "#4a6fa5")  # of the series, in order; peers are grey
PEER, BACKGROUND = "#9a9a9a", "#f6f4ef"
_WIDTH, _BAR, _LABEL, _GAP = 620, 13, 210, 8  # pixels


def paper_page(figures, run, gpu_name) -> str:
    """run: what plait.bench.supervise.measure() returned. Raises RuntimeError without Jinja2."""
    shown = [_Shown(figure, run) for figure in figures]
    shown = [figure for figure in shown if figure.bars]
    return render(
        "paper.html", gpu_name=gpu_name, figures=shown, label=_LABEL, background=BACKGROUND
    )


@dataclass
class Bar:
    colour: str
    y: int
    width: str
    value: str
    text: str


class _Shown:
    """A figure as its template takes it: bars of what was measured, a line where the ceiling is."""

    def __init__(self, figure, run):
        self.title, self.about, self.unit = figure.title, figure.about, figure.unit
        self.judged = ", ".join(f"{ours} against {other}" for ours, other in figure.judged)
        self.columns, self.lines = paper.lines(figure, run.results)
        self.bars, self.labels, y = [], [], 4
        rated = [(label, self._rated(figure, label, run)) for label in figure.rows]
        rated = [(label, bars) for label, bars in rated if bars]
        top = run.top["read" if figure.unit == "TB/s" else "gemm"] if run.top else "unknown"
        top = None if isinstance(top, str) else top / 1e12
        most = max([rate for _, bars in rated for _, _, rate in bars] + [top or 0], default=0)
        peers = [name for _, bars in rated for name, colour, _ in bars if colour == PEER]
        self.legend = [*zip(figure.series, COLOURS), *((p, PEER) for p in dict.fromkeys(peers))]
        for label, bars in rated:
            self.labels.append((label, y + _BAR * len(bars) / 2))
            for name, colour, rate in bars:
                text = f"{label}\n{name}: {rate:.3g} {figure.unit}"
                self.bars.append(Bar(colour, y, f"{_WIDTH * rate / most:.1f}", f"{rate:.3g}", text))
                y += _BAR
            y += _GAP
        self.height, self.width, self.bar_height = y, _LABEL + _WIDTH + 60, _BAR - 1
        self.ceiling = None if top is None or not most else f"{_LABEL + _WIDTH * top / most:.1f}"

    @staticmethod
    def _rated(figure, label, run):
        """(name, colour, rate) of each series and peer that has one."""
        series = zip(figure.rows[label].items(), COLOURS)
        rated = [(name, c, figure.rate(run.results.get(case.name))) for (name, case), c in series]
        rated += [(p, PEER, rate) for p, rate in figure.peers(label, run.results).items()]
        return [bar for bar in rated if bar[2] is not None]
