"""The meaning of attention: NumPy over an explicit list of keys, one request at a time.

Everything plait computes is checked against this file, by the tests and by `plait replay`. It knows
no pages, tiles, splits or plans: the caller says which keys a request has, and at which positions.
`real` and `stored` turn the float64 reference into "the same computation done plainly in that
dtype", whose error is the yardstick of every tolerance.
"""

from types import SimpleNamespace

import numpy as np


class Functors:
    """The six functors over whole arrays, and whether there is a softmax. Override what is needed.

    Row functors get x [rows, heads, dim], request, position [rows], head [heads]. Logit functors
    get logits [queries, qo heads, keys] and a context of arrays that broadcast to it.
    """

    use_softmax = True

    def query_transform(self, x, request, position, head):
        return x

    def key_transform(self, x, request, position, head):
        return x

    def value_transform(self, x, request, position, head):
        return x

    def logits_transform(self, logit, context):
        return logit

    def logits_mask(self, context):
        return True

    def output_transform(self, value, context):
        return value


def visible(q_pos, k_pos, causal=False, window_left=-1, sink_tokens=0):
    """Which keys a query sees: bool, of the broadcast shape of the positions."""
    seen = np.ones(np.broadcast(q_pos, k_pos).shape, bool)
    if causal:
        seen &= k_pos <= q_pos
    if window_left >= 0:
        seen &= (k_pos >= q_pos - window_left) | (k_pos < sink_tokens)
    return seen


