"""The variants of the tests: each as plait takes it, and as the reference does it, side by side.

The C++ text is written from host_device/variant.h (Params is written by plait from the parameters);
the NumPy beside it is the same formula written anew.
"""

import functools
from dataclasses import dataclass, field

import numpy as np

import plait
from plait.reference import Functors


@dataclass
class TestVariant:
    __test__ = False
    make: object                                  # () -> plait.Variant
    functors: Functors = field(default_factory=Functors)
    visibility: dict = field(default_factory=dict)
    arguments: object = lambda num_qo_heads, head_dim: {}  # variant arguments of run()
    custom: bool = False                          # compiled for the case, on the CPU too
    mask: str = ""                                # "all": over all keys; "last": over some at the end


class SoftCap(Functors):
    def __init__(self, cap):
        self.cap = cap

    def logits_transform(self, logit, c):
        cap = logit.dtype.type(self.cap)
        return cap * np.tanh(logit / cap)


# FlashSigmoid: weights are sigmoids of the logits, and there is no softmax.
SIGMOID = """
struct FlashSigmoid {
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float logit) {
    return 1.0f / (1.0f + exp(-(p.scale * logit + p.bias)));
  }
};
"""


class Sigmoid(Functors):
    use_softmax = False

    def logits_transform(self, logit, c):
        return 1 / (1 + np.exp(-(logit.dtype.type(0.75) * logit + logit.dtype.type(-2.0))))


def slopes(num_qo_heads):
    return (0.5 ** (1 + 8 * np.arange(num_qo_heads) / num_qo_heads)).astype(np.float32)


class Alibi(Functors):
    def logits_transform(self, logit, c):
        slope = slopes(int(c.qo_head.max()) + 1)[c.qo_head].astype(logit.dtype)
        return logit - slope * (c.q_pos - c.k_pos).astype(logit.dtype)


# A mask that no visibility can state: every third key of each head's own phase is hidden. Some
# queries of short requests see nothing.
STRIPES = """
struct Stripes {
  PLAIT_HD static bool logits_mask(const Params& p, const LogitContext& c) {
    return (c.k_pos + c.qo_head + c.request) % p.period != 0 && c.k_pos <= c.q_pos + 3;
  }
};
"""


class Stripes(Functors):
    def logits_mask(self, c):
        return ((c.k_pos + c.qo_head + c.request) % 3 != 0) & (c.k_pos <= c.q_pos + 3)


def norm_weights(head_dim):
    return {"q_norm_weight": (0.5 + np.arange(head_dim) % 5 / 4).astype(np.float32),
            "k_norm_weight": (1.5 - np.arange(head_dim) % 3 / 2).astype(np.float32)}


class RmsNorm(Functors):
    """q: whether Q is normed too. then: functors whose row transforms follow."""

    def __init__(self, q=True, then=None):
        self.q, self.then = q, then or Functors()

    def norm(self, x, which):
        square = (x * x).mean(-1, keepdims=True)
        weight = norm_weights(x.shape[-1])[f"{which}_norm_weight"].astype(x.dtype)
        return x / np.sqrt(square + x.dtype.type(1e-5)) * weight

    def query_transform(self, x, *at):
        return self.then.query_transform(self.norm(x, "q") if self.q else x, *at)

    def key_transform(self, x, *at):
        return self.then.key_transform(self.norm(x, "k"), *at)


# Keys scaled by their absolute position and kv head: wrong positions or heads are seen at once.
POSITION_SCALE = """
struct PositionScale {
  template <class Row>
  PLAIT_HD static void key_transform(const Params&, const RowContext& c, Row& row) {
    const float factor = 0.25f * static_cast<float>(1 + (c.position + 2 * c.head) % 5);
    row.map([=](int i, float x) { return i % 2 == 0 ? x * factor : x; });
  }
};
"""


class PositionScale(Functors):
    def key_transform(self, x, request, position, head):
        factor = 0.25 * (1 + (position[:, None] + 2 * head[None, :]) % 5)
        even = np.arange(x.shape[-1]) % 2 == 0
        return np.where(even, x * factor[..., None].astype(x.dtype), x)


# RoPE as a user may write it: cos and sin in tables [max position, dim / 2].
def rope_source(name, pairs):
    return f"""
struct {name} {{
  template <class Row>
  PLAIT_HD static void rotate(const Params& p, int position, Row& row) {{
    const int row_of_table = max(position, 0);  // a query before its first key sees nothing
    const float* c = p.cosines + row_of_table * (row.dim / 2);
    const float* s = p.sines + row_of_table * (row.dim / 2);
    row.{pairs}([=](int i, float& x, float& y) {{
      const float x0 = x;
      x = x0 * c[i] - y * s[i];
      y = x0 * s[i] + y * c[i];
    }});
  }}
  template <class Row>
  PLAIT_HD static void query_transform(const Params& p, const RowContext& c, Row& row) {{
    rotate(p, c.position, row);
  }}
  template <class Row>
  PLAIT_HD static void key_transform(const Params& p, const RowContext& c, Row& row) {{
    rotate(p, c.position, row);
  }}
}};
"""


MAX_ROPE_POSITION = 8192


