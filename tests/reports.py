"""What the tests of public reports (test_reports_*.py) share: the tolerances of their collection.

Faults that users of attention kernels have reported in public stand in those files as small inputs
with right values, each with its source thread. Streams and recipes: streams.py. tests/gpu runs the
same functions on CUDA; those that need a GPU (graphs, spinning streams, two devices) are there.
Not reached by the features so far, hence refused by name or absent:
  C12 variable block sizes (BsrKv), C16 learned sinks: such formats and variants do not exist yet.
  C33, C34, C35 (building kernels): tests/jit/; that they exist is checked in test_structure.py.
"""

import numpy as np

from plait import reference

from harness import compare

BF16, FP16 = "bfloat16", "float16"
OUT = {BF16: (4e-3, 1.6e-2), FP16: (1e-3, 2e-3), "float32": (1e-5, 1e-5)}


def near(name, got, want, dtype):
    """The tolerance of the collection for out."""
    absolute, relative = OUT[dtype]
    compare(name, got, want, absolute + relative * np.abs(np.asarray(want, np.float64)))


def near_lse(name, got, want, tolerance=1e-3):
    """1e-3 for fp16 and q = 0; 2.5e-3 for bf16 with weights."""
    want = np.asarray(want, np.float64)
    compare(name, got, want, tolerance + 5e-7 * np.where(np.isfinite(want), np.abs(want), 0))


def against_reference(out, lse, data, dtype, q_lens=None, lse_tolerance=None, **visibility):
    q, k, v = data
    row = 0
    for i, n in enumerate(q_lens or [len(q)]):
        want, want_lse = reference.attention(q[row:row + n], k[i], v[i], **visibility)
        near(f"request {i} out", out[row:row + n], want, dtype)
        near_lse(f"request {i} lse", lse[row:row + n], want_lse,
                 lse_tolerance or (1e-3 if dtype == FP16 else 2.5e-3))
        row += n
