"""What all published wrappers share: a workspace, a pool of Attentions, plan and run."""

import dataclasses
import math

import torch

from plait.flashinfer.options import sm_scale_of
from plait.flashinfer.pool import FixedPool, Pool, UserWorkspace, needed_bytes
from plait.flashinfer.refusals import one_of, refuse, scale, tensor

LAYOUTS = ("NHD", "HND")
_LOG2E = math.log2(math.e)


class Wrapper:
    """Planned once, run any number of times; LSE in base 2."""

    def __init__(self, workspace, kv_layout, fixed_bounds=None):
        one_of("__init__", "kv_layout", kv_layout, LAYOUTS)
        self._kv_layout = kv_layout
        self._fixed_bounds = fixed_bounds
        self._attention = None
        self._set_workspace(workspace)

    def _set_workspace(self, workspace):
        self.device = workspace.device
        self._pool = (Pool(self.device, workspace) if self._fixed_bounds is None
                      else FixedPool(self.device, workspace, self._fixed_bounds))

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with use_cuda_graph."""
        return self._fixed_bounds is not None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer) -> None:
        """Another float workspace, of the same device or another; plan() again before run().

        plait has no use for the int workspace: a plan is kept in memory of its own.
        """
        self._set_workspace(UserWorkspace("reset_workspace_buffer", float_workspace_buffer))
        self._attention = None

    def end_forward(self) -> None:
        """Deprecated; does nothing."""

    def _plan(self, options, sm_scale, batch):
        attention = self._pool.get(options, batch.needs)
        batch.plan(attention)
        self._attention, self._options = attention, options
        self._sm_scale, self._batch = sm_scale, batch

    def _workspace_size(self, options, _, batch):
        return needed_bytes(options, batch.needs, self.device), 0

    def _replan(self, sm_scale, **changes):
        """forward(): its arguments replace those of the plan, index arrays as they were."""
        sm_scale = scale("forward", "sm_scale", sm_scale, None)
        options = dataclasses.replace(self._options, **changes)
        if options != self._options:
            self._plan(options, sm_scale, self._batch)
        self._sm_scale = sm_scale

    def _check_planned(self):
        if self._attention is None:
            raise ValueError("run: nothing is planned yet; call plan() first")

    def _check_window(self, window_left):
        if window_left is not None and window_left != self._options.window_left:
            refuse("run", "window_left", window_left,
                   f"None, or that of plan(), {self._options.window_left}")

    def _run(self, q, kv, q_scale, k_scale, v_scale, out, lse, return_lse, **variant_args):
        self._check_planned()
        return run(self._attention, self._options, q, kv, sm_scale=self._sm_scale, q_scale=q_scale,
                   k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
                   **variant_args)


def run(attention, options, q, kv, *, sm_scale, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None, return_lse=False, **variant_args):
    """Runs what is planned; out, or (out, lse in base 2). The scales of fp8 K and V go into the
    kernel; else k_scale joins the logits' scale, and v_scale multiplies the result."""
    factors = [scale("run", "q_scale", q_scale)]
    k_factor, v_factor = scale("run", "k_scale", k_scale), scale("run", "v_scale", v_scale)
    if options.kv_dtype:
        variant_args |= {"k_scale": k_factor, "v_scale": v_factor}
        v_factor = 1.0
    else:
        factors.append(k_factor)
    tensor("run", "q", q)
    out, lse = attention.run(q, kv, out=out, lse=lse, return_lse=return_lse,
                             sm_scale=sm_scale_of(options, sm_scale, *factors),
                             **options.arguments(q.device), **variant_args)
    if lse is not None:
        lse.mul_(_LOG2E)
    if v_factor != 1.0:
        out.mul_(v_factor)
    return (out, lse) if return_lse else out


def paged_cache(where, cache, kv_layout):
    """A paged cache as plait takes it. Of page size 1 that dimension may be left out."""
    page_dim = -3 if kv_layout == "NHD" else -2
    if isinstance(cache, (tuple, list)):
        if len(cache) != 2:
            raise ValueError(f"{where}: paged_kv_cache has {len(cache)} tensors; taken are (k, v) "
                             f"or one 5-D tensor")
        return tuple(tensor(where, "paged_kv_cache", x).unsqueeze(page_dim) if x.ndim == 3 else x
                     for x in cache)
    cache = tensor(where, "paged_kv_cache", cache)
    return cache.unsqueeze(page_dim) if cache.ndim == 4 else cache


def graph_buffers(where, use_cuda_graph, **buffers):
    """The sizes of the buffers that CUDA-graph mode needs. Without it they have no use: None."""
    for name, buffer in buffers.items():
        given = use_cuda_graph or buffer is not None
        if given and not (isinstance(buffer, torch.Tensor) and buffer.ndim == 1):
            refuse(where, name, buffer, "a 1-D tensor" + ", with use_cuda_graph" * use_cuda_graph)
    return [len(buffer) for buffer in buffers.values()] if use_cuda_graph else None


def into_buffer(where, name, array, buffer):
    """Copies indices to where a captured graph reads them; returns that."""
    array = tensor(where, name, array, 1)
    if len(array) > len(buffer):
        raise ValueError(f"{where}: {name} has {len(array)} entries, but its buffer {len(buffer)}")
    if array.data_ptr() != buffer.data_ptr():
        buffer[: len(array)].copy_(array, non_blocking=True)
    return buffer
