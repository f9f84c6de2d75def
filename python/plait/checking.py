"""Rows of a result against the float64 reference, as `plait replay` and `plait bench` check them.

Allowed is twice the largest error, over the rows checked together, of the same attention computed
plainly (float32, weights and result rounded to the dtype), and no less than two units in the last
place of the largest value: rows may be few, and the plain one exact on them.
"""

import numpy as np

from plait import reference

_ULP = {"float32": 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_LSE_ULP = 2.0**-20


class RowCheck:
    """Collects rows; then `error`, `allowed` (both (out, lse)) and `worst`, more than 1 if one is off."""

    def __init__(self, dtype):
        self._dtype = dtype
        self._errors, self._plain_errors = [], []
        self._largest = np.zeros(2)

    def add(self, q, k, v, out, lse, **options):
        """One row, as stored: q [num_qo_heads, d], its request's keys k, v [keys, num_kv_heads, d],
        result out [num_qo_heads, d] and lse [num_qo_heads]. options: of reference.attention."""
        inputs = [reference.from_storage(x, self._dtype) for x in (q[None], k, v)]
        exact = reference.attention(*inputs, **options)
        plain = reference.attention(*inputs, **options, real=np.float32,
                                    stored=lambda x: reference.rounded(x, self._dtype))
        ours = reference.from_storage(out[None], self._dtype), lse[None]
        self._errors.append([np.max(np.abs(a - b)) for a, b in zip(ours, exact)])
        self._plain_errors.append([np.max(np.abs(a - b)) for a, b in zip(plain, exact)])
        self._largest = np.maximum(self._largest, [np.max(np.abs(x)) for x in exact])

    @property
    def error(self):
        return np.max(self._errors, axis=0)

    @property
    def allowed(self):
        floor = 2 * self._largest * [_ULP[self._dtype], _LSE_ULP]
        return np.maximum(2 * np.max(self._plain_errors, axis=0), floor)

    @property
    def worst(self):
        return float(np.max(self.error / self.allowed))

    def describe(self):
        (error, lse_error), (allowed, lse_allowed) = self.error, self.allowed
        return (f"error {error:.3g} (allowed {allowed:.3g}), lse error {lse_error:.3g} (allowed "
                f"{lse_allowed:.3g})")
