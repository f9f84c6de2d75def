"""The harness can fail: results that are wrong by little, in one place, do not pass, nor do GPU
tests that do not run.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import harness
from harness import Buffer, Case, bits, device_of
from plait.reference import from_storage, to_storage

CASES = [Case("csr_p16", "causal", ((1, 3001), (64, 130), (2, 0)), dtype, 128, padding=2)
         for dtype in ("bfloat16", "float16", "float32")]


@pytest.fixture(scope="module", params=CASES, ids=str)
def finished(request):
    built = harness.build(request.param, "cpu")
    _, out, lse = harness.execute(built)
    harness.compare_with_reference(built, out, lse)
    return built, out, lse


def fails(built, out, lse, *words):
    with pytest.raises(AssertionError) as error:
        harness.compare_with_reference(built, out, lse)
    for word in words:
        assert word in str(error.value), error.value


def test_one_wrong_value(finished):
    built, out, lse = finished
    for row, words in ((0, "request 0, out[0, 3, 5]"), (40, "request 1, out[39, 3, 5]")):
        value = np.abs(from_storage(out, built.case.dtype)[row]).max()
        wrong = from_storage(out, built.case.dtype).copy()
        wrong[row, 3, 5] += 0.02 * value + 8 * harness.EPSILON[built.case.dtype] * value
        fails(built, to_storage(wrong, built.case.dtype), lse, words)


def test_nan_and_untouched_values(finished):
    built, out, lse = finished
    for value in (np.nan, harness.SENTINEL, np.inf):
        for row in (0, 30, 65, 66, 68):  # of the requests with keys, without, and padding
            wrong = from_storage(out, built.case.dtype).copy()
            wrong[row, 0, 0] = value
            fails(built, to_storage(wrong, built.case.dtype), lse, "out")
            wrong = lse.copy()
            wrong[row, 0] = value
            fails(built, out, wrong, "lse")


def set_keys(built, k, v):
    built.request_keys[0] = [k, v]
    built.results.clear()


def test_one_key_of_three_thousand(finished):
    """A dropped key is seen, by the LSE at least; a key too many and a shifted one likewise."""
    built, out, lse = finished
    k, v = built.request_keys[0]
    for dropped in (0, 1500, 3000):
        keep = np.arange(3001) != dropped
        set_keys(built, k[keep], v[keep])
        fails(built, out, lse, "request 0")
    set_keys(built, np.concatenate([k, k[:1]]), np.concatenate([v, v[:1]]))
    fails(built, out, lse, "request 0")
    set_keys(built, k, v)
    harness.compare_with_reference(built, out, lse)


def test_heads_mixed_up(finished):
    built, out, lse = finished
    fails(built, out[:, [0, 2, 1, 3, 4, 5, 6, 7]], lse, "out")


def test_writes_outside_an_output_are_seen():
    device = device_of("cpu")
    buffer = Buffer((3, 4, 8), "bfloat16", 7.0, pad=[(1, 1), (0, 2), (8, 8)])
    buffer.upload(device)[:] = 0
    assert (buffer.download() == 0).all()
    for place in ((0, 0, 0), (1, 4, 8), (4, 5, 23)):
        buffer.upload(device)
        buffer.base[place] = 0
        with pytest.raises(AssertionError, match="outside"):
            buffer.download()


def test_unowned_slots_are_nan():
    for name in harness.FORMATS:
        built = harness.build(Case(name, "full", ((1, 33), (2, 7), (0, 5), (1, 20)), "float32", 64),
                              "cpu")
        tensors = [b.memory for b in (built.keys.k, built.keys.v) if b is not None]
        owned = sum(np.isfinite(x).sum() for x in tensors)
        keys = 33 + 7 + 5 + 20
        if harness.FORMATS[name].composed:
            assert owned < 2 * keys * 2 * 64  # prefixes are there once
        else:
            assert owned == 2 * keys * 2 * 64
        assert sum(np.isnan(x).sum() for x in tensors) > 0 or name == "ragged"
        assert np.isnan(built.q.memory).sum() == 0
        assert len(np.unique(bits(built.out.memory))) == 1


def test_gpu_tests_that_must_run_fail_without_a_gpu():
    env = os.environ | {"PLAIT_REQUIRE_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parent.parent
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"],
                            cwd=root, env=env, capture_output=True, text=True)
    assert result.returncode not in (0, 5), result.stdout
    assert "PLAIT_REQUIRE_GPU=1, but torch " in result.stdout + result.stderr
