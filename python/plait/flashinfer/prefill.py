"""Prefill: single_prefill_with_kv_cache and the batch wrappers over paged and ragged K and V."""

import functools
from types import SimpleNamespace

from plait.flashinfer import batch as batches
from plait.flashinfer.options import checked, options_of
from plait.flashinfer.pool import Needs, UserWorkspace
from plait.flashinfer.refusals import backend as check_backend
from plait.flashinfer.refusals import refuse, refuse_all, refuse_extra, tensor
from plait.flashinfer.single import single
from plait.flashinfer.wrapper import Wrapper, graph_buffers, into_buffer, paged_cache

_NAMES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


def single_prefill_with_kv_cache(
    q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None,
    packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE",
    use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
    rope_scale=None, rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None,
    k_scale=None, v_scale=None,
):
    """Attention of one request.

    q [qo_len, num_qo_heads, head_dim_qk]; k, v [kv_len, num_kv_heads, dim], or with the first two
    swapped for "HND". causal: query i sees keys 0 ... i + kv_len - qo_len. custom_mask, bool
    [qo_len, kv_len], or its bits row after row (packbits, "little") takes the place of causal.
    use_fp16_qk_reduction allows less precision and gets float32. Returns out [qo_len, num_qo_heads,
    head_dim_vo], or (out, lse [qo_len, num_qo_heads] float32, base 2).
    """
    where = "single_prefill_with_kv_cache"
    check_backend(where, "single", backend)
    refuse_all(where, locals())
    mask = batches.mask(where, custom_mask, packed_custom_mask)
    return single(
        where, tensor(where, "q", q, 3), k, v, kv_layout,
        checked(where, causal, window_left, logits_soft_cap, pos_encoding_mode, rope_scale,
                rope_theta, bool(mask)),
        mask=mask, o_dtype=o_dtype, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale,
        return_lse=return_lse)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache,
                                                            return_lse=True)


class _BatchPrefill(Wrapper):
    """What the paged and the ragged wrapper share: CUDA-graph bounds, checks, forward()."""

    def _graph_bounds(self, options, needs):
        # As published: no later plan has more query tokens than the first.
        self._query_tokens = max(1, needs.query_tokens)
        keys, pages = self._graph_keys(options)
        return Needs(max(1, self._batch_size), self._query_tokens, keys, pages, 0)

    def _check(self, plan, batch):
        batch.check(plan)
        if not self.is_cuda_graph_enabled:
            return
        needs = batch.needs
        if needs.requests != self._batch_size:
            refuse("plan", "qo_indptr", batch.qo_indptr,
                   f"{self._batch_size + 1} entries, as many as the CUDA-graph buffers have")
        if needs.query_tokens > getattr(self, "_query_tokens", needs.query_tokens):
            raise ValueError(
                f"plan: qo_indptr ends at {needs.query_tokens}; with use_cuda_graph no plan takes "
                f"more query tokens than the first, {self._query_tokens}")

    def _forward(self, causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, *rope):
        self._check_planned()
        masked = self._options.custom_mask
        self._replan(sm_scale, **checked("forward", causal, window_left, logits_soft_cap,
                                         pos_encoding_mode, *rope, masked))


