"""Rows of a result against the float64 reference, as `plait replay` and `plait bench` check them.

Allowed is twice the largest error, over the rows checked together, of the same attention computed
plainly (float32, weights and result rounded to the dtype), plus what that cannot show on few rows:
half a unit of the dtype's rounding, and the float32 of a sum in another order with an exp2 good to
2 roundings (4e-6 of the largest value; of lse 2e-5).
"""

import numpy as np

from plait import reference

_EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class RowCheck:
    """Collects rows; then `error` and `allowed` of (out, lse), and `worst`: > 1 if one is off."""

    def __init__(self, dtype, kv_dtype=None):
        self._dtype, self._kv_dtype = dtype, kv_dtype or dtype
        self._errors, self._plain_errors = [], []
        self._largest = np.zeros(2)

    def add(self, q, k, v, out, lse, **options):
        """One row, as stored: q [num_qo_heads, d], its request's keys k, v [keys, num_kv_heads, d],
        result out [num_qo_heads, d] and lse [num_qo_heads]. options: of reference.attention."""
        inputs = [reference.from_storage(q[None], self._dtype)]
        inputs += [reference.from_storage(x, self._kv_dtype) for x in (k, v)]
        exact = reference.attention(*inputs, **options)
        plain = reference.attention(
            *inputs, **options, real=np.float32, stored=lambda x: reference.rounded(x, self._dtype)
        )
        ours = reference.from_storage(out[None], self._dtype), lse[None]
        self._errors.append([np.max(np.abs(a - b)) for a, b in zip(ours, exact)])
        self._plain_errors.append([np.max(np.abs(a - b)) for a, b in zip(plain, exact)])
        self._largest = np.maximum(self._largest, [np.max(np.abs(x)) for x in exact])

    @property
    def num_rows(self):
        return len(self._errors)

    @property
    def error(self):
        return np.max(self._errors, axis=0)

    @property
    def allowed(self):
        largest, largest_lse = self._largest
        return 2 * np.max(self._plain_errors, axis=0) + [
            (_EPSILON[self._dtype] + 4e-6) * largest,
            2e-5 + 1e-6 * largest_lse,
        ]

    @property
    def worst(self):
        return float(np.max(self.error / self.allowed))

    def describe(self):
        (error, lse_error), (allowed, lse_allowed) = self.error, self.allowed
        return (
            f"error {error:.3g} (allowed {allowed:.3g}), lse error {lse_error:.3g} (allowed "
            f"{lse_allowed:.3g})"
        )
