"""What every test shares: the import path of the harness, and the device and kernel to run on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", params=["cpu"])
def device(request):
    """Of the shared test modules; tests/gpu imports their tests and overrides both fixtures."""
    return request.param


@pytest.fixture(scope="session")
def kernel():
    return "auto"


@pytest.fixture(scope="session")
def every_kernel(kernel):
    """For the few tests that each kernel of a GPU must pass on its own."""
    return kernel
