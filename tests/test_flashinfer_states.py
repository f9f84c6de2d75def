"""plait.flashinfer: merging of states, and their LSE in base 2.

tests/gpu runs the same functions on CUDA.
"""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer, reference  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, HEADS, KV_HEADS, decode_wrapper, indptr, numpy64, prefill_wrapper, refused, values,
    workspace,
)
from harness import compare  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
def test_c01_merge(device, dtype):
    """C01 in base 2: empty states are the identity bit for bit; 1 and 3 of equal weight give 2."""
    v_a, v_b = (values((4, 3, 64), dtype, device, s) for s in (1, 2))
    v_a[3], v_b[3] = 1, 3
    s_a = torch.tensor([-math.inf, -math.inf, 2, 2], device=device)[:, None].repeat(1, 3)
    s_b = torch.tensor([-math.inf, 2, -math.inf, 2], device=device)[:, None].repeat(1, 3)
    v_a[:2], v_b[0], v_b[2] = math.nan, math.nan, math.nan  # of empty states: never read
    v, s = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    for mask in (None, [True, False, True, True]):
        in_v, in_s = v_a.clone(), s_a.clone()
        given = None if mask is None else torch.tensor(mask, device=device)
        flashinfer.merge_state_in_place(in_v, in_s, v_b, s_b, given)
        for got_v, got_s in ((v, s), (in_v, in_s)):
            if got_v is in_v and mask is not None:  # the row left alone was empty
                assert (got_v[1] == 0).all() and (got_s[1] == -math.inf).all()
            else:
                assert torch.equal(got_v[1], v_b[1]) and (got_s[1] == 2).all()
            assert (got_v[0] == 0).all() and (got_s[0] == -math.inf).all()
            assert torch.equal(got_v[2], v_a[2]) and (got_s[2] == 2).all()
            assert (got_v[3] == 2).all() and (got_s[3] == 3).all()
    for n in (1, 3, 5):
        many = torch.full((2, n, 3, 64), math.nan, dtype=dtype, device=device)
        many_s = torch.full((2, n, 3), -math.inf, device=device)
        many[1, -1], many_s[1, -1] = v_b[1], 2.5
        v, s = flashinfer.merge_states(many, many_s)
        assert (v[0] == 0).all() and (s[0] == -math.inf).all()
        assert torch.equal(v[1], v_b[1]) and (s[1] == 2.5).all()


def test_merges_are_unions(device):
    v = values((7, 3, HEADS, 64), torch.float32, device, 1)
    s = 4 * values((7, 3, HEADS), torch.float32, device, 2)
    natural = [(numpy64(v[:, i]), numpy64(s[:, i]) * math.log(2)) for i in range(3)]
    want, want_lse = reference.merge(natural)
    got = flashinfer.merge_states(v, s)
    for name, a, b in zip("vs", got, (want, want_lse / math.log(2))):
        compare(name, numpy64(a), b, 4e-6 * np.abs(b).max())
    got = flashinfer.merge_state(v[:, 0], s[:, 0].double(), v[:, 1], s[:, 1].double())
    want, want_lse = reference.merge(natural[:2])
    for name, a, b in zip("vs", got, (want, want_lse / math.log(2))):
        compare(name, numpy64(a), b, 4e-6 * np.abs(b).max())
    refused(lambda: flashinfer.merge_state_in_place(v[:, 0], s[:, 0].double(), v[:, 1], s[:, 1]),
            "s is a tensor float64", "float32")
    refused(lambda: flashinfer.merge_state_in_place(
        v[:, 0], s[:, 0], v[:, 1], s[:, 1], torch.ones(6, device=device)), "mask", "[7]")


def test_c04_lse_is_base_2(device):
    """C04: 4096 equal keys are 12 at every entry point, and a split merges to the whole."""
    k = torch.zeros(4096, KV_HEADS, 128, dtype=BF16, device=device)
    q = values((2, HEADS, 128), BF16, device, 1)
    _, lse = flashinfer.single_decode_with_kv_cache(q[0], k, k, return_lse=True)
    results = [lse, flashinfer.single_prefill_with_kv_cache_return_lse(q, k, k)[1]]
    pages = k.view(256, 16, KV_HEADS, 128)
    tables = indptr([256]), torch.arange(256).int(), torch.tensor([16])
    decode, prefill = decode_wrapper(device), prefill_wrapper(device)
    decode.plan(*tables, HEADS, KV_HEADS, 128, 16, q_data_type=BF16)
    results.append(decode.run_return_lse(q[:1], (pages, pages))[1])
    prefill.plan(indptr([2]), *tables, HEADS, KV_HEADS, 128, 16, q_data_type=BF16)
    results.append(prefill.run_return_lse(q, (pages, pages))[1])
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(indptr([2]), indptr([4096]), HEADS, KV_HEADS, 128, q_data_type=BF16)
    results.append(ragged.run_return_lse(q, k, k)[1])
    attention = flashinfer.BatchAttention(device=device)
    attention.plan(indptr([2]), *tables[:2], torch.tensor([4096]), HEADS, KV_HEADS, 128, 128, 16)
    results.append(attention.run(q, (pages, pages))[1])
    for lse in results:
        assert (lse - 12).abs().max() < 1e-5

    q = 3 * values((8, HEADS, 128), BF16, device, 4)
    k, v = (values((256, KV_HEADS, 128), BF16, device, s) for s in (5, 6))
    parts = [flashinfer.single_prefill_with_kv_cache_return_lse(q, k[a:b], v[a:b])
             for a, b in ((0, 224), (224, 256))]
    merged = flashinfer.merge_state(*parts[0], *parts[1])
    whole = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v)
    assert (merged[0].float() - whole[0].float()).abs().max() < 0.02
    assert (merged[1] - whole[1]).abs().max() < 1e-3
