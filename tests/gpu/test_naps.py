"""Warps that sleep at random where they meet others change no bit: every template, loader, second
stage and join, compiled once more with PLAIT_JIT_NAPS (kernels/ptx/nap.cuh).
"""

import itertools

import pytest
import torch

import harness
from harness import Case, same_bits

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)
BF16 = "bfloat16"
# A CTA has units of many tiles, of few and of none; rows are split over CTAs and over warpgroups.
MIXED = ((130, 700), (1, 2000), (0, 9), (1, 0), (40, 40), (7, 1300), (1, 1), (3, 128))
DECODE = tuple((1, n) for n in (3000, 17, 0, 900, 128, 129, 1, 2222, 64, 65))
CASES = [Case(format, variant, MIXED, BF16, 128, 0, 2, 4, max_ctas=13)
         for format in ("ragged", "csr_p16", "csr_p1")
         for variant in ("causal", "rms_norm_rope", "everything")]
CASES += [Case(format, "causal", MIXED, BF16, dim, 0, 2, 4, max_ctas=13)
          for format, dim in (("csr_p16", 64), ("ragged", 256), ("shared_p16", 128))]
CASES += [Case(format, "causal", DECODE, BF16, 128, 0, 2, 4, max_ctas=9, decode_only=True)
          for format in ("ragged", "csr_p16", "csr_p1")]
CASES += [Case(format, "causal", lengths, BF16, 128, 0, 2, 4, max_ctas=13, decode_only=lengths is DECODE,
               kv_dtype="float8_e4m3fn", k_scale=0.25, v_scale=0.5)
          for format in ("csr_p16", "csr_p1") for lengths in (MIXED, DECODE)]
# Parts of many rows that end at about the same time, and are merged by whoever is there.
CASES += [Case("shared_p16", "causal", ((1, 5000),) * 40, BF16, 128, 0, 2, 4, max_ctas=ctas,
               decode_only=True) for ctas in (0, 40)]
KERNELS = ["sm80", *(["sm90a"] if IS_HOPPER else [])]
RUNS = list(itertools.product(CASES, KERNELS))
if IS_HOPPER:  # three consumer warpgroups, which no row transform has registers for
    RUNS += [(case, "sm90 192x80x2") for case in CASES
             if case.variant == "causal" and case.head_dim_qk <= 128 and not case.kv_dtype]


def scales(case):
    return {"k_scale": case.k_scale, "v_scale": case.v_scale} if case.kv_dtype else {}


@pytest.mark.parametrize("case,kernel", RUNS, ids=str)
def test_naps_change_no_bit(case, kernel, monkeypatch):
    built = harness.check(case, "cuda:0", kernel)
    _, out, lse = harness.execute(built)
    for seed in (1, 2):
        monkeypatch.setenv("PLAIT_JIT_NAPS", str(seed))
        late = harness.build(case, "cuda:0", kernel)
        assert late.attention.kernel_name == built.attention.kernel_name
        for run in range(10):
            _, again, again_lse = harness.execute(late)
            same_bits(again, out, f"seed {seed}, run {run}: out ")
            same_bits(again_lse, lse, f"seed {seed}, run {run}: lse ")
