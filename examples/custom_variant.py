"""A variant of one's own: FlashSigmoid, weights sigmoid(logit + bias) without a softmax.

The text is C++; the same text runs on the CPU (needs a C++ compiler) and on a GPU (needs NVRTC).
python examples/custom_variant.py [cpu|cuda]
"""

import sys

import numpy as np

import plait

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
sigmoid = plait.custom(
    "sigmoid",
    "Sigmoid",
    """
struct Sigmoid {
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float logit) {
    return 1.0f / (1.0f + exp2(-1.44269504f * (logit + p.bias)));
  }
};
""",
    params={"bias": -3.0},
    use_softmax=False,
)
attn = plait.Attention(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=64,
    dtype="float32",
    device=device,
    variant=plait.causal() | sigmoid,
    bounds=plait.Bounds(requests=4, query_tokens=64, keys=64),
)
rng = np.random.default_rng(0)
q = rng.standard_normal((20, 4, 64), np.float32)
k, v = rng.standard_normal((2, 30, 2, 64), np.float32)
inputs = [q, k, v]
if device != "cpu":
    inputs = [plait.DeviceArray.from_numpy(x, device) for x in inputs]
attn.plan(qo_indptr=np.array([0, 20]), kv_indptr=np.array([0, 30]))
out, lse = attn.run(inputs[0], tuple(inputs[1:]), bias=-2.0)  # another bias for this call
out = out if device == "cpu" else out.to_numpy()

logits = np.einsum("qhd,khd->hqk", q, k.repeat(2, axis=1)) / 8
seen = np.arange(30) <= np.arange(20)[:, None] + 10
expected = np.einsum("hqk,khd->qhd", seen / (1 + np.exp(-(logits - 2.0))), v.repeat(2, axis=1))
print(f"{attn.kernel_name}: lse is {lse}, largest error {np.abs(out - expected).max():.2e}")
assert np.abs(out - expected).max() < 1e-4
