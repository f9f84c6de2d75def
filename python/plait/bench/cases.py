"""The cases of `plait bench` that need a GPU, by name, and the groups they are in.

Names: p prefill, a append, d decode, spec drafts, s decode behind a shared prefix; then requests
and lengths. Distributions are drawn with a fixed seed: `uniform` is U(512, 1024), `zipf` the skewed
lengths of FlashInfer's evaluation.
"""

from dataclasses import replace

from plait.bench import paper
from plait.bench.case import Case, draw
from plait.bench.paper import shared_prefix

# `paper` is all cases of plait.bench.paper, some of them those of other groups.
GROUPS = (
    "prefill",
    "append",
    "decode",
    "spec",
    "mixed",
    "variants",
    "invariant",
    "sm80",
    "shared",
    "graph",
)


def _prefill():
    same = {
        "p16_const1k": draw("const", 16),
        "p16_uniform": draw("uniform", 16),
        "p16_zipf1k": draw("zipf", 16),
        "p4_4k": (4096,) * 4,
        "p1_16k": (16384,),
    }
    for name, lengths in same.items():
        yield Case(name, "prefill", lengths, lengths)
    base = Case("p4_4k", "prefill", (4096,) * 4, (4096,) * 4)
    yield replace(base, name="p4_4k_full", variant="full")
    for dim, heads in ((64, {}), (256, dict(num_qo_heads=16, num_kv_heads=4))):
        for suffix, variant in (("", "causal"), ("_full", "full")):
            name = f"p4_4k_d{dim}{suffix}"
            yield replace(base, name=name, variant=variant, head_dim=dim, head_dim_vo=None, **heads)
    for page_size in (1, 16, 64):
        yield replace(base, name=f"p4_4k_page{page_size}", page_size=page_size, beside="p4_4k")


def _append():
    for page_size in (1, 16):
        name = f"a8_512_8k_page{page_size}"
        yield Case(name, "append", (512,) * 8, (8192,) * 8, page_size)


def _decode():
    def case(name, kv_len, page_size=16, **more):
        return Case(name, "decode", (1,) * len(kv_len), kv_len, page_size, **more)

    yield case("d64_4k_page16", (4096,) * 64)
    for page_size in (64, 1):
        name = f"d64_4k_page{page_size}"
        yield case(name, (4096,) * 64, page_size, beside="d64_4k_page16")
    for count in (17, 20, 34):  # heads that no number of CTAs divides
        yield case(f"d{count}_4k", (4096,) * count, beside="d64_4k_page16")
    yield case("d128_const4k", draw("const", 128, 4096))
    yield case("d128_zipf4k", draw("zipf", 128, 4096), beside="d128_const4k")
    yield case("d1_128k", (131072,))
    yield case("d8_8k", (8192,) * 8)
    yield case("d16_const1k", draw("const", 16))
    yield case("d16_uniform", draw("uniform", 16), beside="d16_const1k")
    yield case("d16_zipf1k", draw("zipf", 16), beside="d16_const1k")


def _drafts_and_mixed():
    spec = Case("spec32_8_4k", "spec", (8,) * 32, (4096,) * 32, 16)
    yield spec
    yield replace(spec, name="spec32_8_4k_mask", variant="draft_mask", beside=spec.name)
    yield Case("mixed_2k_63x4k", "mixed", (2048,) + (1,) * 63, (4096,) * 64, 16)


def _variants():
    prefill = Case("", "variants", (4096,) * 4, (4096,) * 4, beside="p4_4k")
    decode = Case("", "variants", (1,) * 64, (4096,) * 64, 16, beside="d64_4k_page16")
    for variant in ("window1k", "alibi", "custom_alibi", "soft_cap", "custom_soft_cap", "rope"):
        yield replace(prefill, name=f"p4_4k_{variant}", variant=variant)
    yield replace(decode, name="d64_4k_rope", variant="rope")
    fp8 = dict(kv_dtype="float8_e4m3fn")
    yield replace(decode, name="d64_4k_fp8", **fp8)
    yield replace(decode, name="d64_4k_fp8_page1", page_size=1, **fp8)
    yield replace(prefill, name="p4_4k_fp8", **fp8)


def _invariant():
    """Each beside the same without invariant mode."""
    batches = (
        Case("d64_4k", "invariant", (1,) * 64, (4096,) * 64, 16, beside="d64_4k_page16"),
        Case("p4_4k", "invariant", (4096,) * 4, (4096,) * 4, beside="p4_4k"),
    )
    one = Case("d1_8k", "invariant", (1,), (8192,), 16)
    yield one
    for case in (*batches, replace(one, beside="d1_8k")):
        for keys in (512, 1024, 2048):
            yield replace(case, name=f"{case.name}_chunks_{keys}", invariant=keys)


def _sm80():
    prefill = Case("p4_4k_sm80", "sm80", (4096,) * 4, (4096,) * 4, beside="p4_4k")
    yield replace(prefill, kernel="sm80")
    decode = Case("d64_4k_sm80", "sm80", (1,) * 64, (4096,) * 64, 16, beside="d64_4k_page16")
    yield replace(decode, kernel="sm80")


def _shared():
    yield from shared_prefix(16, 8192, 256, "s16_8k_256")
    yield from shared_prefix(64, 8192, 256, "s64_8k_256")
    yield from shared_prefix(256, 4096, 128, "s256_4k_128")
    for name in ("d64_4k_page16", "d16_zipf1k"):  # nothing is shared
        (flat,) = (case for case in _decode() if case.name == name)
        composed = flat.name.removesuffix("_page16") + "_composed"
        yield replace(flat, name=composed, group="shared", num_levels=2, beside=name)


def _graph():
    """What a graph for more requests costs one, and what a plan puts before its kernel."""
    one = Case("d1_4k_eager", "graph", (1,), (4096,), 16, call="eager")
    yield one
    yield replace(one, name="d1_4k", call="graph", beside=one.name)
    yield replace(one, name="d1_4k_of256", call="graph", requests_bound=256, beside=one.name)
    eager = Case("d16_1k_eager", "graph", (1,) * 16, (1024,) * 16, 16, call="eager")
    yield eager
    yield replace(eager, name="d16_1k_plan", call="plan", beside=eager.name)


CASES = {
    case.name: case
    for part in (
        _prefill,
        _append,
        _decode,
        _drafts_and_mixed,
        _variants,
        _invariant,
        _sm80,
        _shared,
        _graph,
    )
    for case in part()
}
PAPER = [case.name for case in paper.cases()]
CASES |= {case.name: case for case in paper.cases() if case.name not in CASES}


def select(groups, names=()):
    """The cases of `groups`, or of these those named, in the table's order; and the yardsticks that
    they stand beside. Raises ValueError for a name that is in none of the groups."""
    known = [name for name, case in CASES.items() if case.group in groups]
    if "paper" in groups:
        known = list(dict.fromkeys([*known, *PAPER]))
    for name in names:
        if name not in known:
            raise ValueError(
                f"--case {name!r} is no case of {', '.join(groups)}; these have {', '.join(known)}"
            )
    wanted = set(names or known)
    wanted |= {CASES[name].beside for name in wanted} - {None}
    return [case for name, case in CASES.items() if name in wanted]
