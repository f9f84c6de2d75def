"""run() against the float64 reference over formats, variants, dtypes, head dims, group sizes,
lengths, strides, splits and padding (matrix.py). tests/gpu runs the same on CUDA, by kernel.
"""

import pytest

import matrix
from harness import check


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{name}-{case}")
                                  for name, case in matrix.cases(matrix.EVERY)])
def test_attention(case):
    check(case, "cpu")
