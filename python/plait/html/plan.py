"""The page of a plan: what its template (plan.html) shows, taken from the plan's arrays and from
the modelled time of every item. Formatting alone: times come from Plan.timeline().
"""

import colorsys
from dataclasses import dataclass

import numpy as np

from plait.html import render

FRAME, BACKGROUND = "#5b5f66", "#f6f4ef"  # of the timeline; nothing else on the page has them
_HUES_A_FAMILY = 6
_ZOOMS = (1, 4, 16)
_EDGED_A_CTA = 64  # with more bars a CTA their edges would hide them


def plan_page(plan) -> str:
    """The page of a plan that has a cost model (Plan.target). Raises as Plan.to_html."""
    return render("plan.html", page=PlanPage(plan))


def colours(num_shapes) -> dict:
    """{name of a bar's class: "#rrggbb"}: a family of hues a shape, partial items lighter."""
    families = [("few", 150, 24), ("many", 0, 12)]  # name, first hue, degrees from hue to hue
    out = {}
    for family, first, step in families[:num_shapes]:
        for i in range(_HUES_A_FAMILY):
            for kind, lightness in (("final", 0.42), ("partial", 0.70)):
                rgb = colorsys.hls_to_rgb((first + step * i) / 360, lightness, 0.62)
                name = f"{family}-{i}-{kind}"
                out[name] = "#" + "".join(f"{round(255 * c):02x}" for c in rgb)
    return out


@dataclass
class Bar:
    """A work item on the timeline."""

    item: int  # index into plan.items
    colour: str  # name, see colours()
    queued: bool
    x: str  # and width: per cent of the makespan
    width: str
    y: int  # pixels
    text: str


@dataclass
class Merge:
    """Query tokens and kv heads whose rows are joined from the same items, in that order."""

    first_token: int
    num_tokens: int
    first_head: int  # of kv heads
    num_heads: int
    part: int  # of the group, where it is larger than a tile
    items: tuple  # indices into plan.items, in merge order
    joined_by: int  # CTA whose part is the last, by the model
    at_us: float


def merges_of(plan, times) -> list:
    """Every merge list of the plan is in exactly one Merge, in order of tokens; tokens that follow
    each other and are joined from the same items are together, as are kv heads.
    """
    if not len(plan.merge_indptr):
        return []
    partial = np.flatnonzero(plan.items["partial_row"] >= 0)
    first_rows = plan.items["partial_row"][partial]
    partial = partial[np.argsort(first_rows)]
    place = np.searchsorted(np.sort(first_rows), plan.merge_sources, side="right")
    items = partial[place - 1].tolist()  # that wrote each source
    indptr = plan.merge_indptr.tolist()
    num_heads, per_head = plan.target["num_kv_heads"], plan.lists_per_head
    per_token = num_heads * per_head

    out, last, of_last = [], None, []
    for token in range(plan.num_tokens):
        first = token * per_token
        ends = indptr[first : first + per_token + 1]
        lists = [tuple(items[begin:end]) for begin, end in zip(ends, ends[1:])]
        if lists == last:
            for merge in of_last:
                merge.num_tokens += 1
            continue
        last, of_last = lists, []
        for part in range(per_head):
            open_merge = None
            for head, parts in enumerate(lists[part::per_head]):
                if open_merge and open_merge.items == parts:
                    open_merge.num_heads += 1
                    continue
                open_merge = None
                if parts:
                    latest = max(parts, key=lambda i: times["end_us"][i])
                    cta, _, end_us = times[latest].item()
                    open_merge = Merge(token, 1, head, 1, part, parts, cta, end_us)
                    of_last.append(open_merge)
        out += of_last
    return out


