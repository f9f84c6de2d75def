"""compose_radix: levels from a radix tree or from block hashes mean the same as the flat lists, for
every variant that knows positions; what is shared is what saves most; what is read once is read
from one place; and malformed trees are refused by name.
"""

import json

import numpy as np
import pytest

import plait
from harness import (FORMATS, Built, Buffer, Case, Format, compare, compare_with_reference, device_of,
                     execute, place_lists)
from plait import reference
from test_errors import refused
from variants import VARIANTS


# --- trees ----------------------------------------------------------------------------------------

class Tree:
    """A radix tree with the keys of every node: parent, kv_len [nodes], request_node, q_len [n]."""

    def __init__(self, parent, kv_len, request_node, q_len):
        self.parent, self.kv_len = list(parent), list(kv_len)
        self.request_node, self.q_len = list(request_node), list(q_len)

    def path(self, request):
        """Nodes of a request, from the root down."""
        node, path = self.request_node[request], []
        while node >= 0:
            path.append(node)
            node = self.parent[node]
        return path[::-1]

    @property
    def lengths(self):
        return [(q, sum(self.kv_len[node] for node in self.path(r)))
                for r, q in enumerate(self.q_len)]


def random_tree(rng, depth, num_requests, page_size=16, most_pages=6, most_q=1):
    """Requests anywhere under a tree `depth` nodes deep, in no order; most have a node of their
    own, which may be empty; some end where others go on, some are equal, one has no keys."""
    parent, level = [], [[-1]]
    for _ in range(depth):
        level.append([])
        for above in level[-2]:
            for _ in range(1 + int(rng.integers(2) if above >= 0 else 0)):
                level[-1].append(len(parent))
                parent.append(above)
    kv_len = [page_size * int(n) for n in rng.integers(1, most_pages + 1, len(parent))]
    kv_len[0] = page_size * most_pages  # at the root, over all: pays on every device
    inner, request_node = len(parent), []
    for _ in range(num_requests):
        node = int(rng.choice(level[-1] if rng.random() < 0.7 else np.arange(inner)))
        if rng.random() < 0.75:
            parent.append(node)
            kv_len.append(int(rng.choice([0, 1, 3, page_size, 37])))
            node = len(parent) - 1
        request_node.append(node)
    request_node[-1] = request_node[0]  # two of them are equal
    request_node.insert(int(rng.integers(num_requests)), -1)
    order = rng.permutation(len(parent))  # of nodes, too: parents need not come first
    place = np.argsort(order)
    moved = [-1 if p < 0 else int(place[p]) for p in parent]
    return Tree([moved[i] for i in order], [kv_len[i] for i in order],
                [-1 if n < 0 else int(place[n]) for n in request_node],
                rng.integers(0 if most_q > 1 else 1, most_q + 1, num_requests + 1).tolist())


