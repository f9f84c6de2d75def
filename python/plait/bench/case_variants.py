"""The variants of benchmark cases: what plan() and run() take beside the batch, and the same thing
in NumPy for the check."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import plait
from plait.reference import Functors


class Unsupported(ValueError):
    """plait has no such thing yet."""


@dataclass
class CaseVariant:
    """`build` makes the plait.Variant. `visible` are options of counting and reference alike; `run`
    float32 tensors by the number of query heads; `plan` tables by the lengths; `functors` those of
    the reference for some query heads."""

    build: Callable
    visible: dict = field(default_factory=lambda: dict(causal=True))
    run: Callable = lambda num_qo_heads: {}
    plan: Callable = lambda q_len, kv_len: {}
    functors: Callable = lambda qo_heads, num_qo_heads: Functors()


def _of_plait(name):
    """A variant of plait by its name."""
    if not hasattr(plait, name):
        raise Unsupported(f"plait has no variant {name}()")
    return getattr(plait, name)


# The text of the built-ins once more, as a user would write it.
_ALIBI = """
struct MyAlibi {
  PLAIT_HD static Logit logits_transform(const Params& p, const LogitContext& c, Logit logit) {
    return logit + p.slopes[c.qo_head] * c.distance;
  }
};
"""
_SOFT_CAP = """
struct MySoftCap {
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float logit) {
    return p.my_cap * tanh(logit * reciprocal(p.my_cap));
  }
};
"""
_CAP = 30.0


def _slopes(num_qo_heads):
    return dict(slopes=np.exp2(-8.0 * np.arange(1, num_qo_heads + 1) / num_qo_heads, dtype="f4"))


class _Alibi(Functors):
    def __init__(self, qo_heads, num_qo_heads):
        self.slopes = _slopes(num_qo_heads)["slopes"][qo_heads]

    def logits_transform(self, logit, context):
        distance = (context.k_pos - context.q_pos).astype(logit.dtype)
        return logit + self.slopes[context.qo_head].astype(logit.dtype) * distance


class _SoftCap(Functors):
    def __init__(self, qo_heads, num_qo_heads):
        pass

    def logits_transform(self, logit, context):
        cap = logit.dtype.type(_CAP)
        return cap * np.tanh(logit / cap)


class _Rope(Functors):
    """Pairs (i, i + d / 2) turned by position * 10000^(-2 i / d)."""

    def __init__(self, qo_heads, num_qo_heads):
        pass

    def query_transform(self, x, request, position, head):
        half = x.shape[-1] // 2
        angle = position[:, None, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    key_transform = query_transform


def _draft_mask(q_len, kv_len):
    """Mask bits over the drafts alone: each sees those before it and itself, as causal does."""
    rows = [np.tri(q, dtype=bool).ravel() for q in q_len]
    first = np.asarray(kv_len, np.int32) - np.asarray(q_len, np.int32)
    return dict(custom_mask=np.concatenate(rows), first_masked_key=first)


def _alibi_text():
    return plait.custom("my_alibi", "MyAlibi", _ALIBI, params={"slopes": plait.Tensor})


CASE_VARIANTS = {
    "causal": CaseVariant(plait.causal),
    "full": CaseVariant(plait.full, visible=dict(causal=False)),
    "window1k": CaseVariant(
        lambda: plait.causal() | plait.sliding_window(1024),
        visible=dict(causal=True, window_left=1024),
    ),
    "soft_cap": CaseVariant(lambda: plait.causal() | plait.soft_cap(_CAP), functors=_SoftCap),
    "custom_soft_cap": CaseVariant(
        lambda: (
            plait.causal()
            | plait.custom("my_soft_cap", "MySoftCap", _SOFT_CAP, params={"my_cap": _CAP})
        ),
        functors=_SoftCap,
    ),
    "alibi": CaseVariant(
        lambda: plait.causal() | _of_plait("alibi")(), run=_slopes, functors=_Alibi
    ),
    "custom_alibi": CaseVariant(
        lambda: plait.causal() | _alibi_text(), run=_slopes, functors=_Alibi
    ),
    "rope": CaseVariant(lambda: plait.causal() | _of_plait("rope")(), functors=_Rope),
    # Without causal(): as an engine would give a tree of drafts.
    "draft_mask": CaseVariant(lambda: _of_plait("custom_mask")(), plan=_draft_mask),
}
