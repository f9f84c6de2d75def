"""What a case of `plait bench` is: lengths, layout, variant, and how it is planned and launched."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """Requests of q_len queries over kv_len keys each. page_size 0: ragged.

    The first shared_len keys (whole pages) of all requests are the same pages. With num_levels
    above 1 the format is composed, by compose_radix() from what is shared; else it is flat.
    requests_bound: the Attention is made, and q has rows, for so many requests (0: those there
    are); query_bound: it is made for so many query tokens of a request (0: the most there are),
    as one that decodes and takes prompts too. call: "graph" captures the runs in a graph, "eager"
    launches each from Python, "plan" does too and plans before each.
    """

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
    scheduler: str = "auto"
    invariant: int = 0  # keys of a chunk in invariant mode; 0: off
    shared_len: int = 0
    num_levels: int = 1
    requests_bound: int = 0
    query_bound: int = 0
    call: str = "graph"
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
    def padding(self):
        """Rows of q beyond the tokens."""
        return max(self.requests_bound - len(self.q_len), 0) * max(self.q_len)

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
        what = f"{self._lengths()}, {self.variant}, {layout}, {heads}, {dtype}"
        return ", ".join([what, *self._how()])

    def _how(self):
        if self.shared_len:
            yield f"{self.shared_len} of them shared"
        if self.num_levels > 1:
            yield f"{self.num_levels} levels"
        if self.scheduler != "auto":
            yield f"scheduler {self.scheduler}"
        if self.invariant:
            yield f"invariant in chunks of {self.invariant}"
        if self.requests_bound:
            yield f"bounds of {self.requests_bound} requests"
        if self.call != "graph":
            yield {"eager": "launched one by one", "plan": "planned before each run"}[self.call]

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