class PlanPage:
    """What plan.html shows; an attribute is a value of the template."""

    frame, background = FRAME, BACKGROUND

    def __init__(self, plan):
        self._plan, self._times = plan, plan.timeline()
        target = plan.target
        self.colours = colours(len(target["shapes"]))
        self._load_axes()
        self._load_bars()
        self.batch = (
            f"{_count(plan.num_requests, 'request')}, {_count(plan.num_tokens, 'query token')}, "
            f"{_count(plan.total_keys, 'key')}, {_count(target['num_kv_heads'], 'kv head')}"
        )
        if plan.num_levels > 1:
            self.batch += f", {plan.num_levels} levels"
        self.num_queued = len(plan.items) - int(plan.cta_item_indptr[-1])
        self.work = f"{_count(len(plan.items), 'work item')} on {_count(plan.num_ctas, 'CTA')}" + (
            f", {self.num_queued:,} of them in the queue." if self.num_queued else "."
        )
        self.edged = len(plan.items) <= _EDGED_A_CTA * plan.num_ctas
        self._load_legend(target)
        self.candidates = [self._candidate(i, c) for i, c in enumerate(plan.candidates)]
        merges = merges_of(plan, self._times)
        self.merges = [self._merge(merge) for merge in merges]
        lists = int(np.count_nonzero(np.diff(plan.merge_indptr)))
        self.merged = (
            f"{_count(lists, 'merge list')} of query tokens and kv heads, "
            f"{_count(plan.num_partial_rows, 'partial row')}."
        )

    def _load_axes(self):
        plan, times = self._plan, self._times
        ends = np.zeros(plan.num_ctas)
        np.maximum.at(ends, times["cta"], times["end_us"])
        self._span = max(float(ends.max()), 1e-9)
        mean = float(ends.mean())
        self.mean_x = _number(100 * mean / self._span)
        self.balance = (
            f"The busiest CTA ({int(ends.argmax())}) ends at {ends.max():,.2f} us, the mean at "
            f"{mean:,.2f} us: balance {plan.balance:.3f}."
        )
        if idle := int(np.count_nonzero(ends == 0)):
            self.balance += f" {_count(idle, 'CTA')} without work."
        self._pitch = min(max(1100 // plan.num_ctas, 3), 16)
        self.bar_height = self._pitch - 1
        self.height = self._pitch * plan.num_ctas
        every = -(-14 // self._pitch)  # CTAs to a label
        self.cta_labels = [
            (cta, self._pitch * cta + self.bar_height / 2) for cta in range(0, plan.num_ctas, every)
        ]
        self.ticks = {zoom: self._ticks(8 * zoom) for zoom in _ZOOMS}

    def _ticks(self, at_most):
        """(place in per cent, label) of round times, about at_most of them."""
        raw = self._span / at_most
        power = 10.0 ** np.floor(np.log10(raw))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
        return [
            (_number(100 * k * step / self._span), f"{k * step:g} us")
            for k in range(int(0.96 * self._span / step) + 1)  # a label needs room behind its tick
        ]

    def _load_bars(self):
        plan, items = self._plan, self._plan.items
        first_queued = int(plan.cta_item_indptr[-1])
        few = len(plan.target["shapes"]) - 1  # the shape of fewest rows
        x = 100 / self._span * self._times["begin_us"]
        width = 100 / self._span * (self._times["end_us"] - self._times["begin_us"])
        self.bars = []
        for i, (item, cta) in enumerate(zip(items.tolist(), self._times["cta"].tolist())):
            row_block, shape, partial_row = item[0], item[1], item[8]
            family = "few" if shape == few else "many"
            kind = "final" if partial_row < 0 else "partial"
            self.bars.append(
                Bar(
                    i,
                    f"{family}-{row_block % _HUES_A_FAMILY}-{kind}",
                    i >= first_queued,
                    _number(x[i]),
                    _number(width[i]),
                    self._pitch * cta,
                    self._text(i),
                )
            )

    def _load_legend(self, target):
        rows = [shape[0] for shape in target["shapes"]]
        self.legend = []
        for family, tile_q in zip(("few", "many"), reversed(rows)):
            for kind in ("final", "partial"):
                names = [n for n in self.colours if n.startswith(family) and n.endswith(kind)]
                self.legend.append((f"tiles of {tile_q} rows, {kind}", names))

    def _rows(self, i):
        """Rows of q that item i has, in the order of its tokens."""
        plan, item = self._plan, self._plan.items[i]
        group_size = plan.target["group_size"]
        first = plan.row_blocks["first_token"][item["row_block"]]
        begin = first + item["first_row"] // group_size
        end = first + (item["first_row"] + item["num_rows"] - 1) // group_size + 1
        return plan.row_map[begin:end] if len(plan.row_map) else range(begin, end)

    def _keys(self, i):
        """An item's keys, by absolute position."""
        item = self._plan.items[i]
        block = self._plan.row_blocks[item["row_block"]]
        level = f" of level {block['level']}" if self._plan.num_levels > 1 else ""
        begin, end = (int(item[k] + block["kv_pos_begin"]) for k in ("kv_begin", "kv_end"))
        return ("no keys" if begin == end else "keys " + _range(begin, end)) + level

    def _requests(self, rows):
        requests = self._plan.token_request
        first, last = int(requests[rows[0]]), int(requests[rows[-1]])
        if first == last:
            return f"request {first}"
        return f"{len(np.unique(requests[np.asarray(rows)]))} requests, {first} to {last}"

    def _text(self, i):
        item, time = self._plan.items[i], self._times[i]
        rows = self._rows(i)
        tokens = _count(len(rows), "query token") + f" from {rows[0]}"
        head, heads = int(item["kv_head_begin"]), int(item["num_heads"])
        tile_q = self._plan.target["shapes"][item["shape"]][0]
        return (
            f"{self._requests(rows)}, {tokens}\n{_heads(head, head + heads)}\n{self._keys(i)}\n"
            f"{item['num_rows']} rows in a tile of {tile_q}\n"
            f"{'final' if item['partial_row'] < 0 else 'partial'}\n"
            f"CTA {time['cta']}, {time['begin_us']:.2f} to {time['end_us']:.2f} us"
        )

    def _candidate(self, i, c):
        chosen = i == self._plan.chosen
        verdict = "chosen" if chosen else ""
        if not c["fits"]:
            verdict = (
                f"does not fit: {c['num_partial_rows']:,} partial rows, the workspace holds "
                f"{self._plan.target['max_partial_rows']:,}"
            )
        return {
            "chosen": chosen,
            "name": c["name"],
            "chunk": f"{c['chunk']:,}" if c["chunk"] else "–",
            "num_items": f"{c['num_items']:,}" if c["fits"] else "–",
            "partial_rows": f"{c['num_partial_rows']:,}",
            "makespan_us": f"{c['makespan_us']:,.2f}" if c["fits"] else "–",
            "balance": f"{c['balance']:.3f}" if c["fits"] else "–",
            "verdict": verdict,
        }

    def _merge(self, merge):
        tokens = range(merge.first_token, merge.first_token + merge.num_tokens)
        heads = _range(merge.first_head, merge.first_head + merge.num_heads)
        if self._plan.lists_per_head > 1:
            heads += f", part {merge.part} of the group"
        return {
            "tokens": _range(tokens.start, tokens.stop),
            "requests": self._requests(tokens),
            "heads": heads,
            "joined_by": f"CTA {merge.joined_by} at {merge.at_us:.2f} us",
            "parts": [f"CTA {self._times['cta'][i]}: {self._keys(i)}" for i in merge.items],
        }


def _number(value):
    return f"{value:.6g}"


def _count(n, noun):
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _range(begin, end):
    """begin ... end - 1 in words."""
    return f"{begin}" if end - begin == 1 else f"{begin} to {end - 1}"


def _heads(begin, end):
    return f"kv head{'' if end - begin == 1 else 's'} {_range(begin, end)}"
