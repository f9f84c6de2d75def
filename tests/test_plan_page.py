"""The page of a plan (`plait plan --html`): what it says is the plan, and a browser draws it."""

import re
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import plait
from browser import picture, rgb
from plait.html.plan import BACKGROUND, FRAME, PlanPage, colours, merges_of


def make(q_lens, kv_lens, group_size=4, num_kv_heads=8, **options):
    return plait.make_plan(np.cumsum([0, *q_lens]), np.array(kv_lens, int), group_size=group_size,
                           num_kv_heads=num_kv_heads, variant=plait.causal(), **options)


def shared_prefix():
    """Two levels: 5 requests share 3000 keys, tokens of one node are no neighbours."""
    levels = [plait.Level(node_indptr=np.array([0, 3, 5]), node_requests=np.array([0, 2, 4, 1, 3]),
                          kv_len=np.array([3000, 700]), kv_begin=np.zeros(2, int)),
              plait.Level(kv_len=np.array([65, 900, 0, 1, 17]), kv_begin=np.zeros(5, int))]
    return plait.make_plan(range(6), group_size=4, num_kv_heads=3, num_ctas=7, levels=levels,
                           merge_us=0.1, max_partial_rows=4096)


PLANS = {
    "decode": lambda: make([1] * 6, [4096, 1000, 0, 9000, 20000, 17], num_ctas=24, tile_kv=128),
    "mixed": lambda: make([300, 1, 1, 1, 0], [300, 8000, 997, 30000, 5], num_ctas=20,
                          tile_q=(128, 64)),
    "queue": lambda: make([1] * 12, [997 * i % 8000 + 500 for i in range(12)], num_ctas=5,
                          min_keys_for_queue=1000, queue_percent=20),
    "drafts": lambda: make([19, 3], [20000, 1000], num_ctas=24),
    "split_group": lambda: make([1, 2], [5000, 400], group_size=130, num_kv_heads=2, num_ctas=9),
    "levels": shared_prefix,
    "fewer_items_than_ctas": lambda: make([1], [1], num_ctas=3),
    "empty": lambda: make([], []),
}  # fmt: skip


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]()


def item_us(plan, item):
    """By the cost model, whose numbers are float32; PLANS have no window, so all keys count."""
    _, _, fixed_us, us_per_key = plan.target["shapes"][item["shape"]]
    keys = int(item["kv_end"] - item["kv_begin"])
    if keys == 0:
        return fixed_us
    merge_us = plan.target["merge_us"] if item["partial_row"] >= 0 else 0
    return int(item["num_heads"]) * (fixed_us + keys * us_per_key + merge_us)


def test_bars_fill_each_cta_up_to_the_makespan(plan):
    times, end = plan.timeline(), np.zeros(plan.num_ctas)
    assert len(times) == len(plan.items)
    for i, (item, time) in enumerate(zip(plan.items, times)):  # queued ones are last, as drawn
        assert time["begin_us"] == end[time["cta"]]
        assert time["end_us"] - time["begin_us"] == pytest.approx(item_us(plan, item), rel=1e-4)
        queued = i >= plan.cta_item_indptr[-1]
        assert queued or i in range(*plan.cta_item_indptr[time["cta"]:][:2])
        assert not queued or time["begin_us"] == end.min()
        end[time["cta"]] = time["end_us"]
    chosen = plan.candidates[plan.chosen]
    assert np.float32(end.max()) == np.float32(chosen["makespan_us"])
    if len(times):
        assert end.max() / end.mean() == pytest.approx(plan.balance, rel=1e-5)


def test_plans_are_what_their_names_say():
    plans = {name: make() for name, make in PLANS.items()}
    assert all(p.num_partial_rows for n, p in plans.items() if n not in ("fewer_items_than_ctas", "empty"))
    assert len(plans["queue"].items) > plans["queue"].cta_item_indptr[-1]
    assert set(plans["mixed"].items["shape"]) == {0, 1}
    assert len(plans["levels"].row_map) and plans["levels"].num_levels == 2


