"""What the drop-in module does not take, in one table, and the errors that say so.

Every argument of the published API is either honoured or here, with its one accepted value and the
reason; docs/flashinfer.md shows the same table, and a test compares the two.
"""

import contextlib
import re

import torch

from plait.arguments import shown

# name: (the value that is taken, why no other)
REFUSED = {
    "jit_args": (None, "its text is written for other kernels; plait.custom() takes C++ functors"),
    "jit_kwargs": (None, "it belongs to jit_args"),
    "sinks": (None, "learned sinks are not supported yet"),
    "kv_cache_sf": (None, "packed 4-bit caches are not supported"),
    "scale_q": (None, "fp8 queries are not supported"),
    "scale_k": (None, "scales per head are not supported; k_scale is one number"),
    "scale_v": (None, "scales per head are not supported; v_scale is one number"),
    "o_scale": (None, "outputs are not quantised"),
    "fixed_split_size": (None, "it promises bits that no batch changes, which plait cannot yet"),
    "skip_softmax_threshold_scale_factor": (None, "plait computes every visible key"),
    "use_fp16_softmax": (None, "softmax is in float32"),
    "uses_spcompress": (None, "sparse compression is not supported"),
    "block_tables": (None, "the page table is the CSR arrays beside it"),
    "prefix_len_ptr": (None, "multi-item scoring is not supported"),
    "token_pos_in_items_ptr": (None, "multi-item scoring is not supported"),
    "token_pos_in_items_len": (0, "multi-item scoring is not supported"),
    "max_item_len_ptr": (None, "multi-item scoring is not supported"),
    "window_right": (0, "decode sees no key beyond its own position"),
    "use_profiler": (False, "profile with the tools of docs/debugging.md"),
    "profiler_buffer": (None, "profile with the tools of docs/debugging.md"),
}
# Hints: any of these runs the kernel that plait chooses.
BACKENDS = {
    "single": ("auto", "fa2", "fa3"),
    "paged prefill": ("auto", "fa2", "fa3", "trtllm-gen", "cute-dsl"),
    "ragged prefill": ("auto", "fa2", "fa3", "cutlass", "cute-dsl"),
    "decode": ("auto", "fa2", "fa3", "trtllm-gen", "cute-dsl"),
}


def text(value):
    """A value in an error; tensors by shape and dtype, so that none is read from a device."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor {dtype} {list(value.shape)} on {value.device}"
    return shown(value)


def refuse(where, name, value, taken):
    raise ValueError(f"{where}: {name} is {text(value)}; taken is {taken}")


def refuse_all(where, arguments):
    """Refuses each of the arguments (by name, as locals() has them) that REFUSED has another value
    for."""
    for name, value in arguments.items():
        taken, why = REFUSED.get(name, (value, ""))
        if value is not taken and (taken is None or isinstance(value, torch.Tensor)
                                   or value != taken):
            refuse(where, name, value, f"{taken}: {why}")


def refuse_extra(where, args):
    """run(*args): parameters of a jit_args variant, or fp8 scales of one backend."""
    if args:
        raise ValueError(
            f"{where}: {len(args)} positional arguments after the cache; taken are none: they "
            f"belong to jit_args. Scales are q_scale=, k_scale=, v_scale="
        )


@contextlib.contextmanager
def in_callers_words(names):
    """Errors from inside with published names in place of plait's (names: plait's -> theirs)."""
    try:
        yield
    except (TypeError, ValueError) as error:
        words = re.compile(rf"\b({'|'.join(names)})\b")
        raise type(error)(words.sub(lambda m: names[m[0]], str(error))) from None


def one_of(where, name, value, taken):
    if not isinstance(value, str) or value not in taken:
        refuse(where, name, value, " or ".join(repr(x) for x in taken))
    return value


def backend(where, family, value):
    """Accepts the hint, or refuses it by name."""
    if value == "cudnn" and family.endswith("prefill"):
        refuse(where, "backend", value,
               "'auto': with 'cudnn' qo_indptr counts elements; give it in tokens")
    one_of(where, "backend", value, BACKENDS[family])


def scale(where, name, value, none=1.0):
    """A factor as a float, `none` for None. A tensor on a device would have to be waited for."""
    if value is None:
        return none
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(where, name, value, "a number or a tensor of one element on the cpu")
    return float(value)


def tensor(where, name, value, ndim=None):
    """value, if it is a torch tensor (of so many dimensions)."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: {name} is {text(value)}; taken is a torch tensor")
    if ndim is not None and value.ndim != ndim:
        refuse(where, name, value, f"a tensor of {ndim} dimensions")
    return value