def build(tree, format, variant, device_name, kernel="auto", dtype="float32", num_levels=4, group_size=4,
          seed=0, flat=False, invariant=False, **compose):
    """The tree's batch with an Attention of composed or of flat format, as the harness runs it."""
    device, rng = device_of(device_name), np.random.default_rng(seed)
    format = FORMATS[format] if isinstance(format, str) else format
    heads_kv, dim, total = 2, 64, sum(tree.q_len)

    def values(n, heads, scale=1.0):
        return reference.to_storage(scale * rng.standard_normal((n, heads, dim)), dtype)

    nodes_k, nodes_v = ([values(n, heads_kv) for n in tree.kv_len] for _ in range(2))
    keys = place_lists(format, [nodes_k], [nodes_v], heads_kv, dim, dim, dtype, device, rng)
    request_keys = [[np.concatenate([np.empty((0, heads_kv, dim)),
                                     *(reference.from_storage(x[n], dtype) for n in tree.path(r))])
                     for x in (nodes_k, nodes_v)] for r in range(len(tree.q_len))]
    q = Buffer((total, heads_kv * group_size, dim), dtype, np.nan)
    q.host[:] = values(total, heads_kv * group_size, 1.5)
    out = Buffer(q.shape, dtype, 7.0)
    lse = Buffer(q.shape[:2], "float32", 7.0)
    for buffer in (q, out, lse, keys.k, keys.v):
        if buffer is not None:
            buffer.upload(device)
    variant = VARIANTS[variant]
    kv = (plait.RaggedKv() if format.page_size == 0
          else plait.PagedKv(format.page_size, layout=format.layout))
    lengths = tree.lengths
    attention = plait.Attention(
        num_qo_heads=heads_kv * group_size, num_kv_heads=heads_kv, head_dim=dim, dtype=dtype,
        kv=kv if flat else plait.ComposedKv(kv, num_levels), device=device.name, kernel=kernel,
        variant=variant.make(), invariant=invariant,
        bounds=plait.Bounds(requests=max(len(lengths), 1), query_tokens=max(total, 1),
                            keys=max([1, *(n for _, n in lengths)])))
    plan_args = {"qo_indptr": np.cumsum([0, *tree.q_len], dtype=np.int32)}
    if flat:
        plan_args |= flat_table(tree, keys.levels[0], format.page_size)
    else:
        plan_args["levels"] = plait.compose_radix(
            attention, **plan_args, node_parent=np.array(tree.parent, np.int32),
            request_node=np.array(tree.request_node, np.int64), **keys.levels[0], **compose)
    case = Case(lengths=tuple(lengths), dtype=dtype, head_dim_qk=dim, num_kv_heads=heads_kv,
                group_size=group_size)
    args = {name: device.put(x) for name, x in variant.arguments(heads_kv * group_size, dim).items()}
    return Built(case, device, attention, plan_args, q, keys, request_keys, variant, args, out, lse)


