"""The number streams of the public reports start as their collection states."""

import numpy as np

from streams import uniform


def test_streams_start_as_stated():
    assert np.allclose(uniform(1, 4), [0.13312304, 0.49156344, 0.94200540, -0.11128163], atol=5e-9)
    assert np.allclose(uniform(7, 4), [-0.22034061, -0.96642351, 0.80152130, 0.16586053], atol=5e-9)
