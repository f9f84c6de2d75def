"""What every module must know of tensors: devices by name, outputs in the caller's framework."""

import sys
from typing import Any, Protocol, runtime_checkable

import numpy as np

from plait.device_array import DeviceArray


@runtime_checkable
class Tensor(Protocol):
    """Any array with DLPack: NumPy, torch, plait.DeviceArray, ...

    The class itself stands for a tensor parameter: `plait.custom(params={"slopes": plait.Tensor})`.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


def parse_device(device):
    """(DLPack device type, index) of "cpu", "cuda", "cuda:1" or a torch.device."""
    name, colon, index = str(device).partition(":")
    known = name in ("cpu", "cuda") and (not colon or (index.isascii() and index.isdigit()))
    if not known or (name == "cpu" and int(index or 0) != 0) or int(index or 0) > 2**31 - 1:
        raise ValueError(f"device is {str(device)!r}; taken are 'cpu', 'cuda' and 'cuda:<index>'")
    return (1, 0) if name == "cpu" else (2, int(index or 0))


def empty_like(tensor, shape, float32=False):
    """An uninitialised tensor of `tensor`'s framework and device, of its dtype or of float32."""
    if type(tensor) is np.ndarray:
        return np.empty(shape, np.float32 if float32 else tensor.dtype)
    if isinstance(tensor, DeviceArray):
        return DeviceArray(shape, "float32" if float32 else tensor.dtype, tensor.device)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.new_empty(shape, dtype=torch.float32) if float32 else tensor.new_empty(shape)
    if isinstance(tensor, np.ndarray):
        return np.empty(shape, np.float32 if float32 else tensor.dtype)
    raise TypeError(
        f"outputs are made for NumPy, torch and plait.DeviceArray; for "
        f"{type(tensor).__name__} give out= and lse="
    )