def pages_of(table, node, kv_len, page_size):
    count = -(-kv_len // page_size)
    if "block_table" in table:
        return table["block_table"][node, :count]
    begin = table["kv_page_indptr"][node]
    return table["kv_page_indices"][begin:begin + count]


def flat_table(tree, table, page_size):
    """CSR tables of the requests: the pages of their nodes, one after the other."""
    pages = [np.concatenate([np.empty(0, np.int64),
                             *(pages_of(table, n, tree.kv_len[n], page_size) for n in tree.path(r))])
             for r in range(len(tree.q_len))]
    return {"kv_page_indptr": np.cumsum([0, *map(len, pages)]),
            "kv_page_indices": np.concatenate([np.empty(0, np.int64), *pages]).astype(np.int64),
            "kv_len": np.array([n for _, n in tree.lengths])}


# Ragged nodes in the order of their numbers: a node's first child may follow it, the others never.
RAGGED = Format("indptr")
CUT_PAGES = Format("block_table", 16)  # every node ends inside a page
CASES = [  # variant, depth, format, most query tokens; the last two cannot be flattened
    ("causal", 1, "csr_p16", 1), ("causal", 2, "padded_p16", 2), ("causal", 3, "csr_p1", 1),
    ("causal", 4, "csr_p3_joint", 3), ("window17", 2, "csr_p16", 1),
    ("window17", 3, "padded_p3_hnd_joint", 4), ("window_sinks", 1, "csr_p16", 3),
    ("window_sinks", 4, "csr_p1", 1), ("alibi", 2, "csr_p16", 3), ("rope", 3, "csr_p16", 2),
    ("causal_soft_cap", 3, "csr_p16", 3), ("full", 4, "csr_p16", 1), ("causal", 2, RAGGED, 3),
    ("window_sinks", 3, RAGGED, 2), ("window_sinks", 3, CUT_PAGES, 2), ("window17", 2, CUT_PAGES, 1),
    ("rope", 2, CUT_PAGES, 2), ("alibi", 4, CUT_PAGES, 1),
]


@pytest.mark.parametrize("variant, depth, format, most_q", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_composed_is_the_flat_batch(variant, depth, format, most_q, dtype, device, kernel):
    """Out and LSE against the reference and against flat lists of the same pages."""
    case = CASES.index((variant, depth, format, most_q))
    rng = np.random.default_rng(case)
    unjoinable = format in (RAGGED, CUT_PAGES)
    page = {RAGGED: 1, CUT_PAGES: 16}.get(format) or FORMATS[format].page_size
    tree = random_tree(rng, depth, 14, page, max(600 // page, 2), most_q)
    group = 4 if most_q == 1 else 1  # few rows, which pay on every device
    if format is RAGGED:
        tree = in_order(tree)
    if format is CUT_PAGES:
        tree.kv_len = [n + 1 for n in tree.kv_len]
    args = (tree, format, variant, device, kernel, dtype)
    built = build(*args, num_levels=depth + 1 + unjoinable, seed=case, group_size=group)
    plan, out, lse = execute(built)
    compare_with_reference(built, out, lse)
    if unjoinable or "window" not in variant or device == "cpu":
        assert (plan.nodes["level"] >= 0).any(), "the case is there for shared nodes, and has none"
    if "window" not in variant:
        check_explained(plan, group)
    if unjoinable:
        return  # no list holds a request's keys
    _, flat_out, flat_lse = execute(build(*args, seed=case, group_size=group, flat=True))
    out, flat_out = (reference.from_storage(x, dtype) for x in (out, flat_out))
    compare("out", out, flat_out, 3e-2 if dtype == "bfloat16" else 2e-5)
    compare("lse", lse, flat_lse, 1e-4)


@pytest.mark.parametrize("variant", ["causal", "causal_soft_cap", "alibi"])
def test_invariant_composed_has_the_bits_of_flat(variant, device, kernel):
    """Prefixes of no whole number of chunks, over decodes and short extends, at two depths."""
    keys = [1600, 560, 48, *[35] * 12]  # to 1600, to 2160 and to 1648, and those of requests
    parent = [-1, 0, 0, *[1, 1, 1, 2, 0, 1, 2, 1, 0, 1, 1, 1]]
    tree = Tree(parent, keys, list(range(3, 15)), [1, 2, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1])
    args = (tree, "csr_p16", variant, device, kernel, "bfloat16")
    built = build(*args, num_levels=3, invariant=512)
    plan, out, lse = execute(built)
    compare_with_reference(built, out, lse)
    shared = plan.nodes[plan.nodes["level"] >= 0]
    assert shared.size and (shared["keys_shared"] % 512 == 0).all()
    _, flat_out, flat_lse = execute(build(*args, invariant=512, flat=True))
    np.testing.assert_array_equal(out.view(np.uint16), flat_out.view(np.uint16))
    np.testing.assert_array_equal(lse.view(np.uint32), flat_lse.view(np.uint32))


def check_explained(plan, group_size):
    """The nodes are the row blocks of the plan, and their tiles its items'."""
    for level in range(plan.num_levels - 1):
        blocks = np.flatnonzero((plan.row_blocks["level"] == level) & (plan.row_blocks["kv_len"] > 0))
        nodes = plan.nodes[plan.nodes["level"] == level]
        assert len(blocks) == len(nodes)
        for b, node in zip(blocks, nodes):
            items = plan.items[plan.items["row_block"] == b]
            assert node["keys_shared"] == plan.row_blocks["kv_len"][b]
            assert node["num_rows"] == plan.row_blocks["num_tokens"][b] * group_size
            assert node["num_tiles"] == len(set(items["first_row"].tolist()))
            assert node["tile_q"] >= items["num_rows"].max()


def in_order(tree):
    """The same tree with parents before children, depth first: first children follow."""
    order, ranks = [], np.zeros(len(tree.parent) + 1, int)

    def visit(node):
        ranks[node] = len(order)
        order.append(node)
        for child, parent in enumerate(tree.parent):
            if parent == node:
                visit(child)

    for node, parent in enumerate(tree.parent):
        if parent < 0:
            visit(node)
    ranks[-1] = -1
    return Tree([int(ranks[tree.parent[n]]) for n in order], [tree.kv_len[n] for n in order],
                [int(ranks[n]) for n in tree.request_node], tree.q_len)


# --- structure ------------------------------------------------------------------------------------

def attention_of(num_levels, page_size=16, requests=64, device="cpu", variant=None, **more):
    kv = plait.PagedKv(page_size) if page_size else plait.RaggedKv()
    return plait.Attention(num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype="float32", device=device,
                           kv=plait.ComposedKv(kv, num_levels), variant=variant or plait.causal(),
                           bounds=plait.Bounds(requests=requests, query_tokens=1024, keys=1 << 20), **more)


def lists_by_request(levels, num_requests):
    """(level, first page of the list or row, keys, pages) of each request, in order of its keys."""
    lists = [[] for _ in range(num_requests)]
    for i, level in enumerate(levels):
        t, count = level.tables, 0
        for node, kv_len in enumerate(t["kv_len"]):
            if level.node_indptr is None:
                under = [node]
            else:
                begin, end = level.node_indptr[node:node + 2]
                under = level.node_requests[begin:end]
                assert len(under) > 0 and kv_len > 0
            if "kv_begin" in t:
                pages = t["kv_begin"][node] + np.arange(kv_len)
            else:
                pages = t["kv_page_indices"][t["kv_page_indptr"][node]:t["kv_page_indptr"][node + 1]]
            count += len(under)
            for r in under:
                lists[r].append((i, int(kv_len), list(map(int, pages))))
        assert i < len(levels) - 1 or count == num_requests
    return lists


@pytest.mark.parametrize("seed", range(24))
def test_levels_hold_the_pages_of_every_path(seed):
    """Of random trees, whatever is shared: each request has the pages of its path, in order, in
    ascending levels; no level but the last has a list a request."""
    rng = np.random.default_rng(seed)
    page_size, num_levels = [16, 1, 3][seed % 3], 2 + seed % 7
    tree = random_tree(rng, int(rng.integers(1, 6)), 20, page_size, 1 + 96 // page_size,
                       1 + seed % 2 * 6)
    attention = attention_of(num_levels, page_size)
    counts = [-(-n // page_size) for n in tree.kv_len]
    pages = rng.permutation(sum(counts))
    table = {"kv_len": np.array(tree.kv_len), "kv_page_indices": pages,
             "kv_page_indptr": np.cumsum([0, *counts])}
    levels = plait.compose_radix(attention, qo_indptr=np.cumsum([0, *tree.q_len]),
                                 node_parent=np.array(tree.parent),
                                 request_node=np.array(tree.request_node), **table)
    assert len(levels) == num_levels
    for r, lists in enumerate(lists_by_request(levels, len(tree.q_len))):
        assert [level for level, _, _ in lists] == sorted({level for level, _, _ in lists})
        wanted = [p for n in tree.path(r) for p in pages_of(table, n, tree.kv_len[n], page_size)]
        assert [p for _, _, found in lists for p in found] == wanted
        assert sum(n for _, n, _ in lists) == tree.lengths[r][1]
        filled = [n for _, n, _ in lists if n > 0]
        assert all(n % page_size == 0 for n in filled[:-1])


def random_hashes(rng, num_requests, block, num_ids):
    """Requests that agree on their first blocks; ids are of a block and all before it, as in a
    trace. Returns ids of each request and what each stands for in keys."""
    rows = [[]]
    for i in range(num_requests - 1):
        head = rows[rng.integers(len(rows))]
        head = head[:rng.integers(len(head) + 1)]
        rows.append(head + [1000 * i + j for j in range(int(rng.integers(0, num_ids)))])
    order = rng.permutation(num_requests)
    rows = [rows[i] for i in order]
    hashed = [max(len(ids) * block - int(rng.integers(0, block)), 0) for ids in rows]
    return rows, hashed


@pytest.mark.parametrize("seed", range(16))
def test_hashes_share_what_is_equal(seed):
    """Shared lists are pages of one request that the others agree with, key by key, and no node
    could hold more: where two nodes part, a block differs or a request ends."""
    rng = np.random.default_rng(seed)
    page_size, block = [(16, 64), (16, 24), (5, 16), (64, 16)][seed % 4]
    n = 24
    ids, hashed = random_hashes(rng, n, block, 6)
    kv_len = [max(h + int(rng.integers(-20, 60)), 0) for h in hashed]
    width = max(-(-max(kv_len) // page_size), 1)
    table = rng.permutation(n * width).reshape(n, width)
    attention = attention_of(8, page_size)
    levels = plait.compose_radix(
        attention, qo_indptr=np.arange(n + 1), hash_ids=ids, block_tokens=block,
        hashed_len=np.array(hashed), kv_len=np.array(kv_len), block_table=table)
    owner = {int(p): (r, i) for r, row in enumerate(table) for i, p in enumerate(row)}

    def content(r, page):  # what the tokens of a page are known by
        tokens = range(page * page_size, min((page + 1) * page_size, kv_len[r]))
        return [(ids[r][t // block], t) if t < hashed[r] else (r, "own", t) for t in tokens]

    for r, lists in enumerate(lists_by_request(levels, n)):
        pages = [p for _, _, found in lists for p in found]
        assert len(pages) == -(-kv_len[r] // page_size)
        for i, page in enumerate(pages):
            other, place = owner[page]
            assert place == i and content(other, i) == content(r, i)
        assert all(owner[p][0] == r for p in lists[-1][2]), "the rest is its own"
    nodes = levels._impl.nodes
    assert len(nodes) > 0


def test_hashes_as_a_tree():
    """Two blocks in common, then groups that part in the middle of a page, then equal ones."""
    attention = attention_of(4, page_size=16, requests=6)
    ids = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 4, 9], [8], []]
    levels = plait.compose_radix(
        attention, qo_indptr=np.arange(7), hash_ids=ids, block_tokens=1000, max_levels=4,
        kv_len=np.array([3000, 3000, 3000, 4000, 1000, 5]),
        block_table=np.arange(6 * 250).reshape(6, 250))
    plan = attention.plan(qo_indptr=np.arange(7), levels=levels)
    nodes = plan.nodes
    # 2000 keys are 125 pages; block 2 ends at 3000, inside page 187.
    assert nodes["kv_len"].tolist() == [2000, 992, 992]
    assert nodes["num_requests"].tolist() == [4, 2, 2]
    assert nodes["parent"].tolist() == [-1, 0, 0]
    assert [n for n in levels[-1].tables["kv_len"]][4:] == [1000, 5]


def test_equal_requests_are_not_joined():
    """All keys in one node: rows have one source, so that nothing is partial."""
    attention = attention_of(2, requests=8, max_ctas=1)
    levels = plait.compose_radix(
        attention, qo_indptr=np.arange(9), node_parent=np.array([-1]), request_node=np.zeros(8, int),
        kv_len=np.array([160]), kv_page_indptr=np.array([0, 10]), kv_page_indices=np.arange(10))
    plan = attention.plan(qo_indptr=np.arange(9), levels=levels)
    assert plan.nodes["level"].tolist() == [0] and plan.num_partial_rows == 0
    assert levels[-1].tables["kv_len"].tolist() == [0] * 8


@pytest.mark.parametrize("num_requests", [0, 1, 2])
def test_few_requests(num_requests, device, kernel):
    """None, one with nothing to share, two of which one has no queries."""
    tree = Tree([-1, 0], [96, 5], [1, 0][:num_requests], [1, 0][:num_requests])
    built = build(tree, "csr_p16", "causal", device, kernel)
    plan, out, lse = execute(built)
    compare_with_reference(built, out, lse)
    assert len(plan.nodes) == 0 and plan.num_partial_rows == 0


def test_copies_of_shared_keys_are_not_read(device, kernel):
    """Block hashes over distinct pages of equal keys: with NaN in all copies but the first."""
    rng = np.random.default_rng(5)
    n, shared, own, page = 8, 320, 33, 16
    dev = device_of(device)
    attention = attention_of(2, page, n, device, kernel=kernel)
    prefix = rng.standard_normal((2, shared, 2, 64), np.float32)
    suffix = rng.standard_normal((n, 2, own, 2, 64), np.float32)
    width = -(-(shared + own) // page)
    table = rng.permutation(n * width).reshape(n, width)
    caches = np.full((2, n * width, page, 2, 64), np.nan, np.float32)
    for which in range(2):
        for r in range(n):
            keys = np.full((width * page, 2, 64), np.nan, np.float32)
            if r == 0:
                keys[:shared] = prefix[which]
            keys[shared:shared + own] = suffix[r, which]
            caches[which, table[r]] = keys.reshape(width, page, 2, 64)
    kv_len = np.full(n, shared + own)
    levels = plait.compose_radix(attention, qo_indptr=np.arange(n + 1), hash_ids=[[3]] * n,
                                 block_tokens=shared, kv_len=kv_len, block_table=table)
    plan = attention.plan(qo_indptr=np.arange(n + 1), levels=levels)
    assert plan.nodes["keys_not_read"].tolist() == [(n - 1) * shared]
    q = rng.standard_normal((n, 8, 64), np.float32)
    out, lse = attention.run(dev.put(q), tuple(dev.put(c) for c in caches))
    for r in range(n):
        k, v = (np.concatenate([prefix[i], suffix[r, i]]) for i in range(2))
        want, want_lse = reference.attention(q[r:r + 1], k, v, causal=True)
        compare("out", dev.get(out)[r], want[0], 2e-5, f"request {r}, ")
        compare("lse", dev.get(lse)[r], want_lse[0], 1e-4, f"request {r}, ")


# --- the decision ---------------------------------------------------------------------------------

def chosen(tree, num_levels, device="cpu", kernel="auto", variant=None, **compose):
    """explain_json() of a tree's plan."""
    attention = attention_of(num_levels, 16, len(tree.q_len), device, variant, kernel=kernel)
    counts = [-(-n // 16) for n in tree.kv_len]
    qo_indptr = np.cumsum([0, *tree.q_len])
    levels = plait.compose_radix(
        attention, qo_indptr=qo_indptr, node_parent=np.array(tree.parent),
        request_node=np.array(tree.request_node), kv_len=np.array(tree.kv_len),
        kv_page_indptr=np.cumsum([0, *counts]), kv_page_indices=np.arange(sum(counts)), **compose)
    plan = attention.plan(qo_indptr=qo_indptr, levels=levels)
    assert plan == plait.Plan.from_json(plan.to_json())
    explained = json.loads(plan.explain_json())
    assert explained["bytes"] == sum(n for _, n in tree.lengths) * 2 * 2 * 64 * 4
    assert explained["bytes_not_read"] == sum(n["bytes_not_read"] for n in explained["nodes"])
    return explained["nodes"], plan


def nodes_of_make_plan(tree, device, kernel):
    """Nodes of make_plan, which takes the levels as Attention.plan does."""
    attention = attention_of(2, 0, len(tree.q_len), device, kernel=kernel)
    begin = np.array([0 if p < 0 else tree.kv_len[p] for p in tree.parent])
    qo_indptr = np.cumsum([0, *tree.q_len])
    levels = plait.compose_radix(
        attention, qo_indptr=qo_indptr, node_parent=np.array(tree.parent), kv_begin=begin,
        request_node=np.array(tree.request_node), kv_len=np.array(tree.kv_len))
    plan = plait.make_plan(qo_indptr, group_size=4, num_kv_heads=2, levels=levels)
    assert plan.num_levels == 2
    return plan.nodes.tolist()


def test_a_long_prefix_is_shared_and_a_short_one_is_not(device, kernel):
    # Over 32 requests; the short one is over two.
    tree = Tree([-1, -1, *[0] * 30, 1, 1], [4096, 16, *[64] * 32], range(2, 34), [1] * 32)
    (long, short), plan = chosen(tree, 2, device, kernel)
    assert long["shared"] and long["why"] == "pays" and long["shared_us"] < long["flat_us"]
    assert long["bytes_shared"] == 4096 * 1024 and long["bytes_not_read"] == 29 * 4096 * 1024
    assert not short["shared"] and short["why"] == "does_not_pay"
    assert short["shared_us"] > short["flat_us"] and short["bytes_not_read"] == 0
    text = plan.explain()
    assert plan.nodes.tolist() == nodes_of_make_plan(tree, device, kernel)
    assert "Shared: 1 of 2 nodes over several requests; 121.6 of" in text
    assert "reading once saves more" in text and "flat" in text and len(text.splitlines()) == 4


def test_hidden_keys_are_not_worth_sharing():
    """A window hides the prefix from all queries: nothing of it is read."""
    tree = Tree([-1, *[0] * 32], [4096, *[512] * 32], range(1, 33), [1] * 32)
    (node,), _ = chosen(tree, 2, variant=plait.causal() | plait.sliding_window(100))
    assert not node["shared"] and node["flat_us"] == 0 == node["bytes_not_read"]
    (node,), _ = chosen(tree, 2, variant=plait.causal() | plait.sliding_window(2000))
    assert node["shared"] and node["bytes_not_read"] < 31 * 1600 * 1024


@pytest.mark.parametrize("seed", range(10))
def test_reasons_are_the_choice(seed):
    """Where levels abound, what is shared is cheaper so and what is not is not; where they are few,
    no path has more, and some node says that it is too deep. (compose_radix_test.cc: that no choice
    is cheaper.)"""
    tree = random_tree(np.random.default_rng(seed), 4, 24, 16, 40)
    nodes, _ = chosen(tree, 8)
    assert {n["why"] for n in nodes} <= {"pays", "does_not_pay"}
    assert all(n["shared"] == (n["shared_us"] < n["flat_us"]) == (n["why"] == "pays") for n in nodes)
    assert max(n["level"] for n in nodes) >= 1
    few, _ = chosen(tree, 8, max_levels=2)
    assert {n["level"] for n in few} == {-1, 0} and "too_deep" in {n["why"] for n in few}
    shared = {n["node"] for n in few if n["shared"]}
    assert all(len(shared & set(tree.path(r))) <= 1 for r in range(len(tree.q_len)))


def test_given_levels_are_explained():
    attention = attention_of(2, 0, 4)
    plan = attention.plan(qo_indptr=np.arange(5), levels=[
        plait.Level(node_indptr=np.array([0, 3]), node_requests=np.array([0, 1, 3]),
                    kv_begin=np.array([0]), kv_len=np.array([100])),
        plait.Level(kv_begin=np.arange(4) * 10, kv_len=np.arange(4))])
    (node,) = json.loads(plan.explain_json())["nodes"]
    assert (node["requests"], node["rows"], node["keys"], node["why"]) == (3, 12, 100, "given")
    assert node["bytes_not_read"] == 200 * 1024
    flat = plait.make_plan([0, 1], [5], group_size=1, num_kv_heads=1)
    assert "Shared: 0 of 0 nodes" in flat.explain() and json.loads(flat.explain_json())["nodes"] == []


# --- bad input ------------------------------------------------------------------------------------

def compose(attention=None, **changed):
    arguments = dict(qo_indptr=np.arange(4), node_parent=np.array([-1, 0, 0]),
                     request_node=np.array([1, 2, 0]), kv_len=np.array([32, 5, 0]),
                     kv_page_indptr=np.array([0, 2, 3, 3]), kv_page_indices=np.array([4, 1, 0]))
    arguments |= changed
    return plait.compose_radix(attention or attention_of(3),
                               **{name: x for name, x in arguments.items() if x is not None})


HASHES = dict(node_parent=None, request_node=None, hash_ids=[[1], [1], [2]], block_tokens=16,
              kv_len=np.array([16, 17, 5]), kv_page_indptr=np.array([0, 1, 3, 4]),
              kv_page_indices=np.arange(4))
BAD_TREES = [
    (dict(node_parent=np.array([1, 2, 0])), "node_parent[2] is 0, but node 0 is under node 2",
     "must end at -1"),
    (dict(node_parent=np.array([-1, 1, 0])), "node_parent[1] is 1, but node 1 is under node 1"),
    (dict(node_parent=np.array([-1, 0, 7])), "node_parent[2] is 7", "one of the 3 nodes"),
    (dict(node_parent=np.array([-1, 0, -2])), "node_parent[2] is -2"),
    (dict(node_parent=np.zeros(3, np.float32)), "node_parent is float32[3]"),
    (dict(node_parent=np.array([-1, 0])), "kv_len has 3 entries; it must have 2"),
    (dict(node_parent=None), "node_parent is missing"),
    (dict(request_node=None), "request_node is missing"),
    (dict(request_node=np.array([1, 3, 0])), "request_node[1] is 3", "one of the 3 nodes"),
    (dict(request_node=np.array([1, -5, 0])), "request_node[1] is -5"),
    (dict(request_node=np.array([1, 2])), "request_node has 2 entries; it must have 3",
     "qo_indptr has 3 requests"),
    (dict(qo_indptr=np.array([1, 2, 3, 4])), "qo_indptr[0] is 1"),
    (dict(qo_indptr=np.array([0, 2, 1, 4])), "qo_indptr[2] is 1 after 2"),
    (dict(kv_page_indices=np.array([4, -1, 0])), "kv_page_indices[1] is -1", "page ids are >= 0"),
    (dict(kv_len=np.array([32, -5, 0])), "kv_len[1] is -5", "0 ... 1073741824 (2^30)"),
    (dict(kv_len=np.array([33, 5, 0])), "kv_len[0] is 33, which takes 3 pages of 16"),
    (dict(kv_begin=np.array([0, 0, 0])), "kv_begin is given, but it has no meaning"),
    (dict(max_levels=1), "max_levels is 1; it must be 2 ... 3"),
    (dict(max_levels=4), "max_levels is 4; it must be 2 ... 3"),
    (dict(hash_ids=[[1]] * 3), "taken are node_parent and request_node, or hash_ids"),
    (HASHES | dict(block_tokens=0), "block_tokens is 0; it must be >= 1"),
    (HASHES | dict(block_tokens=None), "block_tokens is missing"),
    (HASHES | dict(hash_ids=None), "hash_ids is missing"),
    (HASHES | dict(hash_ids=[[1], [1]]), "hash_indptr has 3 entries; it must have 4"),
    (HASHES | dict(hash_ids=[[1], [0.5], [2]]), "hash_ids[1] is no list of 64-bit signed integers"),
    (HASHES | dict(hash_ids=[[1], 5, [2]]), "hash_ids[1] is no list"),
    (HASHES | dict(hash_ids=[[1], [2**63], [2]]), "hash_ids[1] is no list"),
    (HASHES | dict(hashed_len=np.array([16, 17, 5])), "hashed_len[1] is 17; 1 blocks of 16 keys",
     "0 ... 16"),
    (HASHES | dict(hashed_len=np.array([16, -1, 5])), "hashed_len[1] is -1"),
    (HASHES | dict(kv_page_indices=np.array([0, 1, 2, -7])), "kv_page_indices[3] is -7"),
]


@pytest.mark.parametrize("bad", BAD_TREES, ids=[parts[1] for parts in BAD_TREES])
def test_bad_trees_are_refused(bad):
    changed, *parts = bad
    refused(lambda: compose(**changed), "compose_radix: ", *parts)


def test_the_good_ones_pass():
    assert len(compose()) == len(compose(**HASHES)) == 3


def test_what_is_no_argument():
    with pytest.raises(TypeError, match="attention is 3 .*taken is a plait.Attention"):
        plait.compose_radix(3, qo_indptr=np.arange(2), node_parent=np.array([-1]),
                            request_node=np.array([0]))
    with pytest.raises(TypeError, match="kv_lens is no table"):
        compose(kv_lens=np.arange(3))
    refused(lambda: compose(attention_of(1)), "the format has 1 level", "2 ... 8")


def test_nodes_that_can_be_joined_with_nothing_need_levels():
    """Every node ends inside a page: each takes a level, and one is too many."""
    tree = dict(qo_indptr=np.arange(3), node_parent=np.array([-1, 0, 1, 1]),
                request_node=np.array([2, 3]), kv_len=np.array([17, 18, 3, 4]),
                kv_page_indptr=np.array([0, 2, 4, 5, 6]), kv_page_indices=np.arange(6))
    levels = compose(attention_of(3), **tree)
    assert [list(level.tables["kv_len"]) for level in levels] == [[17], [18], [3, 4]]
    refused(lambda: compose(attention_of(2), **tree), "2 nodes on the way to node 1 end inside a page",
            "with that of the requests 3; max_levels is 2", "Take 3 levels", "page_size 16")


def test_more_levels_than_the_format_has():
    levels = compose(attention_of(3))
    refused(lambda: attention_of(2).plan(qo_indptr=np.arange(4), levels=levels),
            "levels has 3 entries; the format has 2 levels", "make the Attention with as many")
    refused(lambda: plait.ComposedKv(plait.PagedKv(16), 9), "num_levels is 9; it must be 1 ... 8",
            "compose_radix")
