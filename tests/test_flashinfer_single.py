"""plait.flashinfer: single requests, decode and prefill.

tests/gpu runs the same functions on CUDA.
"""

import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402

from flashinfer_cases import BF16, DIM, HEADS, KV_HEADS, check, numpy64, values  # noqa: E402
from variants import SoftCap  # noqa: E402


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_len", [0, 1, 65, 301])
def test_single_decode(device, layout, kv_len):
    q = values((HEADS, DIM), BF16, device, 1)
    k, v = (values((kv_len, KV_HEADS, DIM), BF16, device, s) for s in (2, 3))
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(),
                                            v.transpose(0, 1).contiguous())
    out, lse = flashinfer.single_decode_with_kv_cache(q, *given, layout, return_lse=True)
    assert out.shape == q.shape and lse.shape == (HEADS,)
    check((out[None], lse[None]), q[None], [1], [numpy64(k)], [numpy64(v)])
    out = flashinfer.single_decode_with_kv_cache(
        q, *given, layout, use_tensor_cores=True, window_left=7, logits_soft_cap=5.0, sm_scale=0.3,
        q_scale=0.5, k_scale=2.5, v_scale=0.25)
    check(out[None], q[None], [1], [numpy64(k)], [numpy64(v)], sm_scale=0.3 * 0.5 * 2.5,
          v_scale=0.25, window_left=7, functors=SoftCap(5.0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [(5, 5), (17, 130), (9, 4), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
def test_single_prefill(device, causal, lens, dtype):
    q = values((lens[0], HEADS, DIM), dtype, device, 1)
    k, v = (values((lens[1], KV_HEADS, d), dtype, device, s) for s, d in ((2, DIM), (3, 32)))
    options = {"causal": causal, "window_left": 11, "sm_scale": 0.2}
    for backend in ("auto", "fa2", "fa3"):
        result = flashinfer.single_prefill_with_kv_cache(
            q, k, v, backend=backend, use_fp16_qk_reduction=True, return_lse=True, **options)
        check(result, q, [lens[0]], [numpy64(k)], [numpy64(v)], **options)
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    again = flashinfer.single_prefill_with_kv_cache_return_lse(
        q, k, v, kv_layout="HND", o_dtype=dtype, **options)
    assert all(torch.equal(a, b) for a, b in zip(result, again))
