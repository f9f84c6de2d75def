"""plait.flashinfer: what is refused, and by which name.

tests/gpu runs the same functions on CUDA.
"""

import functools

import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, DIM, HEADS, KV_HEADS, LENS, decode_wrapper, indptr, paged, plan_decode, plan_prefill,
    prefill_wrapper, refused, values,
)


def test_index_arrays_are_refused_by_the_callers_names(device):
    """C20: malformed tables name the argument as the caller knows it, the request and the value."""
    cache = paged([20, 33], 16, device)
    good, indices, last = cache.tables()
    wrapper = decode_wrapper(device)

    def plan(i=good, x=indices, n=last):
        wrapper.plan(i, x, n, HEADS, KV_HEADS, DIM, 16, q_data_type=BF16)

    int32 = functools.partial(torch.tensor, dtype=torch.int32)
    for bad in (17, 0, -1):
        refused(lambda: plan(n=int32([4, bad])), "plan: last_page_len[1]", str(bad))  # noqa: B023
    refused(lambda: plan(i=int32([0, 3, 2])), "plan: indptr[2]", "2", "3")
    refused(lambda: plan(i=int32([1, 2, 5])), "plan: indptr[0]", "1")
    refused(lambda: plan(i=int32([0, 2, 9])), "plan: indptr[2]", "9", "indices", "5")
    refused(lambda: plan(n=int32([4])), "last_page_len has 1", "indptr")
    refused(lambda: plan(i=good[None]), "indptr", "[1, 3]", "1 dim")
    refused(lambda: plan(i=[0, 2, 5]), "indptr", "torch tensor", error=TypeError)
    refused(lambda: plan(i=good.float()), "indptr", "float32", "int32")
    # Without pages the last one's length is 0, or page_size as (0 - 1) % 16 + 1.
    for empty in (0, 16):
        plan(i=int32([0, 0, 3]), x=indices[:3], n=int32([empty, 1]))
    refused(lambda: plan(i=int32([0, 0, 3]), n=int32([5, 1])), "last_page_len[0]", "5")
    prefill = prefill_wrapper(device)
    refused(lambda: prefill.plan(indptr([1, 1, 1]), good, indices, last, HEADS, KV_HEADS, DIM, 16),
            "paged_kv_last_page_len has 2", "paged_kv_indptr 3", "3 requests")
    refused(lambda: prefill.plan(int32([0, 2, 1]), good, indices, last, HEADS, KV_HEADS, DIM, 16),
            "qo_indptr[2]")
    refused(lambda: prefill.plan(indptr([1, 1]), good, indices, int32([4, 17]), HEADS, KV_HEADS, DIM,
                                 16), "paged_kv_last_page_len[1]", "17")