@functools.cache
def rope_tables(head_dim):
    angle = np.arange(MAX_ROPE_POSITION)[:, None] * 10000.0 ** (
        -2 * np.arange(head_dim // 2) / head_dim)
    return {"cosines": np.cos(angle).astype(np.float32), "sines": np.sin(angle).astype(np.float32)}


class Rope(Functors):
    """The definition, with angles in float64. llama: (scale, low, high, old context)."""

    def __init__(self, adjacent, theta=1e4, rotary_dim=None, llama=None):
        self.adjacent, self.theta, self.rotary_dim, self.llama = adjacent, theta, rotary_dim, llama

    def frequencies(self, dim):
        frequency = self.theta ** (-2 * np.arange(dim // 2) / dim)
        if self.llama:
            scale, low, high, old = self.llama
            wavelength = 2 * np.pi / frequency
            smooth = np.clip((old / wavelength - low) / (high - low), 0, 1)
            frequency = smooth * frequency + (1 - smooth) * frequency / scale
        return frequency

    def key_transform(self, x, request, position, head):
        dim = self.rotary_dim or x.shape[-1]
        angle = position[:, None, None] * self.frequencies(dim)
        c, s = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
        first = slice(0, dim, 2) if self.adjacent else slice(0, dim // 2)
        second = slice(1, dim, 2) if self.adjacent else slice(dim // 2, dim)
        out = x.copy()
        out[..., first] = x[..., first] * c - x[..., second] * s
        out[..., second] = x[..., first] * s + x[..., second] * c
        return out

    query_transform = key_transform


class Masked(Functors):
    """Custom masks [q_len, kv_len] of each request, over other functors."""

    def __init__(self, masks, over):
        self.masks, self.over, self.use_softmax = masks, over, over.use_softmax
        for name in ("query_transform", "key_transform", "value_transform", "logits_transform",
                     "output_transform"):
            setattr(self, name, getattr(over, name))

    def logits_mask(self, c):
        return self.masks[c.request][:, None, :] & self.over.logits_mask(c)


# Values by position and head; queries by position and head; results by dimension.
VALUE_SCALE = """
struct ValueScale {
  template <class Row>
  PLAIT_HD static void value_transform(const Params&, const RowContext& c, Row& row) {
    const float factor = 0.5f * static_cast<float>(1 + (c.position + c.head) % 3);
    row.map([=](int i, float x) { return x * factor + 0.125f * static_cast<float>(i % 4); });
  }
};
"""


class ValueScale(Functors):
    def value_transform(self, x, request, position, head):
        factor = 0.5 * (1 + (position[:, None] + head[None, :]) % 3)
        return x * factor[..., None].astype(x.dtype) + (
            0.125 * (np.arange(x.shape[-1]) % 4)).astype(x.dtype)


EVERYTHING = """
struct Everything {
  template <class Row>
  PLAIT_HD static void query_transform(const Params&, const RowContext& c, Row& row) {
    const float factor = 0.5f + 0.25f * static_cast<float>((c.position + 3 * c.head + c.request) % 4);
    row.map([=](int, float x) { return x * factor; });
  }
  template <class Row>
  PLAIT_HD static void key_transform(const Params&, const RowContext& c, Row& row) {
    row.map_half_pairs([=](int, float& x, float& y) {
      const float x0 = x;
      x = c.position % 2 == 0 ? y : x0;
      y = c.position % 2 == 0 ? x0 : -y;
    });
  }
  template <class Row>
  PLAIT_HD static void value_transform(const Params&, const RowContext&, Row& row) {
    row.map([](int, float x) { return x - 0.25f; });
  }
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext& c, float logit) {
    return logit * p.gain + 0.1f * static_cast<float>((c.kv_head + c.k_pos) % 3);
  }
  PLAIT_HD static bool logits_mask(const Params&, const LogitContext& c) {
    return c.k_pos % 7 != 3;
  }
  PLAIT_HD static float output_transform(const Params&, const OutputContext& c, float value) {
    return value * (c.dim % 2 == 0 ? 2.0f : -1.0f) + 0.5f * static_cast<float>(c.qo_head % 2);
  }
};
"""


class Everything(Functors):
    def query_transform(self, x, request, position, head):
        at = position[:, None] + 3 * head[None, :] + request
        factor = 0.5 + 0.25 * np.fmod(at, 4)  # C++ remainder: the sign of the dividend
        return x * factor[..., None].astype(x.dtype)

    def key_transform(self, x, request, position, head):
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        even = (position % 2 == 0)[:, None, None]
        return np.concatenate([np.where(even, b, a), np.where(even, a, -b)], -1)

    def value_transform(self, x, request, position, head):
        return x - x.dtype.type(0.25)

    def logits_transform(self, logit, c):
        return logit * logit.dtype.type(0.5) + (0.1 * ((c.kv_head + c.k_pos) % 3)).astype(logit.dtype)

    def logits_mask(self, c):
        return c.k_pos % 7 != 3

    def output_transform(self, value, c):
        factor = np.where(c.dim % 2 == 0, 2.0, -1.0).astype(value.dtype)
        return value * factor + (0.5 * (c.qo_head % 2)).astype(value.dtype)


OUTPUT = """
struct OutputGain {
  PLAIT_HD static float output_transform(const Params& p, const OutputContext& c, float value) {
    return value * p.gains[c.qo_head] + p.shift * static_cast<float>(c.dim % 3);
  }
};
"""


class OutputGain(Functors):
    def output_transform(self, value, c):
        gain = slopes(int(c.qo_head.max()) + 1)[c.qo_head].astype(value.dtype)
        return value * gain + (0.25 * (c.dim % 3)).astype(value.dtype)


TENSOR = plait.Tensor  # a parameter that is a float32 tensor, given to run()
CAUSAL = {"causal": True}


def _custom(name, struct, source, params=None, use_softmax=True):
    return lambda: plait.custom(name, struct, source, params or {}, use_softmax)


_position = _custom("position_scale", "PositionScale", POSITION_SCALE)
_value = _custom("value_scale", "ValueScale", VALUE_SCALE)
_stripes = _custom("stripes", "Stripes", STRIPES, {"period": 3})
_everything = _custom("everything", "Everything", EVERYTHING, {"gain": 0.5})
_sigmoid = _custom("flash_sigmoid", "FlashSigmoid", SIGMOID, {"scale": 0.75, "bias": -2.0}, False)
_output = _custom("output_gain", "OutputGain", OUTPUT, {"gains": TENSOR, "shift": 0.25})
_tables = _custom("rope_tables", "RopeTables", rope_source("RopeTables", "map_adjacent_pairs"),
                  {"cosines": TENSOR, "sines": TENSOR})


def _slopes(name):
    return lambda num_qo_heads, head_dim: {name: slopes(num_qo_heads)}


VARIANTS = {
    "full": TestVariant(lambda: plait.full()),
    "causal": TestVariant(lambda: plait.causal(), visibility=CAUSAL),
    "window0": TestVariant(lambda: plait.causal() | plait.sliding_window(0),
                           visibility=CAUSAL | {"window_left": 0}),
    "window17": TestVariant(lambda: plait.causal() | plait.sliding_window(17),
                            visibility=CAUSAL | {"window_left": 17}),
    "window_not_causal": TestVariant(lambda: plait.sliding_window(63),
                                     visibility={"window_left": 63}),
    "window_sinks": TestVariant(lambda: plait.causal() | plait.sliding_window(31, sink_tokens=4),
                                visibility=CAUSAL | {"window_left": 31, "sink_tokens": 4}),
    "soft_cap": TestVariant(lambda: plait.soft_cap(3.0), SoftCap(3.0)),
    "causal_soft_cap": TestVariant(lambda: plait.causal() | plait.soft_cap(5.0), SoftCap(5.0), CAUSAL),
    "sigmoid": TestVariant(lambda: plait.causal() | _sigmoid(), Sigmoid(), CAUSAL, custom=True),
    "sigmoid_full": TestVariant(_sigmoid, Sigmoid(), custom=True),
    "alibi": TestVariant(lambda: plait.causal() | plait.alibi(), Alibi(), CAUSAL, _slopes("slopes")),
    "stripes": TestVariant(_stripes, Stripes(), custom=True),
    "rms_norm_rope": TestVariant(
        lambda: plait.causal() | plait.rms_norm(eps=1e-5) | plait.rope(theta=5e5),
        RmsNorm(then=Rope(False, 5e5)), CAUSAL, lambda h, d: norm_weights(d), custom=True),
    "position_scale": TestVariant(_position, PositionScale(), custom=True),
    "rope": TestVariant(lambda: plait.causal() | plait.rope(), Rope(False), CAUSAL, custom=True),
    "rope_partial": TestVariant(
        lambda: plait.rope(rotary_dim=24, scale=8.0, old_context_len=64),
        Rope(False, rotary_dim=24, llama=(8, 1, 4, 64)), custom=True),
    "rope_interleaved": TestVariant(
        lambda: plait.causal() | plait.rope(interleave=True, rotary_dim=32),
        Rope(True, rotary_dim=32), CAUSAL, custom=True),
    "rope_tables": TestVariant(lambda: plait.causal() | _tables(), Rope(True), CAUSAL,
                               lambda h, d: rope_tables(d), custom=True),
    "mask": TestVariant(lambda: plait.custom_mask(), mask="all"),
    "mask_last": TestVariant(lambda: plait.causal() | plait.custom_mask(), visibility=CAUSAL,
                             mask="last"),
    "mask_with_all": TestVariant(
        lambda: (plait.causal() | plait.sliding_window(40, sink_tokens=3) | plait.custom_mask()
                 | plait.soft_cap(5.0)),
        SoftCap(5.0), CAUSAL | {"window_left": 40, "sink_tokens": 3}, custom=True, mask="last"),
    "value_scale": TestVariant(lambda: plait.causal() | _value(), ValueScale(), CAUSAL, custom=True),
    "output_gain": TestVariant(_output, OutputGain(), {}, _slopes("gains"), custom=True),
    "everything": TestVariant(lambda: plait.causal() | _everything(), Everything(), CAUSAL,
                              custom=True),
}
