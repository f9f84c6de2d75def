"""What of a plan is compiled or fixed: one value, by which Attentions are kept and found again."""

import dataclasses
import functools
import math

import torch

import plait
from plait.arguments import integer, number
from plait.flashinfer.refusals import one_of, refuse, scale

POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
_DTYPES = ("float16", "bfloat16", "float32")
_FP8 = ("float8_e4m3fn", "float8_e5m2")


def dtype_name(where, name, dtype):
    """"bfloat16" of "bfloat16" or torch.bfloat16."""
    if not isinstance(dtype, (str, torch.dtype)):
        refuse(where, name, dtype, "a torch.dtype or its name")
    return str(dtype).removeprefix("torch.")


def one_dtype(where, **dtypes):
    """The dtype of q and out: they must agree; None is that of the first."""
    (first, dtype), *others = dtypes.items()
    dtype = one_of(where, first, dtype_name(where, first, dtype), _DTYPES)
    for name, other in others:
        if other is not None and dtype_name(where, name, other) != dtype:
            refuse(where, name, dtype_name(where, name, other), f"that of {first}, {dtype}")
    return dtype


def kv_dtype(where, dtype, **dtypes):
    """Of K and V: None for that of q, else one of fp8; all that are given say the same."""
    (first, given), *others = dtypes.items()
    if given is None:
        return None
    given = dtype_name(where, first, given)
    if given != dtype and given not in _FP8:
        refuse(where, first, given, f"that of q, {dtype}, {_FP8[0]} or {_FP8[1]}")
    for name, other in others:
        if dtype_name(where, name, other) != given:
            refuse(where, name, dtype_name(where, name, other), f"that of {first}, {given}")
    return None if given == dtype else given


@dataclasses.dataclass(frozen=True)
class Options:
    """The static configuration of a plan. page_size None: ragged."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype: str
    page_size: int | None = None
    kv_layout: str = "NHD"
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    custom_mask: bool = False
    disable_split_kv: bool = False
    kv_dtype: str | None = None  # fp8; else dtype

    def __post_init__(self):  # before they are reckoned with; dims are checked by plait itself
        for name in ("num_qo_heads", "num_kv_heads", "page_size"):
            if name != "page_size" or self.page_size is not None:
                integer("plan", name, getattr(self, name), 1)

    @property
    def group_size(self):
        return max(1, self.num_qo_heads // self.num_kv_heads)

    def variant(self):
        variant = plait.causal() if self.causal else plait.full()
        if self.window_left >= 0:
            variant |= plait.sliding_window(self.window_left)
        if self.custom_mask:
            variant |= plait.custom_mask()
        if self.pos_encoding_mode == "ROPE_LLAMA":
            variant |= plait.rope(theta=self.rope_theta, scale=self.rope_scale)
        if self.pos_encoding_mode == "ALIBI":
            variant |= plait.alibi()
        if self.logits_soft_cap > 0:  # of logits with their bias
            variant |= plait.soft_cap(self.logits_soft_cap)
        return variant

    def arguments(self, device):
        """What every run() of the variant brings."""
        if self.pos_encoding_mode != "ALIBI":
            return {}
        return {"slopes": _slopes(self.num_qo_heads, device)}

    def config(self):
        """Arguments of plait.Attention, all but bounds and device."""
        return {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim_qk": self.head_dim_qk,
            "head_dim_vo": self.head_dim_vo,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "kv": plait.RaggedKv() if self.page_size is None
            else plait.PagedKv(self.page_size, self.kv_layout),
            "variant": self.variant(),
            "scheduler": "unsplit" if self.disable_split_kv else "auto",
        }


@functools.cache
def _slopes(num_qo_heads, device):
    return torch.from_numpy(plait.alibi_slopes(num_qo_heads)).to(device)


def checked(where, causal, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta,
            masked=False):
    """The fields of Options that say which logits a query sees and how, from published arguments.

    None and 0 are no soft cap, -1 no window, None of rope_scale 1 and of rope_theta 1e4. A custom
    mask takes the place of causal.
    """
    window_left = integer(where, "window_left", window_left)
    if window_left < -1:
        refuse(where, "window_left", window_left, "-1 (no window) or a length")
    cap = 0.0 if logits_soft_cap is None else number(where, "logits_soft_cap", logits_soft_cap)
    if cap < 0:
        refuse(where, "logits_soft_cap", cap, "None, 0 (no cap) or a number > 0")
    one_of(where, "pos_encoding_mode", pos_encoding_mode, POS_ENCODING_MODES)
    rope_scale = 1.0 if rope_scale is None else number(where, "rope_scale", rope_scale)
    rope_theta = 1e4 if rope_theta is None else number(where, "rope_theta", rope_theta)
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if value <= 0:
            refuse(where, name, value, "a number > 0")
    if pos_encoding_mode != "ROPE_LLAMA":  # they have no meaning then: one Attention for all
        rope_scale, rope_theta = 1.0, 1e4
    return {
        "causal": bool(causal) and not masked,
        "window_left": window_left,
        "logits_soft_cap": cap,
        "pos_encoding_mode": pos_encoding_mode,
        "rope_scale": rope_scale,
        "rope_theta": rope_theta,
        "custom_mask": masked,
    }


def sm_scale_of(options, sm_scale, *factors):
    """sm_scale times the factors; None where that is plait's own default."""
    factor = math.prod(factors)
    if sm_scale is None:
        return None if factor == 1.0 else factor / math.sqrt(options.head_dim_qk)
    return sm_scale * factor


def options_of(plan, page_size, kv_layout, causal, masked=False):
    """Options of a batch wrapper's plan(): `plan` has its arguments, under the prefill names. Its
    sm_scale becomes a number or None."""
    plan.sm_scale = scale("plan", "sm_scale", plan.sm_scale, None)
    dtype = one_dtype("plan", q_data_type=plan.q_data_type, o_data_type=plan.o_data_type)
    return Options(
        plan.num_qo_heads, plan.num_kv_heads, plan.head_dim_qk,
        plan.head_dim_qk if plan.head_dim_vo is None else plan.head_dim_vo,
        dtype, page_size, kv_layout, disable_split_kv=bool(plan.disable_split_kv),
        kv_dtype=kv_dtype("plan", dtype, kv_data_type=plan.kv_data_type),
        **checked("plan", causal, plan.window_left, plan.logits_soft_cap, plan.pos_encoding_mode,
                  plan.rope_scale, plan.rope_theta, masked))
