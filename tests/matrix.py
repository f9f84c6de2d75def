"""The cases of test_attention.py, on every device: every format with every variant, and around that
directed lists of sizes, heads, splits and padding. The full product would be a million cases; the
other axes are dealt evenly from shuffled decks with fixed seeds, so the list never changes.
"""

import itertools
import random

from harness import DEVICE_FORMATS, FORMATS, PAGE_FORMATS, Case
from variants import VARIANTS

DTYPES = ("bfloat16", "float16", "float32")
DIMS = ((8, 8), (40, 40), (64, 64), (128, 128), (192, 128), (256, 256))
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 130)
SIZES = (0, 1, 63, 64, 65, 127, 128, 129)


def deck(values, seed):
    """Deals `values` over and over, each round shuffled."""
    rng, values = random.Random(seed), list(values)
    while True:
        rng.shuffle(values)
        yield from values


class Limits:
    """What a kernel takes; the cases are dealt within it, none is skipped."""

    def __init__(self, dtypes=DTYPES, dims=DIMS, custom=((64, 64, "bfloat16"), (128, 128, "float16"),
                                                         (40, 40, "float32")), formats=FORMATS,
                 page_formats=()):
        self.dtypes, self.dims, self.formats = dtypes, dims, formats
        self.page_formats = page_formats
        self.custom = custom  # (d_qk, d_vo, dtype) of compiled variants: each is a compilation


EVERY = Limits()
EVERY_CUDA = Limits(formats=FORMATS | DEVICE_FORMATS)
SM90A = Limits(("bfloat16", "float16"), ((64, 64), (72, 40), (128, 128), (192, 128), (256, 256)),
               ((128, 128, "bfloat16"), (128, 128, "float16")), FORMATS | DEVICE_FORMATS,
               PAGE_FORMATS)
SM80 = Limits(("bfloat16", "float16"),
              custom=((64, 64, "bfloat16"), (128, 128, "float16"), (40, 40, "bfloat16")),
              formats=FORMATS | DEVICE_FORMATS)


def formats_and_variants(limits, seed=1):
    dtypes, dims = deck(limits.dtypes, seed), deck(limits.dims, seed + 1)
    custom = deck(limits.custom, seed + 2)
    lengths = deck(["zeros", "decode", "decode", "tiles", "prefill", "extend", "primes", "mixed",
                    "long"], seed + 3)
    heads = deck([(1, 4), (2, 1), (2, 4), (3, 2), (1, 8), (2, 3)], seed + 4)
    flags = deck(list(itertools.product((0, 3), (False, True), (True, False))), seed + 5)
    for format, variant in itertools.product(limits.formats, VARIANTS):
        d_qk, d_vo, dtype = (next(custom) if VARIANTS[variant].custom
                             else (*next(dims), next(dtypes)))
        if limits.formats[format].joint and d_qk != d_vo:
            d_qk = d_vo
        kv_heads, group = next(heads)
        padding, strided, given = next(flags)
        yield Case(format, variant, next(lengths), dtype, d_qk, d_vo if d_vo != d_qk else 0,
                   kv_heads, group, padding, strided, given_out=given)


def heads_and_dims(limits, seed=11):
    """Every group size with every head dim: decode, a few tokens, rows that see nothing."""
    dtypes = deck(limits.dtypes, seed)
    formats = deck(["csr_p16", "ragged", "slots", "padded_p3_hnd_joint", "shared_p16"], seed + 1)
    variants = deck(["causal", "full", "window17", "soft_cap"], seed + 2)
    for group, (d_qk, d_vo) in itertools.product(GROUPS, limits.dims):
        format = next(formats)
        if FORMATS[format].joint and d_qk != d_vo:
            format = "csr_p16"
        yield Case(format, next(variants), ((5, 77), (1, 130), (3, 0), (2, 1), (1, 64)), next(dtypes),
                   d_qk, d_vo if d_vo != d_qk else 0, 1 if group > 16 else 2, group)


