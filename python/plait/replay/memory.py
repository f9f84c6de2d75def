"""Where a replay's tensors lie: NumPy arrays, or GPU memory without any framework."""

import numpy as np

from plait.device_array import DeviceArray
from plait.reference import to_storage


def memory_on(device, dtype):
    return HostMemory(dtype) if device == "cpu" else DeviceMemory(device, dtype)


def _nan_rows(shape, dtype):
    return to_storage(np.full(shape, np.nan, np.float32), dtype)


class HostMemory:
    def __init__(self, dtype):
        self._dtype = dtype

    def nan(self, shape):
        """A cache whose every slot is NaN until it is written."""
        array = np.empty(shape, _nan_rows(1, self._dtype).dtype)
        array[:] = _nan_rows(1, self._dtype)
        return array

    def upload(self, name, array):
        return array

    def scratch(self, name, shape, dtype):
        """Room for a result."""
        return np.empty(shape, _nan_rows(1, dtype).dtype)

    def download(self, array):
        return array

    def synchronize(self):
        pass


class DeviceMemory:
    def __init__(self, device, dtype):
        self._device, self._dtype = device, dtype
        self._buffers = {}  # by name, grown: an allocation a step would cost more than the step

    def nan(self, shape):
        array = DeviceArray(shape, self._dtype, self._device)
        array.fill_bytes(0xFF, None)  # NaN in every float dtype
        return array

    def upload(self, name, array):
        rows = self.scratch(name, array.shape, self._dtype)
        rows.copy_from(np.ascontiguousarray(array), None)
        return rows

    def scratch(self, name, shape, dtype):
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < shape[0]:
            buffer = DeviceArray((2 * shape[0], *shape[1:]), dtype, self._device)
            self._buffers[name] = buffer
        return buffer.rows(0, shape[0])

    def download(self, array):
        return array.to_numpy()

    def synchronize(self):
        DeviceArray.synchronize(self._device)
