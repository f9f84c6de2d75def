"""What must hold of every plan, for random batches (hypothesis). The checks read the plan's arrays
as include/plait/plan_data.h defines them and know nothing of how the planner cuts.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import plait
from plait.reference import visible


# --- batches --------------------------------------------------------------------------------------

VISIBILITIES = {
    "full": (lambda: plait.full(), {}),
    "causal": (lambda: plait.causal(), {"causal": True}),
    "window": (lambda: plait.causal() | plait.sliding_window(20), {"causal": True, "window_left": 20}),
    "window_only": (lambda: plait.sliding_window(7), {"window_left": 7}),
    "sinks": (lambda: plait.causal() | plait.sliding_window(33, sink_tokens=3),
              {"causal": True, "window_left": 33, "sink_tokens": 3}),
}


def partial_rows_bound(arguments, num_levels):
    """Two partial tiles a CTA; a composed format adds each row once a level."""
    rows = int(arguments["qo_indptr"][-1]) * arguments["group_size"] * arguments["num_kv_heads"]
    return (2 * arguments["num_ctas"] * max(arguments["tile_q"])
            + (num_levels * rows if num_levels > 1 else 0))


@st.composite
def batches(draw, max_requests=6):
    """make_plan's arguments, and the keys of each request."""
    requests = draw(st.lists(st.tuples(st.integers(0, 20), st.one_of(
        st.integers(0, 8), st.integers(0, 400), st.sampled_from([63, 64, 65, 127, 128, 129]))),
        max_size=max_requests))
    q_lens, kv_lens = [q for q, _ in requests], [kv for _, kv in requests]
    arguments = {
        "qo_indptr": np.cumsum([0, *q_lens]),
        "num_ctas": draw(st.integers(1, 20)),
        "tile_kv": draw(st.sampled_from([16, 64, 128])),
        "tile_q": draw(st.sampled_from([(16,), (64,), (128, 64)])),
        "group_size": draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17, 130])),
        "num_kv_heads": draw(st.integers(1, 3)),
        "scheduler": draw(st.sampled_from(["auto", "lpt", "unsplit", "prefix_sum"])),
        # no cost at all for a part: the more cuts, the better for the test
        "merge_us": draw(st.sampled_from([0.0, 1.0])),
        "queue_percent": draw(st.sampled_from([0, 15, 70])),
        "min_queued_keys": draw(st.sampled_from([0, 100])),
        "min_keys_for_queue": draw(st.sampled_from([0, 300])),
    }
    visibility = draw(st.sampled_from(sorted(VISIBILITIES)))
    num_levels = draw(st.sampled_from([1, 1, 2, 3])) if requests else 1
    if num_levels == 1:
        arguments["kv_len"] = np.array(kv_lens, np.int64)
        return arguments, visibility, kv_lens
    # Levels: on each but the last, requests fall into nodes (or none) and share its keys. A request
    # stands under a node only with others whose keys before it are as many: positions must agree.
    before, levels = [0] * len(requests), []
    for _ in range(num_levels - 1):
        nodes = draw(st.lists(st.integers(0, 2), min_size=len(requests), max_size=len(requests)))
        indptr, members, lens = [0], [], []
        for node in range(2):  # 2: under none
            under = [i for i, n in enumerate(nodes) if n == node]
            under = [i for i in under if before[i] == before[under[0]]]
            if not under:
                continue
            length = draw(st.integers(0, 200))
            members += under
            indptr.append(len(members))
            lens.append(length)
            for i in under:
                before[i] += length
        levels.append(plait.Level(node_indptr=np.array(indptr), node_requests=np.array(members, int),
                                  kv_len=np.array(lens, int), kv_begin=np.zeros(len(lens), int)))
    levels.append(plait.Level(kv_len=np.array(kv_lens, int), kv_begin=np.zeros(len(kv_lens), int)))
    arguments["levels"] = levels
    arguments["max_partial_rows"] = partial_rows_bound(arguments, num_levels)
    return arguments, visibility, [a + b for a, b in zip(before, kv_lens)]


