"""plait inside torch.compile: torch custom operators with fake kernels. Importing this registers
torch.ops.plait.attention and torch.ops.plait.run; needs torch.

An Attention crosses as an integer handle, a SymInt in the schema, so that one compiled graph serves
every Attention and every plan.
"""

import itertools
import weakref

import torch

from plait.attention import Attention

_handles = itertools.count(2)  # 0 and 1 would be specialised on by torch.compile
_attentions = weakref.WeakValueDictionary()
_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "attention(SymInt attention, Tensor q, Tensor k, Tensor v, float? sm_scale=None, "
    "float k_scale=1.0, float v_scale=1.0) -> (Tensor, Tensor)"
)
_library.define(
    "run(SymInt attention, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, "
    "float? sm_scale=None, float k_scale=1.0, float v_scale=1.0) -> ()"
)


def handle(attention: Attention) -> int:
    """The integer that stands for `attention` in torch.ops.plait; the same for as long as it lives.

    Keep the Attention alive yourself. Raises ValueError for a variant without softmax, which has no
    lse to return.
    """
    if not attention._has_lse:
        raise ValueError("torch.ops.plait returns lse; a variant without softmax has none")
    known = getattr(attention, "_torch_handle", None)
    if known is None:
        known = attention._torch_handle = next(_handles)
        _attentions[known] = attention
    return known


def _attention_of(number):
    try:
        return _attentions[number]
    except KeyError:
        raise ValueError(
            f"torch.ops.plait: no Attention has handle {number}; plait.torch_ops.handle() "
            f"gives one, while the Attention lives"
        ) from None


def _attention(number, q, k, v, sm_scale=None, k_scale=1.0, v_scale=1.0):
    return _attention_of(number).run(q, (k, v), sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale)


def _run(number, q, k, v, out, lse, sm_scale=None, k_scale=1.0, v_scale=1.0):
    _attention_of(number).run(
        q, (k, v), out=out, lse=lse, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale
    )


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)
    _library.impl("run", _run, _key)


@torch.library.register_fake("plait::attention", lib=_library)
def _(number, q, k, v, sm_scale=None, k_scale=1.0, v_scale=1.0):
    return (q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty(q.shape[:2], dtype=torch.float32))


@torch.library.register_fake("plait::run", lib=_library)
def _(number, q, k, v, out, lse, sm_scale=None, k_scale=1.0, v_scale=1.0):
    return None
