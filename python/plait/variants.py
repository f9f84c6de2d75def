"""Attention variants. `a | b` is both at once: keys visible to both, the functors of both."""

import numpy as np

from plait import _plait
from plait.arguments import instance, integer, number
from plait.tensors import Tensor

Variant = _plait.Variant
_RUN_ARGUMENTS = (
    "self",
    "q",
    "kv",
    "out",
    "lse",
    "return_lse",
    "sm_scale",
    "k_scale",
    "v_scale",
    "stream",
)


def full() -> Variant:
    """Every query sees every key."""
    return _plait.full()


def causal() -> Variant:
    """Query i of q_len sees keys 0 ... i + kv_len - q_len."""
    return _plait.causal()


def sliding_window(window_left: int, sink_tokens: int = 0) -> Variant:
    """Keys at positions >= query position - window_left, and the first `sink_tokens` keys.

    Says nothing of the future: combine with `causal()`. Both are 0 ... 2^30. Raises ValueError for
    other values.
    """
    most = 2**30
    return _plait.sliding_window(
        integer("sliding_window", "window_left", window_left, 0, most),
        integer("sliding_window", "sink_tokens", sink_tokens, 0, most),
    )


def soft_cap(cap: float) -> Variant:
    """Logits become cap * tanh(sm_scale * q.k / cap). run(cap=...) takes another for one call."""
    return _plait.soft_cap(number("soft_cap", "cap", cap))


def custom_mask() -> Variant:
    """Keys as the mask says that every plan() brings; see Attention.plan.

    Combine with causal() or a window where they hold too. For trees of drafts leave causal() out: a
    draft may lie behind its position.
    """
    return _plait.custom_mask()


def alibi() -> Variant:
    """Logits become logit + slope * (k_pos - q_pos): 0 at the query's own position, less with
    distance. Every run() brings `slopes`, float32 [num_qo_heads]: alibi_slopes(), or this
    rank's."""
    return _plait.alibi()


def alibi_slopes(num_heads: int):
    """The slopes of the paper (Press et al., 2022), float32 [num_heads], as every library has them.

    With P the largest power of two <= num_heads: 2^(-8 (i + 1) / P) for i < P, then
    2^(-4 (i + 1) / P) for i = 0, 2, 4, ... .
    """
    num_heads = integer("alibi_slopes", "num_heads", num_heads, 1)
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * (i + 1) / power for i in range(power)]
    exponents += [4 * (i + 1) / power for i in range(0, 2 * (num_heads - power), 2)]
    return np.float32(2.0) ** -np.array(exponents, np.float32)


def rope(
    *,
    theta: float = 1e4,
    scale: float = 1.0,
    interleave: bool = False,
    rotary_dim: int | None = None,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    old_context_len: int | None = None,
) -> Variant:
    """Rotary embedding of Q and K by their positions, for caches of keys as they were projected.

    Pair i of n = rotary_dim / 2 is turned by position * theta^(-i / n) / scale radians. Pairs are
    elements (i, i + n), or (2 i, 2 i + 1) with interleave; rotary_dim: the first elements of a head
    that are turned, a multiple of 8 (None: head_dim_qk). With old_context_len frequencies are
    scaled as in Llama 3.1: those with a wavelength below old_context_len / high_freq_factor are not
    divided by `scale`, those above old_context_len / low_freq_factor are, the others in between.
    Angles are exact to 2^-32 of a turn at any position. Raises ValueError for values out of range.
    """
    where = "rope"
    return _plait.rope(
        theta=number(where, "theta", theta),
        scale=number(where, "scale", scale),
        interleave=instance(where, "interleave", interleave, bool, "True or False"),
        rotary_dim=0 if rotary_dim is None else integer(where, "rotary_dim", rotary_dim, 1),
        low_freq_factor=number(where, "low_freq_factor", low_freq_factor),
        high_freq_factor=number(where, "high_freq_factor", high_freq_factor),
        old_context_len=(
            0 if old_context_len is None else integer(where, "old_context_len", old_context_len, 1)
        ),
    )


def rms_norm(*, q: bool = True, k: bool = True, eps: float = 1e-6) -> Variant:
    """Rows of Q and K become x / sqrt(mean(x^2) + eps) * weight, in float32, before what follows.

    Every run() brings `q_norm_weight` and `k_norm_weight`, float32 [head_dim_qk]. Write it before
    rope(): rms_norm() | rope(). Raises ValueError where neither q nor k is asked for.
    """
    eps = number("rms_norm", "eps", eps)
    q = instance("rms_norm", "q", q, bool, "True or False")
    k = instance("rms_norm", "k", k, bool, "True or False")
    if not (q or k):
        raise ValueError("rms_norm: q and k are both False; take at least one")
    if not k:
        return _plait.rms_norm_q(eps)
    return _plait.rms_norm_q(eps) | _plait.rms_norm_k(eps) if q else _plait.rms_norm_k(eps)


def custom(
    name: str, struct_name: str, source: str, params=None, use_softmax: bool = True
) -> Variant:
    """A variant of one's own: C++ text that defines `struct struct_name` (docs/add_a_variant.md).

    params: name -> float or int (the default; run(name=value) takes another), or `plait.Tensor` for
    a contiguous float32 tensor that every run() brings; functors read them as members of `Params`,
    which is written for the user. The text is compiled when an Attention is made.
    Raises ValueError if it defines none of the six functors, TypeError for other params.

    >>> import plait
    >>> sigmoid = plait.custom("sigmoid", "Sigmoid", '''
    ... struct Sigmoid {
    ...   PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float x) {
    ...     return 1.0f / (1.0f + exp2(-1.44269504f * (x + p.bias)));
    ...   }
    ... };''', params={"bias": -2.0}, use_softmax=False)
    >>> sigmoid.use_softmax
    False
    """
    for argument, value in (("name", name), ("struct_name", struct_name), ("source", source)):
        instance("custom", argument, value, str, "text")
    instance("custom", "use_softmax", use_softmax, bool, "True or False")
    params = instance("custom", "params", {} if params is None else params, dict, "a dict")
    listed = []
    for param, value in params.items():
        instance(f"custom {name!r}", "a name in params", param, str, "text")
        if param in _RUN_ARGUMENTS:
            raise ValueError(
                f"custom {name!r}: params[{param!r}] is an argument of run(); rename it"
            )
        if value is Tensor:
            listed.append(_plait.variant_param(param, "tensor", 0.0))
        elif isinstance(value, int) and not isinstance(value, bool):
            listed.append(_plait.variant_param(param, "int", value))
        elif isinstance(value, float):
            listed.append(_plait.variant_param(param, "float", value))
        else:
            raise TypeError(
                f"custom {name!r}: params[{param!r}] is {value!r}; taken are a float, an "
                f"int and plait.Tensor"
            )
    return _plait.custom(name, struct_name, source, listed, use_softmax)
