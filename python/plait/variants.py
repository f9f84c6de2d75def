"""Attention variants. `a | b` is both at once: keys visible to both, the functors of both."""

from plait import _plait
from plait.tensors import Tensor

Variant = _plait.Variant
_RUN_ARGUMENTS = ("self", "q", "kv", "out", "lse", "return_lse", "sm_scale", "stream")


def full() -> Variant:
    """Every query sees every key."""
    return _plait.full()


def causal() -> Variant:
    """Query i of q_len sees keys 0 ... i + kv_len - q_len."""
    return _plait.causal()


def sliding_window(window_left: int, sink_tokens: int = 0) -> Variant:
    """Keys at positions >= query position - window_left, and the first `sink_tokens` keys.

    Says nothing of the future: combine with `causal()`. Raises ValueError for negative values.
    """
    return _plait.sliding_window(window_left, sink_tokens)


def soft_cap(cap: float) -> Variant:
    """Logits become cap * tanh(sm_scale * q.k / cap). run(cap=...) takes another for one call."""
    return _plait.soft_cap(cap)


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
    listed = []
    for param, value in (params or {}).items():
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