def test_default_costs_are_those_shipped():
    text = (Path(__file__).parent.parent / "src/cuda/cost_model.h").read_text()
    shipped = re.search(r"kSm90MixedCost\{\{(.*?)f, (.*?)f\}, \{(.*?)f, (.*?)f\}, (.*?)f,", text)
    fixed_0, fixed_1, key_0, key_1, merge = map(float, shipped.groups())
    target = PLANS["mixed"]().target
    assert target["shapes"] == [pytest.approx((128, 1, fixed_0, key_0)), pytest.approx((64, 2, fixed_1, key_1))]
    assert target["merge_us"] == pytest.approx(merge)


def test_merge_list_is_the_plans(plan):
    """Each list, of (token, kv head, part of the group), is in one Merge, with the items that wrote
    its partial rows in the list's order; it is joined when the last of them ends."""
    wanted, got, times = {}, {}, plan.timeline()
    places = np.ndindex(plan.num_tokens, plan.target["num_kv_heads"], plan.lists_per_head)
    for place, begin, end in zip(places, plan.merge_indptr, plan.merge_indptr[1:]):
        if begin < end:
            wanted[place] = [i for row in plan.merge_sources[begin:end] for i, item in enumerate(plan.items)
                             if 0 <= item["partial_row"] <= row < item["partial_row"]
                             + item["num_heads"] * item["num_rows"]]
    for merge in merges_of(plan, times):
        assert merge.at_us == max(times["end_us"][i] for i in merge.items)
        assert merge.joined_by in [times["cta"][i] for i in merge.items
                                   if times["end_us"][i] == merge.at_us]
        for token in range(merge.first_token, merge.first_token + merge.num_tokens):
            for head in range(merge.first_head, merge.first_head + merge.num_heads):
                assert (token, head, merge.part) not in got
                got[token, head, merge.part] = list(merge.items)
    assert got == wanted


