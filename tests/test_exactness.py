"""The error of every path is at most twice that of the plain computation in the same dtype, against
float64 and without allowance for anything: as a root mean square, and at its largest.

The plain computation is reference.attention with q, k, v in the dtype, S and all sums in float32, P
and the result rounded to the dtype. Its weights are relative to a row's maximum, so that of a row
which one key rules nothing but the result is rounded, by up to half a unit in the last place; ours
are relative to a maximum before it, and rounded too. How much of half a unit the result costs is
chance: so of the largest error the plain one is taken to be no less than half a unit of the largest
result. Every element of many rows is compared; tests/gpu runs the same on each kernel.
"""

import numpy as np
import pytest

from plait import reference

import harness
from harness import EPSILON, Case

LENGTHS = {
    "prefill": ((130, 130), (97, 301)),
    "chunk": ((70, 1500), (33, 64)),
    "decode": tuple((1, n) for n in (513, 64, 1000, 77, 2049, 1, 31, 400) * 4),
    "split": tuple((1, n) for n in (9000, 5000)) + ((8, 3000),) * 3,
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dims", [(128, 0), (64, 0), (192, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", LENGTHS)
def test_error_is_at_most_twice_that_of_the_plain_computation(device, every_kernel, name, dtype,
                                                              dims, seed):
    split = name == "split"
    case = Case("csr_p16" if seed == 1 else "ragged", "causal", LENGTHS[name], dtype, *dims, 2, 4,
                decode_only=name == "decode", scale_q=float(seed), split=split,
                max_ctas=24 if split else 0)
    built = harness.build(case, device, every_kernel)
    plan, out, lse = harness.execute(built)
    assert (len(plan.merge_indptr) > 0) >= split
    wants, _, plains, _ = (np.concatenate(x) for x in zip(*harness.expected(built)))
    ours, plain = reference.from_storage(out, dtype) - wants, plains - wants
    def root_mean_square(x):
        return np.sqrt((x * x).mean())

    assert root_mean_square(ours) <= 2 * root_mean_square(plain)
    half_unit = EPSILON[dtype] * 2.0 ** np.floor(np.log2(np.abs(wants).max()))
    largest = np.abs(plain).max(), half_unit
    assert np.abs(ours).max() <= 2 * max(largest), f"plain and half a unit: {largest}"