def sizes(limits, seed=21):
    """Every q_len with every kv_len around the tiles, 64 and 128; groups that fill a tile
    unevenly."""
    dims, dtypes = deck(limits.dims[-3:-2] or limits.dims, seed), deck(limits.dtypes, seed + 1)
    for variant, format in (("causal", "ragged"), ("full", "csr_p64_strided"),
                            ("window_sinks", "csr_p16"), ("window17", "shared_p1_hnd")):
        for q_len, group in zip(SIZES, (1, 8, 1, 2, 3, 1, 2, 5)):
            d_qk, d_vo = next(dims)
            lengths = tuple((q_len, kv_len) for kv_len in (*SIZES, 257))
            yield Case(format, variant, lengths, next(dtypes), d_qk, 0 if d_qk == d_vo else d_vo, 1,
                       group)


def splits(limits, seed=31):
    """Few long rows over many CTAs: partial states, merge lists, more than one level."""
    dims, dtypes = deck(limits.dims, seed), deck(limits.dtypes, seed + 1)
    variants = deck(["causal", "full", "window_sinks", "soft_cap", "window_not_causal"], seed + 2)
    formats = deck(["csr_p16", "csr_p1", "ragged_gaps", "slots", "shared_p16", "padded_p64_hnd"],
                   seed + 3)
    for lengths, (kv_heads, group), scheduler in itertools.product(
            (((1, 4999),), ((1, 2500), (1, 1), (0, 7), (2, 3000)), ((40, 3000), (1, 2111))),
            ((1, 1), (2, 4), (1, 130)), ("auto", "lpt")):
        d_qk, d_vo = next(dims)
        if group == 130:  # 130 heads a token: the same cuts with fewer tokens and smaller heads
            d_qk = d_vo = min(d_qk, d_vo, limits.dims[0][0] * 8)
            lengths = tuple((min(q_len, 3), kv_len // 2) for q_len, kv_len in lengths)
        yield Case(next(formats), next(variants), lengths, next(dtypes), d_qk,
                   0 if d_qk == d_vo else d_vo, kv_heads, group, max_ctas=12, scheduler=scheduler,
                   padding=2)


def must_split(limits):
    """Batches that no plan may leave whole: one request, 12 CTAs."""
    d_qk, d_vo = limits.dims[len(limits.dims) // 2]
    for format, variant, dtype in (("csr_p16", "causal", limits.dtypes[0]),
                                   ("ragged", "full", limits.dtypes[-1]),
                                   ("csr_p1", "soft_cap", limits.dtypes[0])):
        yield Case(format, variant, ((1, 20000),), dtype, d_qk, 0 if d_qk == d_vo else d_vo, 1, 8,
                   max_ctas=12, split=True)
    d_qk, d_vo, dtype = limits.custom[0]
    for variant in ("sigmoid", "output_gain", "everything"):
        yield Case("csr_p16", variant, ((1, 20000), (3, 900)), dtype, d_qk, 0, 1, 8, max_ctas=12,
                   split=True)


def decode_only(limits, seed=41):
    """Bounds with max_q_len 1: the small kernel where there is one."""
    dims, dtypes = deck(limits.dims, seed), deck(limits.dtypes, seed + 1)
    groups = deck(GROUPS, seed + 2)
    for format, variant in itertools.product(
            ("ragged", "ragged_gaps", "csr_p1", "csr_p16", "padded_p64_hnd", "slots", "shared_p16"),
            ("causal", "window17", "soft_cap")):
        d_qk, d_vo = next(dims)
        group = next(groups)
        yield Case(format, variant, "decode", next(dtypes), d_qk,
                   0 if d_qk == d_vo else d_vo, 1 if group > 16 else 2, group, decode_only=True)


def decode_functors(limits, seed=71):
    """Masks, biases and functors in the small kernel: every loader, one row a key head and more."""
    dims, dtypes = deck(limits.dims, seed), deck(limits.dtypes, seed + 1)
    groups, lengths = deck((1, 4, 8), seed + 2), ((1, 300), (1, 65), (1, 0), (1, 1), (1, 128))
    for variant, format in itertools.product(
            ("window_sinks", "alibi", "mask", "mask_last", "rms_norm_rope", "value_scale", "sigmoid",
             "everything"), ("ragged", "csr_p16", "csr_p1")):
        d_qk, d_vo, dtype = (limits.custom[0] if VARIANTS[variant].custom
                             else (*next(dims), next(dtypes)))
        yield Case(format, variant, lengths, dtype, d_qk, 0 if d_qk == d_vo else d_vo, 2, next(groups),
                   decode_only=True)


def pages(limits, seed=51):
    """Lengths around the edges of pages and tiles, in pages read by boxes; what follows is NaN."""
    dims, dtypes = deck(limits.dims, seed), deck(limits.dtypes, seed + 1)
    for name in limits.page_formats:
        size = PAGE_FORMATS[name].page_size
        edges = {n for edge in (8, 16, size, 64, 128, 2 * size) for n in (edge - 1, edge, edge + 1)}
        lengths = sorted(edges | {1, 257, 391, 129 + size})
        for decode, variant in ((True, "full"), (False, "causal"), (False, "window17")):
            d_qk, d_vo = next(dims)
            if PAGE_FORMATS[name].joint:
                d_vo = d_qk
            q_len = 1 if decode else 9
            yield Case(name, variant, tuple((q_len, n) for n in lengths), next(dtypes), d_qk,
                       0 if d_qk == d_vo else d_vo, 2, 4, decode_only=decode)


def scales(limits):
    """sm_scale given, and logits large enough to overflow a softmax that subtracts no maximum."""
    d_qk, d_vo = limits.dims[len(limits.dims) // 2]
    d_vo = 0 if d_qk == d_vo else d_vo
    for sm_scale, scale_q in ((0.3, 1.0), (1e-3, 1.0), (None, 60.0), (2.0, 20.0)):
        yield Case("csr_p16", "causal", "extend", limits.dtypes[0], d_qk, d_vo, sm_scale=sm_scale,
                   scale_q=scale_q)


def none_at_all(limits):
    """Batches with nothing in them."""
    d_qk, d_vo = limits.dims[0]
    for format in limits.formats:
        for lengths, padding in (("none", 0), ("none", 3), (((0, 0), (0, 0)), 0), (((0, 40),), 1),
                                 (((4, 0), (1, 0)), 0)):
            yield Case(format, "causal", lengths, limits.dtypes[0], d_qk,
                       0 if d_qk == d_vo else d_vo, padding=padding)


def fp8(limits, seed=61):
    """K and V of 8 bits with scales: every format, masks, transforms, splits, rows that see nothing."""
    dims = deck([(qk, vo) for qk, vo in limits.dims if qk % 16 == vo % 16 == 0], seed)
    dtypes, lengths = deck(limits.dtypes, seed + 1), deck(["decode", "extend", "tiles", "mixed"], seed + 2)
    variants = deck(["full", "causal", "window_sinks", "causal_soft_cap", "alibi", "mask_last"], seed + 3)
    numbers = deck([("float8_e4m3fn", 0.25, 0.5), ("float8_e5m2", 1.7, 0.03)], seed + 4)

    def case(format, variant, lengths, d_qk, d_vo, dtype, **more):
        if (limits.formats | PAGE_FORMATS)[format].joint:
            d_vo = d_qk
        kv_dtype, k_scale, v_scale = next(numbers)
        return Case(format, variant, lengths, dtype, d_qk, 0 if d_qk == d_vo else d_vo,
                    kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale, **more)

    for format in (*limits.formats, *limits.page_formats):
        for decode in (False, True):
            yield case(format, next(variants), next(lengths) if not decode else "decode", *next(dims),
                       next(dtypes), padding=2, decode_only=decode)
    for format, variant in itertools.product(("csr_p16", "csr_p1", "ragged"),
                                             ("rms_norm_rope", "value_scale", "everything")):
        custom = [c for c in limits.custom if c[0] % 16 == c[1] % 16 == 0]
        yield case(format, variant, ((1, 300), (70, 130), (3, 2), (2, 0)), *custom[0])
    for format in ("csr_p16", "ragged_gaps", "shared_p16"):
        yield case(format, "causal", ((1, 4999), (2, 63), (40, 900)), *next(dims), next(dtypes),
                   max_ctas=12)
    # Rows that are no whole number of 16 bytes: what every kernel but the plain one leaves to it.
    if limits.dtypes == DTYPES:
        yield case("csr_p16", "causal", "extend", 40, 40, next(dtypes))


LISTS = (formats_and_variants, heads_and_dims, sizes, splits, must_split, decode_only,
         decode_functors, pages, scales, none_at_all, fp8)


def cases(limits):
    """All cases, each once, with the list each comes from."""
    seen = {}
    for make in LISTS:
        for case in make(limits):
            seen.setdefault(str(case), (make.__name__, case))
    return list(seen.values())
