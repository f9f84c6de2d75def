"""plait.flashinfer over fp8 caches: k_scale and v_scale in every entry point.

tests/gpu runs the same functions on CUDA.
"""

import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, DIM, HEADS, KV_HEADS, LENS, check, decode_wrapper, indptr, numpy64, paged, plan_decode,
    prefill_wrapper, values, workspace,
)

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
K_SCALE, V_SCALE = 0.4, 3.0


def scaled(tensors, scale):
    return [x * scale for x in tensors]


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_decode_and_prefill(device, layout, dtype, kv_dtype):
    cache = paged(LENS, 16, device, layout, joint=layout == "HND", dtype=kv_dtype)
    k, v = scaled(cache.k, K_SCALE), scaled(cache.v, V_SCALE)
    scales = {"q_scale": 0.5, "k_scale": K_SCALE, "v_scale": torch.tensor(V_SCALE)}
    q = values((len(LENS), HEADS, DIM), dtype, device, 1)
    wrapper = decode_wrapper(device, layout)
    plan_decode(wrapper, cache, 16, dtype=dtype, kv_data_type=kv_dtype)
    result = wrapper.run(q, cache.cache, return_lse=True, **scales)
    check(result, q, [1] * len(q), k, v, scale=0.5)
    q_lens = [1, 3, 16, 5, 70]
    q = values((sum(q_lens), HEADS, DIM), dtype, device, 2)
    wrapper = prefill_wrapper(device, layout)
    wrapper.plan(indptr(q_lens), *cache.tables(), HEADS, KV_HEADS, DIM, 16, causal=True,
                 logits_soft_cap=0.0, sm_scale=0.1, q_data_type=dtype, kv_data_type=str(kv_dtype))
    out = torch.empty_like(q)
    result = wrapper.run(q, cache.cache, return_lse=True, out=out, **scales)
    assert result[0] is out
    check(result, q, q_lens, k, v, sm_scale=0.05, causal=True)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
def test_ragged_single_and_batch_attention(device, kv_dtype):
    q_lens, kv_lens = [3, 1, 20], [70, 5, 20]
    q = values((sum(q_lens), HEADS, DIM), BF16, device, 3)
    given = [values((sum(kv_lens), KV_HEADS, DIM), BF16, device, s).to(kv_dtype) for s in (4, 5)]
    k, v = (scaled([numpy64(part) for part in x.float().split(kv_lens)], scale)
            for x, scale in zip(given, (K_SCALE, V_SCALE)))
    scales = {"k_scale": K_SCALE, "v_scale": V_SCALE}
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr(q_lens), indptr(kv_lens), HEADS, KV_HEADS, DIM, causal=True,
                 pos_encoding_mode="ROPE_LLAMA", q_data_type=BF16, kv_data_type=kv_dtype)
    from flashinfer_cases import RopeLlama
    check(wrapper.run(q, *given, return_lse=True, **scales), q, q_lens, k, v, causal=True,
          functors=RopeLlama(1.0, 1e4))

    one = q[:1, :, :], [x[:70] for x in given]
    out, lse = flashinfer.single_decode_with_kv_cache(one[0][0], *one[1], return_lse=True, **scales)
    check((out[None], lse[None]), one[0], [1], k[:1], v[:1])
    check(flashinfer.single_prefill_with_kv_cache(q[:3], *one[1], causal=True, return_lse=True,
                                                  **scales), q[:3], [3], k[:1], v[:1], causal=True)

    cache = paged(LENS, 1, device, dtype=kv_dtype)
    wrapper = flashinfer.BatchAttention(device=device)
    wrapper.plan(indptr([1] * len(LENS)), cache.indptr, cache.indices, torch.tensor(LENS), HEADS,
                 KV_HEADS, DIM, DIM, 1, kv_data_type=kv_dtype)
    q = values((len(LENS), HEADS, DIM), BF16, device, 6)
    check(wrapper.run(q, cache.cache, **scales), q, [1] * len(LENS), scaled(cache.k, K_SCALE),
          scaled(cache.v, V_SCALE))


def test_dtypes_that_differ_are_refused(device):
    q = values((1, HEADS, DIM), BF16, device, 1)
    k = values((5, KV_HEADS, DIM), BF16, device, 2)
    for given, words in (((k.to(FP8[0]), k), "v is 'bfloat16'; taken is that of k, float8_e4m3fn"),
                         ((k.to(torch.float16),) * 2, "k is 'float16'")):
        with pytest.raises(ValueError, match=words):
            flashinfer.single_prefill_with_kv_cache(q, *given)
    cache = paged(LENS, 16, device)
    wrapper = decode_wrapper(device)
    plan_decode(wrapper, cache, 16, kv_data_type=FP8[0])
    with pytest.raises(ValueError, match="run: k is .*its dtype must be float8_e4m3fn"):
        wrapper.run(values((len(LENS), HEADS, DIM), BF16, device, 1), cache.cache)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
def test_append(device, kv_dtype):
    """Numbers are copied; values are rounded, at scale 1."""
    cache = paged([20], 16, device, dtype=kv_dtype)
    new = values((2, 20, KV_HEADS, DIM), BF16, device, 9)
    place = [torch.zeros(20, dtype=torch.int32), torch.arange(20, dtype=torch.int32)]
    for given in (new, new.to(kv_dtype)):
        flashinfer.append_paged_kv_cache(given[0], given[1], *place, cache.cache, cache.indices,
                                         cache.indptr, cache.last_page_len)
        for i, x in enumerate(cache.cache):
            pages = x[cache.indices.long().to(device)].float().flatten(0, 1)[:20]
            assert torch.equal(pages, new[i].to(kv_dtype).float())