def make(batch):
    arguments, visibility, kv_lens = batch
    plan = plait.make_plan(**arguments, variant=VISIBILITIES[visibility][0]())
    return plan, kv_lens, arguments, VISIBILITIES[visibility][1]


# --- what a plan says, spelled out ----------------------------------------------------------------

def rows_of(plan, item, group_size):
    """(row of q, head in the group) of each packed row of an item."""
    block = plan.row_blocks[item["row_block"]]
    packed = np.arange(item["first_row"], item["first_row"] + item["num_rows"])
    token = packed // group_size
    assert (token < block["num_tokens"]).all(), "an item has rows beyond its block"
    token = token + block["first_token"]
    return (plan.row_map[token] if len(plan.row_map) else token), packed % group_size


def check_coverage(plan, kv_lens, arguments, seen_by):
    """Every (row, visible key) is in exactly one item; no (row, key) is in two."""
    group, heads = arguments["group_size"], arguments["num_kv_heads"]
    q_lens = np.diff(arguments["qo_indptr"])
    tokens = int(arguments["qo_indptr"][-1])
    cover = np.zeros((tokens, heads, group, max([1, *kv_lens])), np.int8)
    items_of = np.zeros((tokens, heads, group), int)
    for item in plan.items:
        block = plan.row_blocks[item["row_block"]]
        rows, in_group = rows_of(plan, item, group)
        assert 0 <= item["kv_begin"] <= item["kv_end"] <= block["kv_len"]
        assert item["kv_begin"] % arguments["tile_kv"] == 0
        assert item["num_heads"] >= 1 and item["kv_head_begin"] + item["num_heads"] <= heads
        assert 1 <= item["num_rows"] <= arguments["tile_q"][item["shape"]]
        positions = plan.token_position[rows]
        assert item["min_position"] == positions.min()
        assert item["max_position"] == positions.max()
        keys = slice(block["kv_pos_begin"] + item["kv_begin"], block["kv_pos_begin"] + item["kv_end"])
        for h in range(item["kv_head_begin"], item["kv_head_begin"] + item["num_heads"]):
            cover[rows, h, in_group, keys] += 1
            items_of[rows, h, in_group] += 1
    assert (items_of >= 1).all(), f"no item holds row {np.argwhere(items_of == 0)[0]}"
    row = 0
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        q_pos = np.arange(q_len) + kv_len - q_len
        assert (plan.token_request[row:row + q_len] == i).all()
        assert (plan.token_position[row:row + q_len] == q_pos).all()
        seen = visible(q_pos[:, None], np.arange(kv_len)[None, :], **seen_by)[:, None, None]
        times = cover[row:row + q_len]
        wrong = (seen & (times[..., :kv_len] != 1)) | (times[..., :kv_len] > 1)
        assert not wrong.any(), f"request {i}: (token, kv head, head in group, key) " \
            f"{np.argwhere(wrong)[0]} is in {times[..., :kv_len][wrong][0]} items"
        assert not times[..., kv_len:].any(), f"request {i}: keys beyond its end are planned"
        row += q_len


def check_order(plan):
    """CTAs partition the items, but for those of the queue behind them."""
    assert len(plan.cta_item_indptr) == plan.num_ctas + 1
    assert plan.cta_item_indptr[0] == 0 and plan.cta_item_indptr[-1] <= len(plan.items)
    assert (np.diff(plan.cta_item_indptr) >= 0).all()


def check_tiles(plan, group_size, tile_q):
    """Whole tokens in a tile, but where a group is larger than every tile."""
    for item in plan.items:
        if group_size <= tile_q[item["shape"]]:
            assert item["first_row"] % group_size == 0 and item["num_rows"] % group_size == 0


