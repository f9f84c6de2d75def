"""invariant=True: the bits of a row are the same in any company, however it is cut, in whatever pieces
its prompt came, and wherever its keys lie. Bit by bit against one prefill of the whole request; and
correct, against float64. tests/gpu runs the same on each kernel.
"""

import dataclasses

import numpy as np
import pytest

import plait

import harness
from harness import Case
from variants import CAUSAL, TestVariant

CHUNK = 512  # keys: three chunks of a request that is short enough for every test
KEYS = 1300
HEADS, KV_HEADS, DIM = 8, 2, 64

WINDOW = TestVariant(lambda: plait.causal() | plait.sliding_window(300),
                     visibility=CAUSAL | {"window_left": 300})
SINKS = TestVariant(lambda: plait.causal() | plait.sliding_window(200, sink_tokens=70),
                    visibility=CAUSAL | {"window_left": 200, "sink_tokens": 70})
KINDS = {
    "causal": {},
    "window": {"variant": WINDOW},
    "window_sinks": {"variant": SINKS, "dtype": "float16"},
    "soft_cap": {"variant": "causal_soft_cap", "dtype": "float16"},
    "alibi": {"variant": "alibi"},
    "rope": {"variant": "rope"},
    "sigmoid": {"variant": "sigmoid"},
    "fp8": {"kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.25},
}


@pytest.fixture(scope="module")
def requests():
    """Queries, keys and values of three requests, [KEYS, heads, DIM] each."""
    rng = np.random.default_rng(11)
    return [tuple(rng.standard_normal((KEYS, heads, DIM)).astype(np.float32)
                  for heads in (HEADS, KV_HEADS, KV_HEADS)) for _ in range(3)]


def rows_of(requests, batch, device, kernel, **fields):
    """{(request, position): bits of out and lse} of tokens begin ... end - 1 of requests, which see
    the keys up to them. batch: (request, begin, end) each."""
    data = (np.concatenate([requests[r][0][begin:end] for r, begin, end in batch]),
            [requests[r][1][:end] for r, _, end in batch],
            [requests[r][2][:end] for r, _, end in batch])
    fields = {"variant": "causal", "invariant": CHUNK, **fields}
    _, lse, built = harness.attend(data, device, kernel, max_keys=KEYS,
                                   q_lens=[end - begin for _, begin, end in batch], **fields)
    out = harness.bits(np.ascontiguousarray(built.stored_out))
    rows, row = {}, 0
    for r, begin, end in batch:
        for position in range(begin, end):
            of_lse = b"" if lse is None else np.ascontiguousarray(lse[row]).tobytes()
            rows[r, position] = out[row].tobytes() + of_lse
            row += 1
    return rows


# How the rows of request 0 may come to be computed.
WAYS = {
    "alone": [([(0, 1299, 1300)], {})],
    "decode kernel": [([(0, n, n + 1)], {"decode_only": True}) for n in (511, 512, 1299)],
    "pieces": [([(0, begin, end)], {}) for begin, end in
               ((0, 7), (7, CHUNK - 1), (CHUNK - 1, CHUNK), (CHUNK, CHUNK + 1),
                (CHUNK + 1, 2 * CHUNK), (2 * CHUNK, 1300))],
    "company": [([(1, 600, 601), (0, 1290, 1300), (2, 0, 300)], {}),
                ([(2, 0, 300), (0, 1290, 1300), (1, 600, 601)], {"max_requests": 64}),
                ([(1, 900, 901), (0, 1299, 1300), (2, 40, 41)], {"decode_only": True})],
    "page 1": [([(0, 1200, 1300)], {"format": "csr_p1"})],
    "ragged": [([(0, 1200, 1300)], {"format": "ragged"})],
    "page 3": [([(1, 3, 9), (0, 1250, 1300)], {"format": "csr_p3_joint"})],
    "ctas": [([(0, 1200, 1300), (1, 0, 20)], {"max_ctas": n}) for n in (1, 5)],
    "schedulers": [([(0, 1260, 1300)], {"scheduler": name})
                   for name in ("lpt", "unsplit", "prefix_sum")],
}


def skip_where_not_taken(kernel, fields):
    if kernel == "sm80" and fields.get("dtype") == "float32":
        pytest.skip("sm80 takes 16 bits")


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_depend_on_nothing_else(device, every_kernel, requests, kind):
    fields = KINDS[kind]
    skip_where_not_taken(every_kernel, fields)
    whole = rows_of(requests, [(0, 0, KEYS)], device, every_kernel, **fields)
    for name, runs in WAYS.items():
        for batch, options in runs:
            rows = rows_of(requests, batch, device, every_kernel, **{**fields, **options})
            mine = [key for key in rows if key[0] == 0]
            wrong = [key[1] for key in mine if rows[key] != whole[key]]
            assert not wrong, (f"{name} {batch} {options}: {len(wrong)} of {len(mine)} rows have "
                               f"other bits, first that at position {wrong[0]}")


def test_without_it_bits_differ(device, kernel, requests):
    """Else the test above proves nothing."""
    whole = rows_of(requests, [(0, 0, KEYS)], device, kernel, invariant=False)
    rows = rows_of(requests, [(0, 1299, 1300)], device, kernel, invariant=False, max_ctas=7)
    if kernel == "plain" and rows == {(0, 1299): whole[0, 1299]}:
        pytest.skip("of one shape, and here not cut")
    assert rows[0, 1299] != whole[0, 1299]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [
    Case("csr_p16", "causal", ((1, 3000), (300, 1500), (1, 1)), invariant=True),
    Case("ragged", WINDOW, ((70, 1500), (1, 1024), (0, 9)), invariant=512),
    Case("csr_p1", SINKS, ((1, 2500), (33, 1025)), head_dim_qk=128, invariant=512, max_ctas=24),
    Case("csr_p16", "full", ((1, 5000),), head_dim_qk=128, invariant=True, split=True),
    Case("csr_p16", "mask_last", ((5, 1100), (40, 600)), invariant=512),
    Case("csr_p16", "causal", ((1, 1100), (9, 700)), head_dim_qk=192, head_dim_vo=128,
         invariant=512),
    Case("csr_p16", "causal", ((1, 1100), (9, 700)), head_dim_qk=256, invariant=512),
], ids=str)
def test_invariant_is_correct(device, every_kernel, case, dtype):
    harness.check(dataclasses.replace(case, dtype=dtype), device, every_kernel)


