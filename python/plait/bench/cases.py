"""The cases of `plait bench` that need a GPU: lengths, layout and variant of each, by name.

Names: p prefill, a append, d decode, spec drafts; then requests and lengths. Distributions are
drawn with a fixed seed: `uniform` is U(512, 1024), `zipf` the skewed lengths of FlashInfer's
evaluation.
"""

from dataclasses import dataclass, replace

import numpy as np

GROUPS = ("prefill", "append", "decode", "spec", "mixed", "variants", "sm80")


@dataclass(frozen=True)
class Case:
    """Requests of q_len queries over kv_len keys each. page_size 0: ragged."""

    name: str
    group: str
    q_len: tuple
    kv_len: tuple
    page_size: int = 0
    variant: str = "causal"  # a name of plait.bench.case_variants
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_vo: int | None = None  # None: head_dim
    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # None: dtype
    kernel: str = "auto"
    beside: str | None = None  # the case whose FLOP/s are the yardstick of this one's

    def __post_init__(self):
        if self.head_dim_vo is None:
            object.__setattr__(self, "head_dim_vo", self.head_dim)

    @property
    def tokens(self):
        return sum(self.q_len)

    @property
    def keys(self):
        return sum(self.kv_len)

    @property
    def uniform(self):
        """Whether all requests have the same lengths."""
        return len(set(self.q_len)) == 1 and len(set(self.kv_len)) == 1

    def describe(self):
        """Shape and layout in words, as `plait bench --list` prints them."""
        layout = f"page {self.page_size}" if self.page_size else "ragged"
        dims = f"{self.head_dim}"
        if self.head_dim_vo != self.head_dim:
            dims += f"/{self.head_dim_vo}"
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} heads, d {dims}"
        dtype = self.dtype if self.kv_dtype is None else f"{self.dtype}, {self.kv_dtype} KV"
        return f"{self._lengths()}, {self.variant}, {layout}, {heads}, {dtype}"

    def _lengths(self):
        if self.uniform:
            return f"{len(self.q_len)} x {self.q_len[0]} queries over {self.kv_len[0]} keys"
        queries, keys = (
            f"{min(x)} to {max(x)}" if min(x) < max(x) else f"{x[0]}"
            for x in (self.q_len, self.kv_len)
        )
        return f"{len(self.q_len)} requests, {queries} queries over {keys} keys"


def draw(kind, count, mean=1024, seed=0):
    """`count` lengths: all equal to the mean, U(512, 1024), or Zipf with exponent 1.3, cut at 200,
    scaled to the mean and at least 16."""
    rng = np.random.default_rng(seed)
    if kind == "const":
        values = np.full(count, mean)
    elif kind == "uniform":
        values = rng.integers(512, 1025, count)
    else:
        values = np.minimum(rng.zipf(1.3, count), 200).astype(float)
        values = np.maximum(16, np.round(values * (mean / values.mean())))
    return tuple(int(n) for n in values)


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
    yield case("d128_zipf4k", draw("zipf", 128, 4096))
    yield case("d1_128k", (131072,))
    yield case("d8_8k", (8192,) * 8)
    yield case("d16_const1k", draw("const", 16))
    yield case("d16_uniform", draw("uniform", 16))
    yield case("d16_zipf1k", draw("zipf", 16))


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


def _sm80():
    prefill = Case("p4_4k_sm80", "sm80", (4096,) * 4, (4096,) * 4, beside="p4_4k")
    yield replace(prefill, kernel="sm80")
    decode = Case("d64_4k_sm80", "sm80", (1,) * 64, (4096,) * 64, 16, beside="d64_4k_page16")
    yield replace(decode, kernel="sm80")


CASES = {
    case.name: case
    for part in (_prefill, _append, _decode, _drafts_and_mixed, _variants, _sm80)
    for case in part()
}


def select(groups, names=()):
    """The cases of `groups`, or of these those named, in the table's order; and the yardsticks that
    they stand beside. Raises ValueError for a name that is in none of the groups."""
    known = [name for name, case in CASES.items() if case.group in groups]
    for name in names:
        if name not in known:
            raise ValueError(
                f"--case {name!r} is no case of {', '.join(groups)}; these have {', '.join(known)}"
            )
    wanted = set(names or known)
    wanted |= {CASES[name].beside for name in wanted} - {None}
    return [case for name, case in CASES.items() if name in wanted]