def attention(q, k, v, *, q_pos=None, k_pos=None, sm_scale=None, causal=False, window_left=-1,
              sink_tokens=0, functors=Functors(), request=0, real=np.float64, stored=lambda x: x):
    """Attention of one request's queries over its keys.

    q [queries, qo heads, d_qk], k [keys, kv heads, d_qk], v [keys, kv heads, d_vo], as values of
    any float dtype. Positions are absolute; without them the last query is at the last key.
    sm_scale: 1 / sqrt(d_qk). Returns (out [queries, qo heads, d_vo], lse [queries, qo heads],
    natural log), both of dtype `real`. A query that sees no key has (0, -inf), whatever
    output_transform does; without softmax lse is None.
    """
    q, k, v = (np.asarray(x).astype(real) for x in (q, k, v))
    q_pos = np.arange(len(q)) + len(k) - len(q) if q_pos is None else np.asarray(q_pos)
    k_pos = np.arange(len(k)) if k_pos is None else np.asarray(k_pos)
    qo_head = np.arange(q.shape[1])
    kv_head = qo_head // (q.shape[1] // k.shape[1])  # query head h reads kv head h div group_size
    q = stored(functors.query_transform(q, request, q_pos, qo_head))
    k = stored(functors.key_transform(k, request, k_pos, np.arange(k.shape[1])))
    v = stored(functors.value_transform(v, request, k_pos, np.arange(v.shape[1])))
    scale = real(q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    logit = scale * np.matmul(q.transpose(1, 0, 2), k[:, kv_head].transpose(1, 2, 0))  # [H, Tq, Tk]
    at = SimpleNamespace(request=request, q_pos=q_pos[:, None, None], k_pos=k_pos,
                         qo_head=qo_head[:, None], kv_head=kv_head[:, None])
    logit = functors.logits_transform(logit.transpose(1, 0, 2), at)                    # [Tq, H, Tk]
    seen = visible(at.q_pos, at.k_pos, causal, window_left, sink_tokens) & functors.logits_mask(at)
    seen = np.broadcast_to(seen, logit.shape)
    if functors.use_softmax:
        top = np.max(logit, axis=-1, where=seen, initial=-np.inf, keepdims=True)
        top = np.where(np.isneginf(top), real(0), top)
        weight = np.exp(np.where(seen, logit - top, real(-np.inf)))
        total = weight.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = (top + np.log(total))[..., 0]
        share = np.where(total > 0, 1 / np.where(total > 0, total, 1), 0)
    else:
        weight, share, lse = np.where(seen, logit, real(0)), real(1), None
    out = np.matmul(stored(weight).transpose(1, 0, 2), v[:, kv_head].transpose(1, 0, 2))
    out = out.transpose(1, 0, 2) * share
    at = SimpleNamespace(request=request, q_pos=q_pos[:, None, None], qo_head=qo_head[:, None],
                         dim=np.arange(v.shape[-1]))
    out = np.where(seen.any(-1, keepdims=True), functors.output_transform(out, at), 0)
    return stored(out).astype(real), lse


def merge(states):
    """The state of the union of disjoint key sets: states is a list of (v [..., d], lse [...])."""
    v = np.stack([np.asarray(v, np.float64) for v, _ in states])
    lse = np.stack([np.asarray(lse, np.float64) for _, lse in states])
    top = np.max(lse, axis=0)
    weight = np.exp(lse - np.where(np.isneginf(top), 0, top))
    total = weight.sum(0)
    v = np.where(weight[..., None] > 0, v, 0)  # the value of an empty state is never read
    share = weight / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return (share[..., None] * v).sum(0), np.where(np.isneginf(top), 0, top) + np.log(total)


# --- storage dtypes: what NumPy lacks travels as bits, bfloat16 in uint16, fp8 in uint8 ---------

def _fp8_numbers(fraction_bits, bias, last_finite, infinity=None):
    """Value of each of the 256 codes, and the largest finite code (arXiv:2209.05433)."""
    code = np.arange(128)
    exponent, fraction = code >> fraction_bits, code % (1 << fraction_bits)
    numbers = np.where(exponent == 0, np.ldexp(1.0 * fraction, 1 - bias - fraction_bits),
                       np.ldexp(fraction + float(1 << fraction_bits),
                                exponent - bias - fraction_bits))
    numbers[last_finite + 1:] = np.nan
    if infinity is not None:
        numbers[infinity] = np.inf
    return np.concatenate([numbers, -numbers]).astype(np.float32), last_finite


FP8 = {"float8_e4m3fn": _fp8_numbers(3, 7, 0x7E), "float8_e5m2": _fp8_numbers(2, 15, 0x7B, 0x7C)}


def _to_fp8(x, dtype):
    numbers, largest = FP8[dtype]
    x = np.asarray(x, np.float64)  # exact midpoints
    finite = numbers[:largest + 1].astype(np.float64)
    middles = (finite[:-1] + finite[1:]) / 2
    size = np.where(np.isnan(x), 0, np.abs(x))
    code = np.searchsorted(middles, size)            # the lower of two neighbours where x is midway
    tie = (code < largest) & (size == middles[np.minimum(code, largest - 1)])
    code = np.where(tie, code + code % 2, code)
    return np.where(np.isnan(x), 0x7F, code + 128 * np.signbit(x)).astype(np.uint8)


def to_storage(x, dtype):
    """Values rounded (to nearest, ties to even; fp8: at most to the largest finite number) to the
    NumPy array that stores `dtype`."""
    x = np.asarray(x, np.float32)
    if dtype in FP8:
        return _to_fp8(x, dtype)
    if dtype == "float32":
        return x
    if dtype == "float16":
        return x.astype(np.float16)
    if dtype != "bfloat16":
        raise ValueError(f"to_storage: dtype is {dtype!r}, not float32, bfloat16, float16 or fp8")
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_storage(x, dtype):
    """float32 values of stored `dtype`."""
    if dtype == "bfloat16":
        return (np.asarray(x).astype(np.uint32) << 16).view(np.float32)
    if dtype in FP8:
        return FP8[dtype][0][np.asarray(x)]
    return np.asarray(x).astype(np.float32)


def rounded(x, dtype):
    """x rounded to what `dtype` can hold, in x's own dtype."""
    x = np.asarray(x)
    return from_storage(to_storage(x, dtype), dtype).astype(x.dtype)
