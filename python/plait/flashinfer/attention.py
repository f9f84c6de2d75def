"""BatchAttention: mixed batches over a paged cache, as the persistent kernel takes them."""

import torch

from plait.flashinfer import batch as batches
from plait.flashinfer.options import Options, checked, kv_dtype, one_dtype
from plait.flashinfer.pool import OwnWorkspace
from plait.flashinfer.refusals import refuse, refuse_all, scale
from plait.flashinfer.wrapper import Wrapper, paged_cache

_NAMES = ("kv_indptr", "kv_indices", "kv_len_arr")


class BatchAttention(Wrapper):
    """Decode and prefill requests side by side. Its workspace is its own."""

    def __init__(self, kv_layout="NHD", device="cuda"):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(OwnWorkspace(device), kv_layout)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk,
        head_dim_vo, page_size, causal=False, sm_scale=None, logits_soft_cap=None,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, use_profiler=False,
    ) -> None:
        """Plans a step. kv_indptr counts pages; kv_len_arr [batch] has the lengths. Index arrays
        are int32 or int64; all but kv_indices best on the cpu (a copy from the device waits)."""
        refuse_all("plan", locals())
        dtype = one_dtype("plan", q_data_type=q_data_type)
        options = Options(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, dtype, page_size,
            self._kv_layout, kv_dtype=kv_dtype("plan", dtype, kv_data_type=kv_data_type),
            **checked("plan", causal, -1, logits_soft_cap, "NONE", None, None))
        batch = batches.paged("plan", _NAMES, batches.host("plan", "qo_indptr", qo_indptr),
                              kv_indptr, kv_indices, page_size=page_size, kv_len=kv_len_arr)
        self._plan(options, scale("plan", "sm_scale", sm_scale, None), batch)

    def run(
        self, q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0,
        profiler_buffer=None, kv_cache_sf=None,
    ):
        """Returns (out [rows, num_qo_heads, head_dim_vo], lse [rows, num_qo_heads] float32, base
        2). logits_soft_cap: 0 is that of plan(); another takes its place in this call."""
        refuse_all("run", locals())
        self._check_planned()
        cap = {}
        if logits_soft_cap:
            if self._options.logits_soft_cap == 0:
                refuse("run", "logits_soft_cap", logits_soft_cap, "0: plan() has no soft cap")
            cap["cap"] = logits_soft_cap
        return self._run(q, paged_cache("run", kv_cache, self._kv_layout), None, k_scale, v_scale,
                         out, lse, True, **cap)
