"""Decode: single_decode_with_kv_cache and the batch wrappers over a paged cache."""

import functools
import warnings
from types import SimpleNamespace

import numpy as np

from plait.arguments import integer
from plait.flashinfer import batch as batches
from plait.flashinfer.options import checked, options_of
from plait.flashinfer.pool import Needs, UserWorkspace
from plait.flashinfer.refusals import backend as check_backend
from plait.flashinfer.refusals import refuse, refuse_all, refuse_extra, tensor
from plait.flashinfer.single import single
from plait.flashinfer.wrapper import Wrapper, graph_buffers, into_buffer, paged_cache

_NAMES = ("indptr", "indices", "last_page_len")
# What may still be given by position after page_size, in this order.
_POSITIONAL = (
    "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type",
    "o_data_type", "data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking",
    "block_tables", "seq_lens", "fixed_split_size", "disable_split_kv", "q_len_per_req",
)


def single_decode_with_kv_cache(
    q, k, v, kv_layout="NHD", pos_encoding_mode="NONE", use_tensor_cores=False, q_scale=None,
    k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None,
    rope_scale=None, rope_theta=None, return_lse=False,
):
    """Attention of one query over its keys.

    q [num_qo_heads, head_dim]; k, v [kv_len, num_kv_heads, head_dim], or with the first two swapped
    for "HND". use_tensor_cores is a hint. Returns out like q, or (out, lse [num_qo_heads], base 2).
    """
    where = "single_decode_with_kv_cache"
    result = single(
        where, tensor(where, "q", q, 2)[None], k, v, kv_layout,
        checked(where, False, window_left, logits_soft_cap, pos_encoding_mode, rope_scale,
                rope_theta),
        sm_scale=sm_scale, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)
    return tuple(x[0] for x in result) if return_lse else result[0]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Decode of a batch, one query a request (q_len_per_req: so many, causal).

    float_workspace_buffer holds partial results; workspace_size() says how many bytes a plan needs.
    With use_cuda_graph the buffers fix batch size and number of pages, page indices are copied into
    paged_kv_indices_buffer, and the graph reads them there. use_tensor_cores and backend are hints.
    """

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None, backend="auto", jit_args=None,
    ):
        where = type(self).__name__
        check_backend(where, "decode", backend)
        refuse_all(where, locals())
        self._use_tensor_cores = bool(use_tensor_cores)
        use_cuda_graph = bool(use_cuda_graph)
        lengths = graph_buffers(
            where, use_cuda_graph, paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer)
        if use_cuda_graph:
            num_indptr, _, self._batch_size = lengths
            if num_indptr != self._batch_size + 1:
                refuse(where, "paged_kv_indptr_buffer", paged_kv_indptr_buffer,
                       f"{self._batch_size + 1} entries, one more than "
                       f"paged_kv_last_page_len_buffer")
        self._indices_buffer = paged_kv_indices_buffer if use_cuda_graph else None
        super().__init__(UserWorkspace(where, float_workspace_buffer), kv_layout,
                         self._graph_bounds if use_cuda_graph else None)

    def _graph_bounds(self, options, needs):
        pages = len(self._indices_buffer)
        return Needs(max(1, self._batch_size), max(1, self._batch_size * needs.max_q_len),
                     min(max(1, pages * options.page_size), 2**30), max(1, pages), needs.max_q_len)

    @property
    def use_tensor_cores(self) -> bool:
        """The hint as it was given."""
        return self._use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs,
    ) -> None:
        """Plans a step; see _plan_impl for the arguments. All but the first seven go by name; by
        position they are deprecated."""
        if deprecated_positional_args:
            if len(deprecated_positional_args) > len(_POSITIONAL):
                raise TypeError(f"plan: at most {len(_POSITIONAL)} arguments after page_size are "
                                f"taken by position, not {len(deprecated_positional_args)}")
            given = dict(zip(_POSITIONAL, deprecated_positional_args))
            for name in given:
                if name in kwargs:
                    raise TypeError(f"plan: {name} is given by position and by name")
            warnings.warn("plan: give the arguments after page_size by name; by position they are "
                          "deprecated", DeprecationWarning, stacklevel=2)
            kwargs |= given
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
                        page_size, **kwargs)

    begin_forward = plan

    def _plan_impl(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None,
        q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None,
        rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None,
        fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
    ) -> None:
        """indptr [batch + 1], indices [pages], last_page_len [batch]: int32 or int64; lengths best
        on the cpu (a copy from the device waits). seq_lens [batch] must agree with them."""
        self._plan(*self._planned(locals()))

    def _planned(self, arguments):
        """(options, sm_scale, batch) of plan()'s arguments."""
        refuse_all("plan", arguments)
        plan = SimpleNamespace(**arguments, head_dim_qk=arguments["head_dim"], head_dim_vo=None)
        q_len = integer("plan", "q_len_per_req", plan.q_len_per_req)
        if q_len < 1:
            refuse("plan", "q_len_per_req", q_len, "1 or more")
        plan.kv_data_type = plan.data_type if plan.kv_data_type is None else plan.kv_data_type
        plan.q_data_type = plan.data_type if plan.q_data_type is None else plan.q_data_type
        options = options_of(plan, plan.page_size, self._kv_layout, causal=q_len > 1)
        num_requests = len(tensor("plan", "last_page_len", plan.last_page_len, 1))
        indices = plan.indices
        if self.is_cuda_graph_enabled:
            if num_requests != self._batch_size:
                refuse("plan", "last_page_len", plan.last_page_len,
                       f"{self._batch_size} entries, as many as the CUDA-graph buffers have")
            indices = into_buffer("plan", "indices", indices, self._indices_buffer)
        qo_indptr = np.arange(0, (num_requests + 1) * q_len, q_len)
        batch = batches.paged("plan", _NAMES, qo_indptr, plan.indptr, indices,
                              page_size=options.page_size, last_page_len=plan.last_page_len)
        batches.check_same("seq_lens", plan.seq_lens, batch.kv_lens, "indptr and last_page_len say")
        return options, plan.sm_scale, batch

    def workspace_size(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None,
        rope_theta=None, block_tables=None, seq_lens=None, fixed_split_size=None,
        disable_split_kv=False, q_len_per_req=1,
    ):
        """(bytes that plan() needs of float_workspace_buffer, of the int workspace: 0). They do not
        depend on the lengths."""
        return self._workspace_size(*self._planned(locals()))

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None,
        q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    ):
        """q [batch * q_len_per_req, num_qo_heads, head_dim]; the cache as (k, v), 4-D by kv_layout,
        or one 5-D tensor [pages, 2, ...]. enable_pdl is a hint. Returns out like q, or (out, lse
        [rows, num_qo_heads] float32, base 2)."""
        refuse_extra("run", args)
        refuse_all("run", locals())
        self._check_planned()
        self._check_window(window_left)
        if q_len_per_req is not None:
            warnings.warn("run: give q_len_per_req to plan(); here it is deprecated",
                          DeprecationWarning, stacklevel=2)
            planned = self._batch.needs.max_q_len
            if q_len_per_req != planned and self._batch.needs.requests > 0:
                refuse("run", "q_len_per_req", q_len_per_req, f"None, or that of plan(), {planned}")
        return self._run(q, paged_cache("run", paged_kv_cache, self._kv_layout), q_scale, k_scale,
                         v_scale, out, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """Deprecated: run() with these in place of plan()'s, planned anew where they differ."""
        self._forward(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
                      rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """Deprecated: forward() that returns (out, lse)."""
        self._forward(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
                      rope_theta)
        return self.run_return_lse(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale,
                                   v_scale=v_scale)

    def _forward(self, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, *rope):
        self._check_planned()
        self._replan(sm_scale, **checked("forward", self._options.causal, window_left,
                                         logits_soft_cap, pos_encoding_mode, *rope))


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph."""

    def __init__(
        self, workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer,
        kv_layout="NHD", use_tensor_cores=False,
    ):
        super().__init__(
            workspace_buffer, kv_layout, use_cuda_graph=True, use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer, paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer)


def fast_decode_plan(
    self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
    pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type=None,
    kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
    non_blocking=True, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
    global_override_indptr_cpu=None,
) -> None:
    """plan() of a decode wrapper with indptr on the host, to be bound to it as a method:
    functools.partial(fast_decode_plan, wrapper). last_page_len best is on the cpu too."""
    if q_data_type is None:
        q_data_type = "float16" if data_type is None else data_type
    self._plan_impl(
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu, indices,
        last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode=pos_encoding_mode, window_left=window_left,
        logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
        data_type=data_type, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        non_blocking=non_blocking, fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv, q_len_per_req=q_len_per_req)
