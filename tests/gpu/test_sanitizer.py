"""SANITIZER_TESTS: a small case of every kernel, for `make sanitize-gpu` (sanitize.txt names this
file).

Run with PYTORCH_NO_CUDA_MEMORY_CACHING=1: torch's pool would hide reads past the end of a tensor.
"""

import numpy as np
import pytest
import torch

import plait

from harness import Case, check

BF16 = "bfloat16"
SANITIZER_TESTS = {
    "plain ragged": ("plain", Case("ragged", "causal", ((3, 70), (1, 0), (65, 65)), "float32", 40)),
    "plain paged": ("plain", Case("csr_p3_joint", "soft_cap", ((3, 70), (1, 129)), "float16", 64)),
    "plain split": ("plain", Case("csr_p16", "full", ((1, 20000),), BF16, 64, 0, 1, 8, max_ctas=12,
                                  split=True)),
    "plain variant": ("plain", Case("slots", "everything", ((3, 70),), BF16, 64)),
    "sm80 ragged": ("sm80", Case("ragged_gaps", "causal", ((130, 257), (1, 64)), BF16, 128)),
    "sm80 page 1": ("sm80", Case("slots_i64_strided", "window17", ((70, 257), (1, 65)), BF16, 40,
                                 strided=True)),
    "sm80 decode": ("sm80", Case("csr_p16", "causal", ((1, 300), (1, 1), (1, 0), (1, 129)), BF16, 128,
                                 decode_only=True)),
    "sm80 split": ("sm80", Case("csr_p16", "causal", ((1, 20000), (2, 3000)), BF16, 128, 0, 1, 8,
                                max_ctas=12, split=True)),
    "sm80 one row": ("sm80", Case("csr_p16", "full", ((1, 300), (1, 129)), BF16, 128, 0, 2, 1,
                                  decode_only=True)),
    "sm80 variant": ("sm80", Case("ragged", "everything", ((70, 257), (1, 40)), BF16, 64)),
    "sm90 affine": ("sm90a", Case("ragged", "causal", ((130, 257), (64, 64)), BF16, 128)),
    "sm90 affine gaps": ("sm90a", Case("ragged_gaps", "window17", ((130, 257), (1, 65)), BF16, 128)),
    "sm90 paged": ("sm90a", Case("csr_p16", "causal", ((130, 257), (64, 64)), BF16, 128)),
    "sm90 gather page 1": ("sm90a", Case("slots_i64_strided", "full", ((70, 257),), BF16, 128,
                                         strided=True)),
    "sm90 decode": ("sm90a", Case("csr_p16", "causal", ((1, 300), (1, 1), (1, 0), (1, 129)), BF16, 128,
                                  decode_only=True)),
    "sm90 decode ragged": ("sm90a", Case("ragged", "causal", ((1, 300), (1, 129)), BF16, 128,
                                         decode_only=True)),
    "sm90 mixed": ("sm90a", Case("csr_p1", "window_sinks", ((1, 700), (130, 200), (1, 5), (9, 40)), BF16,
                                 128, padding=3)),
    "sm90 split": ("sm90a", Case("csr_p16", "causal", ((1, 20000), (2, 3000)), BF16, 128, 0, 1, 8,
                                 max_ctas=12, split=True)),
    "sm90 shared": ("sm90a", Case("shared_p16", "causal", ((1, 300),) * 5, BF16, 128)),
    "sm90 shared decode": ("sm90a", Case("shared_p16", "causal", ((1, 3000),) * 20, BF16, 128, 0, 1, 4,
                                         decode_only=True)),
    "sm80 shared decode": ("sm80", Case("shared_p16", "causal", ((1, 3000),) * 20, BF16, 128, 0, 1, 4,
                                        decode_only=True)),
    "sm90 key_transform": ("sm90a", Case("csr_p16", "rms_norm_rope", ((70, 257),), BF16, 128)),
    "sm90 variant": ("sm90a", Case("ragged", "everything", ((70, 257), (1, 40)), BF16, 128)),
    "sm90 sigmoid": ("sm90a", Case("csr_p16", "sigmoid", ((70, 257), (1, 40)), BF16, 128)),
}


@pytest.mark.parametrize("name", SANITIZER_TESTS)
def test_kernel(name):
    kernel, case = SANITIZER_TESTS[name]
    if kernel == "sm90a" and torch.cuda.get_device_capability(0) != (9, 0):
        pytest.skip("sm90a kernels need compute capability 9.0")
    check(case, "cuda:0", kernel)


def test_merge():
    v = torch.randn(5, 3, 4, 40, device="cuda", dtype=torch.bfloat16)
    lse = torch.randn(5, 3, 4, device="cuda")
    lse[0] = -torch.inf
    out, out_lse = plait.merge_states(v, lse)
    assert (out[0] == 0).all() and torch.isneginf(out_lse[0]).all()
    want = torch.logsumexp(lse[1:], 1)
    assert torch.allclose(out_lse[1:], want, atol=1e-5)


def test_append():
    new = torch.randn(37, 2, 40, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, 2, 40, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(64)[:37]
    slots[3] = -1
    plait.append_kv(new, new, (cache, cache.clone()), kv=plait.PagedKv(16), slot_mapping=slots.cuda())
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(cache.view(64, 2, 40)[slot], new[i])


def test_replay_with_another_plan():
    """The upload into the same blob, and counters that reset themselves."""
    attn = plait.Attention(num_qo_heads=8, num_kv_heads=1, head_dim=128, dtype=BF16, device="cuda:0",
                           max_ctas=12,
                           bounds=plait.Bounds(requests=3, query_tokens=3, keys=20000))
    q = torch.randn(3, 8, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(20000, 1, 128, device="cuda", dtype=torch.bfloat16)
    results = {}
    for _ in range(2):
        for kv in ((0, 20000), (0, 5, 9, 30)):
            attn.plan(qo_indptr=np.arange(len(kv)), kv_indptr=np.array(kv))
            out, _ = attn.run(q, (k, k))
            torch.cuda.synchronize()
            if kv in results:
                assert torch.equal(out, results[kv])
            results[kv] = out


def test_plan_of_lengths_on_the_device():
    attn = plait.Attention(num_qo_heads=8, num_kv_heads=1, head_dim=128, dtype=BF16, device="cuda:0",
                           max_ctas=12, kernel="sm80", scheduler="prefix_sum",
                           bounds=plait.Bounds(requests=3, query_tokens=3, keys=20000))
    q = torch.randn(3, 8, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(20000, 1, 128, device="cuda", dtype=torch.bfloat16)
    for kv in ((0, 20000), (0, 5, 9, 30)):
        lengths = dict(qo_indptr=np.arange(len(kv)), kv_indptr=np.array(kv))
        attn.plan(**lengths)
        want, _ = attn.run(q, (k, k))
        attn.plan(**{name: torch.from_numpy(x).cuda() for name, x in lengths.items()})
        out, _ = attn.run(q, (k, k))
        assert torch.equal(out, want)
