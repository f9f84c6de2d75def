"""Same lengths in, same bits out: 50 runs, and other work in between."""

import pytest
import torch

import harness
from harness import Case, same_bits

CASES = [
    Case("csr_p16", "causal", ((1, 20000), (1, 77)), "bfloat16", 128, 0, 2, 4, split=True),
    Case("ragged", "causal", ((300, 300), (1, 5000), (64, 900)), "bfloat16", 128, 0, 2, 4),
    Case("csr_p1", "window_sinks", "long", "float16", 128, 0, 2, 3),
    Case("shared_p16", "causal", ((1, 4000),) * 9, "bfloat16", 128, 0, 2, 4),
    Case("csr_p16", "causal", ((1, 3000),) * 40, "bfloat16", 128, 0, 2, 4, decode_only=True),
    Case("csr_p16", "sigmoid", ((1, 9000), (5, 100)), "bfloat16", 128, 0, 2, 4),
    Case("csr_p3_joint", "soft_cap", "mixed", "float32", 64, 0, 2, 4),
]


@pytest.mark.parametrize("kernel", ["auto", "plain", "sm80"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fifty_runs(kernel, case):
    if kernel == "sm80" and case.dtype == "float32":
        pytest.skip("sm80 takes 16 bits; plain runs this")
    built = harness.check(case, "cuda:0", kernel)
    _, out, lse = harness.execute(built)
    noise = torch.randn(4096, 4096, device="cuda")
    for n in range(50):
        if n % 5 == 0:
            noise = noise @ noise / 64
        if n % 10 == 0:
            _, again, again_lse = harness.execute(built)
        else:
            more = {"lse": built.lse.tensor} if lse is not None else {}
            built.attention.run(built.q.tensor, built.kv, out=built.out.tensor, **more,
                                **built.variant_args)
            torch.cuda.synchronize()
            again, again_lse = built.out.download(), built.lse.download() if more else None
        same_bits(again, out, f"run {n}: out ")
        if lse is not None:
            same_bits(again_lse, lse, f"run {n}: lse ")
