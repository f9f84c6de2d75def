"""Attentions by what they are compiled for, so that planning a step is planning, not compiling.

A published wrapper states neither bounds nor when its configuration changes, so an Attention is
kept for each Options, and its bounds grow in powers of two until the steps fit. In CUDA-graph mode
the buffers state the bounds: one Attention, which every later plan must fit, as the graph knows no
other.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

import torch

import plait
from plait.flashinfer.refusals import refuse, tensor

MAX_ATTENTIONS = 8  # a pool's; an engine alternates between a few
_MAX_KEYS = _MAX_ROWS = 2**30  # of plait.Bounds
_SMALL_ROWS = 64  # packed rows of a request up to which a bound on q_len picks a smaller kernel


class Needs(NamedTuple):
    """What one step needs of the bounds."""

    requests: int
    query_tokens: int
    keys: int
    total_pages: int
    max_q_len: int


def _power_of_2(n):
    return 1 << max(0, n - 1).bit_length()


def _kernel_q_len(options, max_q_len):
    """The bound on q_len that a step is compiled for; 0: none. Short ones have kernels of their
    own, so they are kept apart rather than grown into one another."""
    bound = _power_of_2(max_q_len)
    return bound if bound * options.group_size <= _SMALL_ROWS else int(max_q_len <= 1)


class Pool:
    """The Attentions of one wrapper (or of single calls on one stream)."""

    def __init__(self, device, workspace):
        self._device, self._workspace = str(device), workspace
        self._kept = OrderedDict()  # (options, bound on q_len) -> (Needs, Attention)

    def get(self, options, needs):
        key = (options, _kernel_q_len(options, needs.max_q_len))
        bounds, attention = self._kept.get(key, (None, None))
        if bounds is None or any(need > bound for need, bound in zip(needs[:4], bounds)):
            limits = (_MAX_ROWS, _MAX_ROWS // max(1, options.num_qo_heads), _MAX_KEYS, 2**40)
            bounds = tuple(
                max(old, min(_power_of_2(need), limit))
                for need, old, limit in zip(needs, bounds or (1,) * 4, limits)
            )
            attention = make_attention(options, Needs(*bounds, key[1]), self._device,
                                       self._workspace)
            self._kept[key] = (bounds, attention)
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_ATTENTIONS:
            self._kept.popitem(last=False)
        return attention


class FixedPool:
    """CUDA-graph mode: what the first plan asks for, within the bounds of the buffers."""

    def __init__(self, device, workspace, bounds):
        self._device, self._workspace = str(device), workspace
        self._bounds = bounds  # (options, needs of the first plan) -> Needs
        self._options = self._attention = None

    def get(self, options, needs):
        if self._attention is None:
            self._attention = make_attention(options, self._bounds(options, needs), self._device,
                                             self._workspace)
            self._options = options
        for name, planned in vars(self._options).items():
            if getattr(options, name) != planned:
                refuse("plan", name, getattr(options, name),
                       f"{planned!r}, as first planned: a CUDA graph has that kernel; use another "
                       f"wrapper")
        return self._attention


def make_attention(options, needs, device, workspace):
    options.arguments(torch.device(device))  # on the device now, as run() may be captured
    config = options.config() | {"device": device, "bounds": plait.Bounds(**needs._asdict())}
    return plait.Attention(**config, workspace=workspace(plait.workspace_bytes(**config)))


def needed_bytes(options, needs, device):
    """Bytes of workspace for such plans; the bounds do not matter to flat formats."""
    needs = Needs(*(max(1, n) for n in needs[:4]), _kernel_q_len(options, needs.max_q_len))
    return plait.workspace_bytes(**options.config(), device=str(device),
                                 bounds=plait.Bounds(**needs._asdict()))


class UserWorkspace:
    """float_workspace_buffer as a plait.Workspace."""

    def __init__(self, where, buffer):
        tensor(where, "float_workspace_buffer", buffer)
        self.device = buffer.device
        self._bytes = buffer.numel() * buffer.element_size()
        self._buffer = buffer
        self._made = None

    def __call__(self, needed):
        if needed > self._bytes:
            raise ValueError(
                f"plan: float_workspace_buffer has {self._bytes} bytes; this plan needs {needed} "
                f"(workspace_size() tells)"
            )
        if self._made is None or self._made.bytes < needed:
            self._made = self._make(needed)
        return self._made

    def _make(self, needed):
        raw = self._buffer.reshape(-1).view(torch.uint8)
        aligned = raw[-raw.data_ptr() % 256:]
        if aligned.numel() >= needed:
            return plait.Workspace(buffer=aligned)
        # Large enough but for its alignment, which torch gives on CUDA but not on the CPU.
        return plait.Workspace(device=str(self.device), bytes=needed)


class OwnWorkspace:
    """Memory of the module's own, for calls that bring none."""

    def __init__(self, device):
        self.device = device
        self._made = None

    def __call__(self, needed):
        if self._made is None or self._made.bytes < needed:
            self._made = plait.Workspace(device=str(self.device), bytes=needed)
        return self._made


_single = threading.local()


def single_pool(device):
    """The pool of single_... calls: plan and run follow each other on one stream of one thread."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    pools = _single.__dict__.setdefault("pools", {})
    if (device, stream) not in pools:
        pools[device, stream] = Pool(device, OwnWorkspace(device))
    return pools[device, stream]