class BatchPrefillWithPagedKVCacheWrapper(_BatchPrefill):
    """Prefill, append and mixed batches over a paged cache.

    float_workspace_buffer holds partial results; workspace_size() says how many bytes a plan needs.
    With use_cuda_graph the buffers fix batch size and number of pages and the first plan the number
    of query tokens; page indices are copied into paged_kv_indices_buf, and the graph reads them
    there. custom_mask_buf and mask_indptr_buf are not needed: a plan keeps its mask. backend is a
    hint.
    """

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):
        where = type(self).__name__
        check_backend(where, "paged prefill", backend)
        refuse_all(where, locals())
        graph_buffers(where, False, custom_mask_buf=custom_mask_buf,
                      mask_indptr_buf=mask_indptr_buf)
        use_cuda_graph = bool(use_cuda_graph)
        lengths = graph_buffers(
            where, use_cuda_graph, qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf, paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf)
        if use_cuda_graph:
            num_qo, num_kv, _, self._batch_size = lengths
            if not num_qo == num_kv == self._batch_size + 1:
                refuse(where, "paged_kv_last_page_len_buf", paged_kv_last_page_len_buf,
                       f"one entry fewer than qo_indptr_buf and paged_kv_indptr_buf, which have "
                       f"{num_qo} and {num_kv}")
        self._indices_buffer = paged_kv_indices_buf if use_cuda_graph else None
        super().__init__(UserWorkspace(where, float_workspace_buffer), kv_layout,
                         self._graph_bounds if use_cuda_graph else None)

    def _graph_keys(self, options):
        pages = max(1, len(self._indices_buffer))
        return min(pages * options.page_size, 2**30), pages

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None,
        block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False,
    ) -> None:
        """Plans a step. Index arrays are int32 or int64; lengths best on the cpu (a copy from the
        device waits). custom_mask, bool, or its bits (segment_packbits, "little"), has for each
        request qo_len rows of kv_len keys, and takes the place of causal. seq_lens and seq_lens_q
        [batch] must agree with the lengths, none of which exceeds max_token_per_sequence and
        max_sequence_kv."""
        self._plan(*self._planned(locals()))

    begin_forward = plan

    def _planned(self, arguments):
        """(options, sm_scale, batch) of plan()'s arguments."""
        refuse_all("plan", arguments)
        plan = SimpleNamespace(**arguments)
        mask = batches.mask("plan", plan.custom_mask, plan.packed_custom_mask)
        options = options_of(plan, plan.page_size, self._kv_layout, plan.causal, bool(mask))
        qo_indptr = batches.host("plan", "qo_indptr", plan.qo_indptr)
        indices = plan.paged_kv_indices
        if self.is_cuda_graph_enabled:
            indices = into_buffer("plan", "paged_kv_indices", indices, self._indices_buffer)
        batch = batches.paged("plan", _NAMES, qo_indptr, plan.paged_kv_indptr, indices,
                              page_size=options.page_size,
                              last_page_len=plan.paged_kv_last_page_len)
        batch.mask = mask
        self._check(plan, batch)
        return options, plan.sm_scale, batch

    def workspace_size(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None,
        block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False,
    ):
        """(bytes that plan() needs of float_workspace_buffer, of the int workspace: 0). They do not
        depend on the lengths."""
        return self._workspace_size(*self._planned(locals()))

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None,
        kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        """q [qo_indptr[-1], num_qo_heads, head_dim_qk]; the cache as (k, v), 4-D by kv_layout, or
        one 5-D tensor [pages, 2, ...]. enable_pdl is a hint. Returns out [rows, num_qo_heads,
        head_dim_vo], or (out, lse [rows, num_qo_heads] float32, base 2)."""
        refuse_extra("run", args)
        refuse_all("run", locals())
        self._check_planned()
        self._check_window(window_left)
        return self._run(q, paged_cache("run", paged_kv_cache, self._kv_layout), q_scale, k_scale,
                         v_scale, out, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """Deprecated: run() with these in place of plan()'s, planned anew where they differ."""
        self._forward(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
                      rope_theta)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """Deprecated: forward() that returns (out, lse)."""
        self._forward(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
                      rope_theta)
        return self.run_return_lse(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)


class BatchPrefillWithRaggedKVCacheWrapper(_BatchPrefill):
    """Prefill over K and V in one tensor each, [kv tokens, num_kv_heads, dim] ("HND": the first two
    swapped).

    Workspace, CUDA-graph mode and hints as BatchPrefillWithPagedKVCacheWrapper's; kv_indptr_buf
    fixes the batch size, and k and v of the captured run how many rows a later plan may have.
    """

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
        jit_args=None, jit_kwargs=None,
    ):
        where = type(self).__name__
        check_backend(where, "ragged prefill", backend)
        refuse_all(where, locals())
        graph_buffers(where, False, custom_mask_buf=custom_mask_buf,
                      mask_indptr_buf=mask_indptr_buf)
        use_cuda_graph = bool(use_cuda_graph)
        lengths = graph_buffers(where, use_cuda_graph, qo_indptr_buf=qo_indptr_buf,
                                kv_indptr_buf=kv_indptr_buf)
        if use_cuda_graph:
            num_qo, num_kv = lengths
            if num_qo != num_kv or num_qo < 1:
                refuse(where, "kv_indptr_buf", kv_indptr_buf,
                       f"as many entries as qo_indptr_buf, {num_qo}")
            self._batch_size = num_qo - 1
        super().__init__(UserWorkspace(where, float_workspace_buffer), kv_layout,
                         self._graph_bounds if use_cuda_graph else None)

    def _graph_keys(self, options):
        return 2**30, 1

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
        custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None,
        disable_split_kv=False, seq_lens=None, seq_lens_q=None, max_token_per_sequence=None,
        max_sequence_kv=None, v_indptr=None, o_indptr=None,
    ) -> None:
        """Plans a step. Index arrays are int32 or int64, best on the cpu (a copy from the device
        waits). custom_mask, bool, or its bits (segment_packbits, "little"), has for each request
        qo_len rows of kv_len keys, and takes the place of causal. seq_lens and seq_lens_q [batch],
        v_indptr and o_indptr must agree with the lengths, none of which exceeds
        max_token_per_sequence and max_sequence_kv."""
        self._plan(*self._planned(locals()))

    begin_forward = plan

    def _planned(self, arguments):
        """(options, sm_scale, batch) of plan()'s arguments."""
        refuse_all("plan", arguments)
        plan = SimpleNamespace(**arguments)
        mask = batches.mask("plan", plan.custom_mask, plan.packed_custom_mask)
        options = options_of(plan, None, "NHD", plan.causal, bool(mask))
        batch = batches.ragged("plan", batches.host("plan", "qo_indptr", plan.qo_indptr),
                               batches.host("plan", "kv_indptr", plan.kv_indptr))
        batches.check_same("v_indptr", plan.v_indptr, batch.tables["kv_indptr"], "kv_indptr")
        batches.check_same("o_indptr", plan.o_indptr, batch.qo_indptr, "qo_indptr")
        batch.mask = mask
        self._check(plan, batch)
        return options, plan.sm_scale, batch

    def run(
        self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None,
        lse=None, return_lse=False, enable_pdl=None, kv_cache_sf=None,
    ):
        """q [qo_indptr[-1], num_qo_heads, head_dim_qk]; k, v 3-D by kv_layout. enable_pdl is a
        hint. Returns out [rows, num_qo_heads, head_dim_vo], or (out, lse [rows, num_qo_heads]
        float32, base 2)."""
        refuse_extra("run", args)
        refuse_all("run", locals())
        k, v = (tensor("run", name, x, 3) for name, x in (("k", k), ("v", v)))
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return self._run(q, (k, v), q_scale, k_scale, v_scale, out, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """Deprecated: run() with these in place of plan()'s, planned anew where they differ."""
        self._forward(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
                      rope_theta)
        return self.run(q, k, v)

    def forward_return_lse(
        self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):
        """Deprecated: forward() that returns (out, lse)."""
        self._forward(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
                      rope_theta)
        return self.run_return_lse(q, k, v)