def test_custom_mask_bits_in_pieces(device, kernel, requests):
    rng = np.random.default_rng(5)
    mask = rng.random((KEYS, KEYS)) < 0.7
    put = harness.device_of(device).put
    q, k, v = (put(x.astype(np.float16)) for x in requests[0])
    get = harness.device_of(device).get

    def run(begin, end):
        attn = plait.Attention(
            num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float16", device=device,
            kernel=kernel, variant=plait.causal() | plait.custom_mask(), invariant=CHUNK,
            bounds=plait.Bounds(requests=2, query_tokens=KEYS, keys=KEYS))
        attn.plan(qo_indptr=np.array([0, end - begin]), kv_indptr=np.array([0, end]),
                  custom_mask=mask[begin:end, :end].ravel())
        out, lse = attn.run(q[begin:end], (k, v))
        return get(out), get(lse)

    whole = run(0, KEYS)
    for begin, end in ((1299, 1300), (1000, 1031), (CHUNK, CHUNK + 1)):
        for got, want in zip(run(begin, end), whole):
            harness.same_bits(got, want[begin:end], f"rows {begin} to {end} ")


@pytest.mark.parametrize("window", [None, 700])
def test_shared_levels_have_the_bits_of_the_flat_layout(device, kernel, requests, window):
    """A prefix of two chunks, which three requests share, and a tail of each."""
    shared, tails = 2 * CHUNK, (50, 1, 200)
    put = harness.device_of(device).put
    get = harness.device_of(device).get
    q = np.stack([requests[r][0][0] for r in range(3)]).astype(np.float16)
    prefix = [requests[0][i][:shared] for i in (1, 2)]
    own = [[requests[r][i][:n] for r, n in enumerate(tails)] for i in (1, 2)]
    k, v = (put(np.concatenate([p, *parts]).astype(np.float16)[:, None])
            for p, parts in zip(prefix, own))
    begin = shared + np.concatenate([[0], np.cumsum(tails)])
    pages = [np.arange(begin[r], begin[r + 1]) for r in range(3)]
    variant = plait.causal() if window is None else plait.causal() | plait.sliding_window(window)
    options = dict(num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float16",
                   device=device, kernel=kernel, variant=variant, invariant=CHUNK,
                   bounds=plait.Bounds(requests=4, query_tokens=8, keys=KEYS))
    qo_indptr = np.arange(4)
    flat = plait.Attention(kv=plait.PagedKv(page_size=1), **options)
    lists = [np.concatenate([np.arange(shared), p]) for p in pages]
    flat.plan(qo_indptr=qo_indptr, kv_len=np.array([len(x) for x in lists]),
              kv_page_indptr=np.concatenate([[0], np.cumsum([len(x) for x in lists])]),
              kv_page_indices=np.concatenate(lists))
    composed = plait.Attention(kv=plait.ComposedKv(plait.PagedKv(page_size=1), num_levels=2),
                               **options)

    def plan(shared):
        composed.plan(qo_indptr=qo_indptr, levels=[
            plait.Level(node_indptr=np.array([0, 3]), node_requests=np.arange(3),
                        kv_page_indptr=np.array([0, shared]), kv_page_indices=np.arange(shared),
                        kv_len=np.array([shared])),
            plait.Level(kv_page_indptr=np.concatenate([[0], np.cumsum(tails)]),
                        kv_page_indices=np.concatenate(pages), kv_len=np.array(tails))])

    plan(shared)
    for a, b in zip(flat.run(put(q), (k, v)), composed.run(put(q), (k, v))):
        harness.same_bits(get(a), get(b), "shared against flat ")
    with pytest.raises(ValueError, match=r"begins at position 1000; in invariant mode levels are "
                                         r"cut at multiples of 512 keys"):
        plan(1000)


