"""DeviceArray: GPU memory where no framework is installed."""

import numpy as np

from plait import _plait

_NUMPY = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
}


def _device(name):
    kind, _, index = str(name).partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ValueError(f"device is {str(name)!r}; a DeviceArray lies on 'cuda' or 'cuda:<index>'")
    return 2, int(index or 0)


class DeviceArray(_plait.DeviceArray):
    """A contiguous tensor on a GPU: DeviceArray(shape, dtype, device). Contents undefined.

    dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int32, int64, uint8. Speaks
    DLPack, so that torch.from_dlpack(array) borrows it. Raises ValueError for other dtypes and
    devices, RuntimeError without driver or memory.
    """

    def __init__(self, shape, dtype="bfloat16", device="cuda"):
        super().__init__([int(n) for n in shape], dtype, _device(device))

    @classmethod
    def from_numpy(cls, array, device="cuda", dtype=None) -> "DeviceArray":
        """A copy of a NumPy array. dtype="bfloat16" goes with uint16, which stands for it (default
        there), "float8_e4m3fn" and "float8_e5m2" with uint8."""
        array = np.ascontiguousarray(array)
        if dtype is None:
            dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        out = cls(array.shape, dtype, device)
        out.copy_from(array, None)
        return out

    def to_numpy(self) -> np.ndarray:
        """A copy on the host; bfloat16 as uint16, float8 as uint8. Waits for the device."""
        out = np.empty(self.shape, _NUMPY[self.dtype])
        _plait.synchronize(_device(self.device))
        if out.size:
            self.copy_to(out, None)
        return out

    def rows(self, begin, end) -> "DeviceArray":
        """Rows begin ... end - 1 of the first dimension, sharing this array's memory."""
        part = DeviceArray.__new__(DeviceArray)
        _plait.DeviceArray.__init__(part, self, begin, end)
        return part

    def reshape(self, *shape) -> "DeviceArray":
        """The same memory in a shape of as many elements."""
        other = DeviceArray.__new__(DeviceArray)
        _plait.DeviceArray.__init__(other, self, [int(n) for n in shape])
        return other

    @staticmethod
    def synchronize(device="cuda") -> None:
        """Waits for everything on the device."""
        _plait.synchronize(_device(device))

    def __repr__(self):
        return f"<plait.DeviceArray {self.dtype}{list(self.shape)} on {self.device}>"