def check_merges(plan, arguments):
    """A row is final in one item, or its parts are exactly those of its merge list, in key
    order."""
    group = arguments["group_size"]
    tokens = int(arguments["qo_indptr"][-1])
    parts = {}
    owner = np.full(plan.num_partial_rows, -1)
    for n, item in enumerate(plan.items):
        rows, in_group = rows_of(plan, item, group)
        block = plan.row_blocks[item["row_block"]]
        for h in range(item["kv_head_begin"], item["kv_head_begin"] + item["num_heads"]):
            for r, (row, g) in enumerate(zip(rows, in_group)):
                place = -1
                if item["partial_row"] >= 0:
                    place = int(item["partial_row"]
                                + (h - item["kv_head_begin"]) * item["num_rows"] + r)
                    assert place < plan.num_partial_rows, "a partial row lies beyond the workspace"
                    assert owner[place] < 0, f"partial row {place} has two owners"
                    owner[place] = n
                parts.setdefault((int(row), h, int(g)), []).append(
                    (int(block["level"]), int(item["kv_begin"]), place))
    listed = {}
    if len(plan.merge_indptr):
        tile_q, heads = arguments["tile_q"][0], arguments["num_kv_heads"]
        per_head = -(-group // tile_q)
        assert plan.lists_per_head == per_head
        assert len(plan.merge_indptr) == tokens * heads * per_head + 1
        assert plan.merge_indptr[-1] == len(plan.merge_sources)
        for i, (row, h, part) in enumerate(np.ndindex(tokens, heads, per_head)):
            sources = plan.merge_sources[plan.merge_indptr[i]:plan.merge_indptr[i + 1]]
            for g in range(part * tile_q, min((part + 1) * tile_q, group)):
                if len(sources):
                    listed[(row, h, g)] = [int(s) + g - part * tile_q for s in sources]
    for key, found in parts.items():
        assert len(found) > 0
        if any(place < 0 for _, _, place in found):
            assert len(found) == 1, f"row {key} is final in an item and in others too"
            assert key not in listed, f"row {key} is final and has a merge list"
        else:
            assert listed.get(key) == [p for _, _, p in sorted(found)], f"merge list of row {key}"
    assert set(listed) <= set(parts), "a merge list for a row that no item has"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_every_visible_key_once(batch):
    plan, kv_lens, arguments, seen_by = make(batch)
    check_order(plan)
    check_tiles(plan, arguments["group_size"], arguments["tile_q"])
    check_coverage(plan, kv_lens, arguments, seen_by)
    check_merges(plan, arguments)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_equal_input_equal_plan(batch):
    arguments, visibility, _ = batch
    a, b = make(batch)[0], make(batch)[0]
    assert a == b and a.to_json() == b.to_json()
    assume(len(a.items) > 1)
    arguments = dict(arguments, num_ctas=arguments["num_ctas"] + 1)
    assert make((arguments, visibility, []))[0] != a  # == can say no


@settings(max_examples=100, deadline=None)
@given(batches(max_requests=20))
def test_workspace_bound(batch):
    plan, _, arguments, _ = make(batch)
    assert plan.num_partial_rows <= partial_rows_bound(arguments, plan.num_levels)
    assert plan.balance >= 1 - 1e-5  # busiest / mean


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 300))
def test_small_workspace_is_kept_to(batch, rows):
    """Cuts that need more partial rows than there are, are dropped."""
    arguments, visibility, _ = batch
    assume("levels" not in arguments)  # levels of a row must be merged: they need theirs
    assume(arguments["scheduler"] != "prefix_sum")  # forced, and has no other way
    arguments = dict(arguments, max_partial_rows=rows)
    plan, kv_lens, arguments, seen_by = make((arguments, visibility, list(arguments["kv_len"])))
    assert plan.num_partial_rows <= rows
    check_coverage(plan, kv_lens, arguments, seen_by)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_json_round_trip(batch):
    plan = make(batch)[0]
    again = plait.Plan.from_json(plan.to_json())
    assert again == plan
    for name in ("row_blocks", "items", "cta_item_indptr", "token_request", "token_position",
                 "row_map", "merge_indptr", "merge_sources"):
        assert np.array_equal(getattr(again, name), getattr(plan, name)), name