def test_compose_radix_shares_whole_chunks(device, kernel):
    """Block hashes that agree on 1100 keys: two chunks are shared, and no bit differs."""
    n, common, own, page = 16, 1100, 60, 4
    rng = np.random.default_rng(2)
    dev = harness.device_of(device)
    pages = (common + own) // page
    table = np.concatenate([np.tile(np.arange(common // page), (n, 1)),
                            common // page + np.arange(n * (own // page)).reshape(n, -1)], axis=1)
    cache = [dev.put(rng.standard_normal((table.max() + 1, page, KV_HEADS, DIM)).astype(np.float16))
             for _ in range(2)]
    q = dev.put(rng.standard_normal((n, HEADS, DIM)).astype(np.float16))
    lengths = dict(kv_len=np.full(n, common + own), block_table=table)
    options = dict(num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float16",
                   device=device, kernel=kernel, variant=plait.causal(), invariant=CHUNK,
                   bounds=plait.Bounds(requests=n, query_tokens=n, keys=pages * page))
    qo_indptr = np.arange(n + 1)
    flat = plait.Attention(kv=plait.PagedKv(page_size=page), **options)
    flat.plan(qo_indptr=qo_indptr, **lengths)
    composed = plait.Attention(kv=plait.ComposedKv(plait.PagedKv(page_size=page), num_levels=2),
                               **options)
    levels = plait.compose_radix(composed, qo_indptr=qo_indptr, hash_ids=[[*range(11)]] * n,
                                 block_tokens=100, **lengths)
    plan = composed.plan(qo_indptr=qo_indptr, levels=levels)
    assert plan.nodes["keys_not_read"].tolist() == [(n - 1) * 2 * CHUNK]
    for a, b in zip(flat.run(q, cache), composed.run(q, cache)):
        harness.same_bits(dev.get(a), dev.get(b), "shared against flat ")


@pytest.mark.parametrize("chunk", [0, 100, 4096])
def test_other_chunks_are_refused(chunk):
    with pytest.raises(ValueError, match=f"invariant is {chunk}; it must be True, False"):
        plait.Attention(num_qo_heads=1, num_kv_heads=1, head_dim=64, invariant=chunk,
                        bounds=plait.Bounds(requests=1, query_tokens=1, keys=1))
