"""plait: attention for LLM serving.

An engine says which requests run and where their KV cache lies; plait plans the step and returns
attention states. `Attention` is the entry point; `python -m plait --help` is the command line.
"""

from plait.attention import Attention, Bounds, Workspace, workspace_bytes
from plait.compose import compose_radix
from plait.device_array import DeviceArray
from plait.formats import ComposedKv, Level, PagedKv, RaggedKv
from plait.operations import append_kv, merge_state, merge_states
from plait.plan import Plan, make_plan
from plait.tensors import Tensor
from plait.variants import (
    Variant,
    alibi,
    alibi_slopes,
    causal,
    custom,
    custom_mask,
    full,
    rms_norm,
    rope,
    sliding_window,
    soft_cap,
)

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "Bounds",
    "ComposedKv",
    "DeviceArray",
    "Level",
    "PagedKv",
    "Plan",
    "RaggedKv",
    "Tensor",
    "Variant",
    "Workspace",
    "alibi",
    "alibi_slopes",
    "append_kv",
    "causal",
    "compose_radix",
    "custom",
    "custom_mask",
    "full",
    "make_plan",
    "merge_state",
    "merge_states",
    "rms_norm",
    "rope",
    "sliding_window",
    "soft_cap",
    "workspace_bytes",
]