def test_long_decodes_have_a_queue():
    plan = plait.make_plan(np.arange(65), np.full(64, 4096), group_size=4, num_kv_heads=8,
                           num_ctas=132, variant=plait.causal())
    queued = plan.items[plan.cta_item_indptr[-1]:]
    assert len(queued) > 132 and (queued["kv_end"] == 4096).any()
    assert "in the queue" in str(plan)
    assert plait.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("b", [1, 2, 3, 7, 8, 16, 33, 64])
def test_balance_of_equal_requests(b):
    """b requests of 4096 keys, 8 kv heads, 132 CTAs: the bar is 1.08."""
    plan = plait.make_plan(np.arange(b + 1), np.full(b, 4096), group_size=4, num_kv_heads=8,
                           num_ctas=132, variant=plait.causal())
    assert plan.balance <= 1.08
    assert plan.num_partial_rows <= 2 * 132 * 64


def test_one_long_request_is_split_over_all_ctas():
    plan = plait.make_plan([0, 1], [1 << 20], group_size=8, num_kv_heads=1, num_ctas=16)
    assert (np.diff(plan.cta_item_indptr) > 0).all() and len(plan.merge_indptr) == 2


def test_heads_do_not_multiply_the_partials():
    plans = [plait.make_plan([0, 1], [100000], group_size=1, num_kv_heads=heads, num_ctas=16,
                             queue_percent=0)
             for heads in (1, 8, 64, 512)]
    for plan in plans:
        assert plan.num_partial_rows <= 2 * 16 * 64
        assert len(plan.items) <= 3 * 16
    assert plans[-1].balance <= 1.1


def test_plan_prints_itself():
    text = str(plait.make_plan([0, 1, 4], [5000, 70], group_size=4, num_kv_heads=2, num_ctas=8,
                               queue_percent=0))
    for word in ("equal_shares", "algorithm_1", "balance"):
        assert word in text, text
    assert len(text.splitlines()) <= 25


@pytest.mark.parametrize(
    "bad",
    [
        {"qo_indptr": [0, 1.5]},
        {"qo_indptr": [[0, 1]]},
        {"qo_indptr": []},
        {"qo_indptr": [0, 2**40]},
        {"num_ctas": 2**24},
        {"num_ctas": 2**40},
        {"key_split": [4]},
        {"key_split": [0]},
        {"key_split": [1, 2]},
        {"fixed_us": [float("nan")]},
        {"fixed_us": [-1.0]},
        {"us_per_key": [float("inf")]},
        {"us_per_key": [-0.001]},
        {"us_per_key": [1e30]},
        {"merge_us": -2},
        {"merge_us": float("inf")},
        {"max_partial_rows": -1},
    ],
)
def test_plan_refuses_by_name(bad):
    good = {"qo_indptr": [0, 1], "kv_len": [5000], "group_size": 4, "num_kv_heads": 2}
    with pytest.raises(ValueError, match=next(iter(bad))):
        plait.make_plan(**(good | bad))


@pytest.mark.parametrize(
    "bad",
    [
        {"tile_q": (64.5,)},
        {"tile_q": "64"},
        {"key_split": [1.0]},
        {"merge_us": "fast"},
        {"group_size": 4.0},
        {"kv": "ragged"},
        {"variant": "causal"},
        {"scheduler": None},
    ],
)
def test_plan_refuses_types_by_name(bad):
    good = {"qo_indptr": [0, 1], "kv_len": [5000], "group_size": 4, "num_kv_heads": 2}
    name = next(iter(bad))
    with pytest.raises(TypeError, match=rf"^make_plan: {name}.* is .*; taken is [^\n]*$"):
        plait.make_plan(**(good | bad))
