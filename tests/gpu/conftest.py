"""GPU tests: the device and kernels that the shared test functions run on here.

Without torch or a GPU they are skipped; with PLAIT_REQUIRE_GPU=1, as in `make test-gpu`, they fail.
"""

import os

import pytest

REQUIRED = os.environ.get("PLAIT_REQUIRE_GPU") == "1"

if REQUIRED:
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"PLAIT_REQUIRE_GPU=1, but torch is missing: {error}") from None
else:
    torch = pytest.importorskip("torch", reason="GPU tests make their tensors with torch")

NO_GPU = not torch.cuda.is_available()
if NO_GPU and REQUIRED:
    raise RuntimeError("PLAIT_REQUIRE_GPU=1, but torch finds no CUDA device")
IS_HOPPER = not NO_GPU and torch.cuda.get_device_capability(0) == (9, 0)


def pytest_collection_modifyitems(config, items):
    """Only this folder's items: conftest hooks see them all."""
    of_the_host = [  # and run there
        item
        for item in items
        if item.path.name == "test_shared_gpu.py" and "device" not in item.fixturenames
    ]
    config.hook.pytest_deselected(items=of_the_host)
    items[:] = [item for item in items if item not in of_the_host]
    for item in items:
        if "/gpu/" in str(item.path) and NO_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", params=["cuda:0"])
def device(request):
    return request.param


@pytest.fixture(scope="session", params=["auto", "plain"])
def kernel(request):
    """auto: sm90a where it takes the shape, else sm80, of float32 plain."""
    return request.param


@pytest.fixture(scope="session", params=["auto", "plain", "sm80"])
def every_kernel(request):
    if request.param == "sm80" and torch.cuda.get_device_capability(0) < (8, 0):
        pytest.skip("sm80 kernels need compute capability 8.0")
    return request.param
