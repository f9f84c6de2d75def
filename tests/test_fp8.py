"""K and V in float8: every code against torch, its dtypes taken, copies of numbers, refusals by name.

Values against the reference: matrix.py (fp8). Public reports: C15 in
test_reports_sizes.py.
"""

import numpy as np
import pytest

import plait
from plait.reference import FP8, from_storage, to_storage

from harness import attend, device_of, same_bits

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", FP8)
def test_reference_has_torch_s_codes(dtype):
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes.copy()).view(getattr(torch, dtype)).float().numpy()
    got = from_storage(codes, dtype)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(want)) or np.isnan(want).any()
    # Rounding: torch does not saturate, so within the finite numbers.
    x = np.random.default_rng(1).standard_normal(20000).astype(np.float32) * 40
    x[:1000] *= 2.0**-14
    rounded = torch.from_numpy(x).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    assert np.array_equal(to_storage(x, dtype), rounded)
    for far in (1e6, np.inf):
        assert from_storage(to_storage(np.float32(-far), dtype), dtype) == -np.nanmax(want[np.isfinite(want)])


@pytest.mark.parametrize("dtype,kv_dtype", [("float32", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"),
                                            ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"),
                                            ("float16", "float8_e5m2")])
def test_every_code_comes_through(device, kernel, dtype, kv_dtype):
    """One key a request: its V is the output, exactly, whatever its code (the harness makes no inf)."""
    numbers = from_storage(np.arange(256, dtype=np.uint8), kv_dtype)
    numbers = np.where(np.isinf(numbers), 0, numbers)
    v = np.stack([np.roll(numbers, -4 * i)[:128] for i in range(64)])[:, None]  # [request, head, dim]
    data = (np.zeros((64, 1, 128)), [np.zeros((1, 1, 128))] * 64, list(v[:, None]))
    out, lse, built = attend(data, device, kernel, q_lens=[1] * 64, dtype=dtype, kv_dtype=kv_dtype,
                             format="csr_p16", variant="full")
    assert np.array_equal(out, v, equal_nan=True)
    assert (lse == 0).all()


def test_dtypes_of_torch_and_numpy(device):
    """The same bits as torch's dtype and as uint8."""
    rng = np.random.default_rng(2)
    attention = plait.Attention(num_qo_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float16,
                                kv_dtype=torch.float8_e5m2, device=device,
                                bounds=plait.Bounds(requests=1, query_tokens=3, keys=9))
    attention.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 9]))
    q = torch.from_numpy(rng.standard_normal((3, 2, 64))).to(torch.float16).to(device)
    k, v = (torch.from_numpy(rng.standard_normal((9, 1, 64))).to(torch.float8_e5m2).to(device)
            for _ in range(2))
    scales = {"k_scale": 0.5, "v_scale": np.float32(3)}
    out, lse = attention.run(q, (k, v), **scales)
    again, lse_again = attention.run(q, (k.view(torch.uint8), v.view(torch.uint8)), **scales)
    unscaled, _ = attention.run(q, (k, v))
    assert torch.equal(out, again) and torch.equal(lse, lse_again) and not torch.equal(out, unscaled)
    for wrong in (v.view(torch.float8_e4m3fn), v.view(torch.int8), v.to(torch.float16)):
        with pytest.raises(ValueError, match="v is .*its dtype must be float8_e5m2"):
            attention.run(q, (k, wrong), **scales)
    for name in scales:
        for wrong in (0.0, -1.0, float("nan"), float("inf"), 1e39):
            with pytest.raises(ValueError, match=f"run: {name} is "):
                attention.run(q, (k, v), **{name: wrong})
        with pytest.raises(TypeError, match=f"run: {name} is "):
            attention.run(q, (k, v), **{name: "1"})


def test_ml_dtypes(device):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if device != "cpu":
        pytest.skip("NumPy arrays")
    attention = plait.Attention(num_qo_heads=1, num_kv_heads=1, head_dim=16, dtype="float32",
                                kv_dtype="float8_e4m3fn",
                                bounds=plait.Bounds(requests=1, query_tokens=1, keys=1))
    attention.plan(qo_indptr=np.array([0, 1]), kv_indptr=np.array([0, 1]))
    q, k = np.ones((1, 1, 16), np.float32), np.arange(16.0).reshape(1, 1, 16)
    out, _ = attention.run(q, (k.astype(ml_dtypes.float8_e4m3fn),) * 2)
    assert np.array_equal(out, k)
    for wrong in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz):
        with pytest.raises((ValueError, TypeError), match="float8"):
            attention.run(q, (k.astype(wrong),) * 2)


def test_scales_of_other_dtypes_are_refused(device):
    attention = plait.Attention(num_qo_heads=1, num_kv_heads=1, head_dim=64, dtype="float16",
                                device=device, bounds=plait.Bounds(requests=1, query_tokens=1, keys=1))
    attention.plan(qo_indptr=np.array([0, 1]), kv_indptr=np.array([0, 1]))
    x = torch.ones((1, 1, 64), dtype=torch.float16, device=device)
    attention.run(x, (x, x), k_scale=1, v_scale=1.0)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ValueError, match=f"run: {name} is 0.5; only numbers in float8_e4m3fn"):
            attention.run(x, (x, x), **{name: 0.5})


def test_append_copies_numbers_and_refuses_what_is_unclear(device):
    dev = device_of(device)
    numbers = dev.put(np.arange(2 * 64, dtype=np.uint8).reshape(2, 1, 64), "float8_e4m3fn")
    if device == "cpu":
        numbers = torch.from_numpy(numbers).view(torch.float8_e4m3fn)
    bits = numbers.view(torch.uint8)
    slots = np.array([3, 0])

    def cache(dtype=torch.float8_e4m3fn):
        return tuple(torch.zeros((4, 1, 64), dtype=torch.uint8, device=device).view(dtype)
                     for _ in range(2))

    def append(new, kv, **more):
        plait.append_kv(new, new, kv, kv=plait.RaggedKv(), slot_mapping=slots, **more)
        dev.synchronize()
        return kv

    for new, kv, more in ((numbers, cache(), {}), (bits, cache(), {}),
                          (bits, cache(torch.uint8), {"kv_dtype": "float8_e4m3fn"})):
        for x in append(new, kv, **more):
            got = x.view(torch.uint8).cpu().numpy()
            same_bits(got[[3, 0]], bits.cpu().numpy(), "cache ")
            assert (got[[1, 2]] == 0).all()
    values = numbers.float()
    for call, words in (
            (lambda: append(values, cache(torch.uint8)), "kv_dtype must say"),
            (lambda: append(values, cache(), kv_dtype="bfloat16"), "kv_dtype is bfloat16"),
            (lambda: append(numbers, cache(torch.float8_e5m2)), "k_new is .*float8_e5m2"),
            (lambda: append(numbers, cache(), k_scale=2.0), "k_scale is 2; only numbers"),
            (lambda: append(values, cache(), v_scale=0.0), "v_scale is 0; it must be finite"),
            (lambda: append(values.to(torch.int32), cache()), "k_new is int32"),
            (lambda: append(numbers, tuple(x.to(torch.float16) for x in cache())), "k_cache is float16")):
        with pytest.raises(ValueError, match=words):
            call()