def test_arguments_are_refused_by_name(device):
    cache = paged(LENS, 16, device)
    q = values((len(LENS), HEADS, DIM), BF16, device, 7)
    decode, prefill = decode_wrapper(device), prefill_wrapper(device)
    plan_decode(decode, cache, 16)
    plan_prefill(prefill, [1] * len(LENS), cache, 16)
    ones = torch.ones(HEADS, device=device)

    for more, words in (
        ({"window_left": -2}, ("window_left is -2", "-1")),
        ({"window_left": 1.5}, ("window_left is 1.5", "integer")),
        ({"logits_soft_cap": -1.0}, ("logits_soft_cap is -1.0", "> 0")),
        ({"pos_encoding_mode": "XPOS"}, ("pos_encoding_mode is 'XPOS'", "'NONE'")),
        ({"rope_theta": 0.0}, ("rope_theta is 0.0",)),
        ({"sm_scale": -1.0}, None),  # of run()
        ({"q_data_type": "float64"}, ("q_data_type is 'float64'", "bfloat16")),
        ({"q_data_type": torch.float8_e4m3fn}, ("q_data_type is 'float8_e4m3fn'", "bfloat16")),
        ({"kv_data_type": torch.float16}, ("kv_data_type is 'float16'", "bfloat16", "float8_e5m2")),
        ({"o_data_type": torch.float16}, ("o_data_type is 'float16'", "bfloat16")),
        ({"fixed_split_size": 4}, ("fixed_split_size is 4", "None")),
        ({"block_tables": torch.zeros(5, 5)}, ("block_tables is a tensor float32 [5, 5]", "None")),
    ):
        if words is not None:
            options = {"q_data_type": BF16} | more
            for call in (
                lambda: decode.plan(*cache.tables(), HEADS, KV_HEADS, DIM, 16, **options),  # noqa: B023
                lambda: prefill.plan(indptr([1] * len(LENS)), *cache.tables(), HEADS, KV_HEADS,
                                     DIM, 16, **options),  # noqa: B023
            ):
                refused(call, "plan: ", *words, error=(ValueError, TypeError))
    refused(lambda: plan_decode(decode, cache, 16, window_right=1), "window_right is 1", "0")
    refused(lambda: plan_decode(decode, cache, 16, q_len_per_req=0), "q_len_per_req is 0")
    refused(lambda: plan_decode(decode, cache, 16, seq_lens=torch.ones(5)), "seq_lens")
    refused(lambda: plan_prefill(prefill, [1] * 5, cache, 16, token_pos_in_items_len=3), "3")

    for more, words in (
        ({"sinks": ones}, ("sinks is a tensor", "None")),
        ({"kv_cache_sf": ones}, ("kv_cache_sf", "None")),
        ({"window_left": 4}, ("window_left is 4", "-1")),
        ({"skip_softmax_threshold_scale_factor": 1.0}, ("skip_softmax", "None")),
        ({"k_scale": ones}, ("k_scale is a tensor", "one element")),
        ({"v_scale": "2"}, ("v_scale is '2'", "number")),
        ({"q_scale": -1.0}, ("sm_scale is -0.125", "> 0")),
        ({"out": torch.zeros_like(q[:, :, :32])}, ("out", "32", "64")),
        ({"lse": torch.zeros(len(q), HEADS, dtype=BF16, device=device), "return_lse": True}, ("lse",)),
    ):
        for wrapper in (decode, prefill):
            refused(lambda: wrapper.run(q, cache.cache, **more), *words)  # noqa: B023
    for wrapper in (decode, prefill):
        refused(lambda: wrapper.run(q, cache.cache, 1.0, 2.0), "2 positional", "k_scale=")  # noqa: B023
        refused(lambda: wrapper.run(q, (cache.cache[0],)), "paged_kv_cache has 1")  # noqa: B023
        refused(lambda: wrapper.run(q.half(), cache.cache), "q", "float16", "bfloat16")  # noqa: B023
    refused(lambda: prefill.run(q, cache.cache, use_fp16_softmax=True), "use_fp16_softmax is True")

    refused(lambda: decode_wrapper(device).run(q, cache.cache), "call plan() first")
    refused(lambda: decode_wrapper(device, backend="xqa"), "backend is 'xqa'", "'fa2'")
    refused(lambda: prefill_wrapper(device, backend="cudnn"), "backend is 'cudnn'", "elements")
    refused(lambda: prefill_wrapper(device, "BHSD"), "kv_layout is 'BHSD'", "HND")
    refused(lambda: prefill_wrapper(device, jit_args=["name"]), "jit_args", "plait.custom")
    single = functools.partial(flashinfer.single_prefill_with_kv_cache, q, q[:, :2], q[:, :2])
    for more, words in (
        ({"scale_q": ones}, ("scale_q", "None")),
        ({"kv_layout": "SHD"}, ("kv_layout is 'SHD'",)),
        ({"o_dtype": torch.float16}, ("o_dtype is 'float16'", "bfloat16")),
        ({"backend": "cutlass"}, ("backend is 'cutlass'", "'fa3'")),
    ):
        refused(lambda: single(**more), "single_prefill_with_kv_cache: ", *words)  # noqa: B023
    attention = flashinfer.BatchAttention("NHD", device)
    refused(lambda: attention.plan(indptr([1]), *cache.tables(), 4, 2, 64, 64, 16, use_profiler=True),
            "use_profiler is True")
