"""The matrix of test_attention.py on CUDA, by kernel: plain takes everything, sm90a its own shapes."""

import pytest
import torch

import matrix
from harness import check

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)
CASES = [("plain", name, case) for name, case in matrix.cases(matrix.EVERY_CUDA)]
CASES += [("sm90a", name, case) for name, case in matrix.cases(matrix.SM90A)]


@pytest.mark.parametrize("kernel,case", [pytest.param(kernel, case, id=f"{kernel}-{name}-{case}")
                                         for kernel, name, case in CASES])
def test_attention_on_cuda(kernel, case):
    if kernel == "sm90a" and not IS_HOPPER:
        pytest.skip("sm90a kernels need compute capability 9.0")
    built = check(case, "cuda:0", kernel)
    assert built.attention.kernel_name.startswith({"sm90a": "sm90 "}.get(kernel, kernel))