class Elements(HTMLParser):
    """Every element of a page: self.all[tag] is a list of its attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.all, self._open = defaultdict(list), []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.all[tag].append({**dict(attributes), "text": ""})
        self._open.append(self.all[tag][-1])

    def handle_data(self, text):
        if self._open:
            self._open[-1]["text"] += text

    def handle_endtag(self, tag):
        pass


def test_page_has_a_bar_an_item_and_needs_nothing_else(plan):
    page = plan.to_html()
    assert not re.search(r"<script|<link|<img|\bsrc=|href=|url\(|@import|https?:", page)
    elements = Elements(page)
    bars, titles = elements.all["rect"], elements.all["title"][1:]  # the first is the page's
    assert len(bars) == len(titles) == len(plan.items)
    times = plan.timeline()
    names = colours(len(plan.target["shapes"]))
    for item, time, bar, title in zip(plan.items, times, bars, titles):
        kind = "final" if item["partial_row"] < 0 else "partial"
        assert bar["class"].split()[0] in names and kind in bar["class"].split()[0]
        assert kind in title["text"].split("\n") and f"CTA {time['cta']}, " in title["text"]
        begin, width = (float(bar[k].removesuffix("%")) for k in ("x", "width"))
        assert begin == pytest.approx(100 * time["begin_us"] / max(times["end_us"]), abs=1e-3)
        assert begin + width <= 100.001
        if item["kv_begin"] == item["kv_end"]:
            assert "no keys" in title["text"]
    starred = [row for row in elements.all["tr"] if row.get("class") == "chosen"]
    assert len(starred) == 1


def test_bar_says_request_heads_and_keys():
    plan = make([3, 1], [500, 9], num_kv_heads=2, num_ctas=1, scheduler="unsplit")
    first, second = sorted(PlanPage(plan).bars, key=lambda bar: bar.text)[:2]
    assert first.text.startswith("request 0, 3 query tokens from 0\nkv head 0\nkeys 0 to 499\n12 rows")
    text = [bar.text for bar in PlanPage(plan).bars if "request 1" in bar.text][0]
    assert text.startswith("request 1, 1 query token from 3\nkv head") and "\nkeys 0 to 8\n" in text


def test_levels_give_absolute_keys_and_requests():
    texts = [bar.text for bar in PlanPage(shared_prefix()).bars]
    assert any(t.startswith("3 requests, 0 to 4, 3 query tokens from 0\n") for t in texts)
    assert any("keys 700 to 1599 of level 1" in t for t in texts)  # 900 behind the 700 of request 1


def test_candidate_that_does_not_fit_says_why():
    page = PlanPage(make([1] * 3, [5000] * 3, num_ctas=16, max_partial_rows=3))
    dropped = [row for row in page.candidates if row["verdict"].startswith("does not fit")]
    assert dropped and all(row["verdict"].endswith("the workspace holds 3") for row in dropped)
    assert [row["name"] for row in page.candidates if row["chosen"]] == ["unsplit"]


def test_thousands_of_items_stay_a_small_page():
    plan = big_plan()
    assert len(plan.items) > 5000
    assert len(plan.to_html()) < 400 * len(plan.items)


def test_plan_of_an_attention_has_its_cost_model(device, kernel):
    attention = plait.Attention(num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype="float16",
                                device=device, kernel=kernel,
                                bounds=plait.Bounds(requests=2, query_tokens=8, keys=4096))
    plan = attention.plan(qo_indptr=np.array([0, 1, 5]), kv_indptr=np.array([0, 3000, 3100]))
    assert plan.target["num_ctas"] == attention.num_ctas and plan.target["group_size"] == 4
    ends = plan.timeline()["end_us"]
    assert np.float32(max(ends)) == np.float32(plan.candidates[plan.chosen]["makespan_us"])
    assert plan.to_html() == attention.current_plan.to_html()


def test_refusals(monkeypatch):
    plan = PLANS["decode"]()
    with pytest.raises(ValueError, match="this plan has no cost model"):
        plait.Plan.from_json(plan.to_json()).to_html()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RuntimeError, match=r"needs Jinja2, .*pip install 'plait\[html\]'"):
        plan.to_html()


# --- in a browser ---------------------------------------------------------------------------------


def big_plan():
    lens = [int(600 * (1 + i * 7919 % 4096 / 4096) ** 4) for i in range(4096)]
    return make([1] * 4096, lens, num_ctas=264)


@pytest.mark.parametrize("which", ["mixed", "big"])
def test_browser_draws_every_bar_where_it_belongs(which, tmp_path):
    plan = big_plan() if which == "big" else PLANS[which]()
    page = PlanPage(plan)
    pixels = picture(plan.to_html(), tmp_path, page.height + 300)
    # The timeline's area is within its frame, the only thing of that colour.
    y, x = np.nonzero((pixels == rgb(FRAME)).all(axis=2))
    assert len(y) > 2 * 1200, "no timeline in the picture"
    area = pixels[y.min() + 1 : y.max(), x.min() + 1 : x.max()]
    assert area.shape[1] > 1200 and abs(area.shape[0] - page.height - 20) <= 1, area.shape
    seen = missed = 0
    for bar in page.bars:
        begin, width = float(bar.x) / 100, float(bar.width) / 100
        if width * area.shape[1] < 4:
            continue  # of such bars edges may be all that is seen
        place = (bar.y + page.bar_height // 2, int((begin + width / 2) * area.shape[1]))
        seen += 1
        missed += list(area[place]) != rgb(page.colours[bar.colour])
    assert seen > len(page.bars) / 3
    assert missed <= seen / 100, f"{missed} of {seen} bars are not there"  # the mean's line hides a few
    # A CTA that has nothing left shows the background.
    times = plan.timeline()
    ends = np.zeros(plan.num_ctas)
    np.maximum.at(ends, times["cta"], times["end_us"])
    first = ends.argmin()
    begin = int(ends[first] / ends.max() * area.shape[1]) + 2
    row = area[page.height // plan.num_ctas * first + page.bar_height // 2, begin:]
    if len(row) > 4:
        assert (row == rgb(BACKGROUND)).all(axis=1).any()
