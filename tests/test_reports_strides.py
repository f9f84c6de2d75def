"""Public reports: slices, odd pointers and strides (reports.py)."""

import numpy as np
import pytest

import plait
from plait import reference
from plait.reference import to_storage

from harness import Buffer, attend, device_of, same_bits
from reports import BF16, against_reference
from streams import std, uniform


def test_c24_slices(device, kernel):
    """ROCm/pytorch#3230; flagos-ai/FlagGems#5896, #5235; flashinfer-ai/flashinfer#3800"""
    dev = device_of(device)
    lengths = [(62, 62), (1, 5000), (1, 62)]
    q_lens = [n for n, _ in lengths]
    q, k, v = std(30, lengths, 16, 4, 128, BF16)
    dense, dense_lse, built = attend((q, k, v), device, kernel, format="ragged", dtype=BF16,
                                     q_lens=q_lens)
    against_reference(dense, dense_lse, (q, k, v), BF16, q_lens, causal=True)
    keys = sum(kv for _, kv in lengths)
    joint = np.full((keys, 24, 128), np.nan)  # q, k, v as slices of one tensor
    joint[:len(q), :16], joint[:, 16:20], joint[:, 20:] = q, np.concatenate(k), np.concatenate(v)
    joint = dev.put(to_storage(joint, BF16), BF16)
    turned = [dev.put(to_storage(np.concatenate(x).transpose(1, 0, 2), BF16), BF16) for x in (k, v)]
    turned = [x.transpose(1, 0, 2) if device == "cpu" else x.permute(1, 0, 2) for x in turned]
    for name, kv in (("slices", (joint[:, 16:20], joint[:, 20:])), ("views", turned)):
        out = Buffer((len(q), 16, 128), BF16, 7.0, pad=[(0, 0), (3, 5), (0, 0)])
        lse = Buffer((len(q), 16), "float32", 7.0, pad=[(0, 0), (0, 4)])
        built.attention.run(joint[:len(q), :16], kv, out=out.upload(dev), lse=lse.upload(dev))
        dev.synchronize()
        same_bits(out.download(), built.stored_out, f"{name}: out ")
        same_bits(lse.download(), dense_lse, f"{name}: lse ")


@pytest.mark.parametrize("moved", ["q", "k", "v", "out", "lse"])
def test_c25_odd_base_pointers(device, kernel, moved):
    """vllm-project/vllm#41257: the same bits, or a refusal that names the tensor and the
    alignment."""
    dev = device_of(device)
    q, (k,), (v,) = std(32, [(3, 70)], 8, 2, 128, BF16)
    _, lse, built = attend((q, [k], [v]), device, kernel, format="ragged", dtype=BF16)
    shapes = {"q": q, "k": k, "v": v, "out": np.full(q.shape, 7.0), "lse": np.full(q.shape[:2], 7.0)}
    tensors = {}
    for name, x in shapes.items():
        dtype = "float32" if name == "lse" else BF16
        shift = int(name == moved)
        flat = np.concatenate([np.full(shift, np.nan), x.ravel()])
        tensors[name] = dev.put(to_storage(flat, dtype), dtype)[shift:].reshape(x.shape)
    try:
        built.attention.run(tensors["q"], (tensors["k"], tensors["v"]), out=tensors["out"],
                            lse=tensors["lse"])
    except ValueError as error:
        assert moved in str(error) and "align" in str(error) and "16" in str(error)
        return
    dev.synchronize()
    same_bits(dev.get(tensors["out"], BF16), built.stored_out, "out ")
    same_bits(dev.get(tensors["lse"]), lse, "lse ")


def test_c25_odd_row_stride(device, kernel):
    """Rows of 130 elements with head_dim 128: the same bits, or refused by name."""
    dev = device_of(device)
    q, (k,), (v,) = std(32, [(3, 70)], 8, 2, 128, BF16)
    _, lse, built = attend((q, [k], [v]), device, kernel, format="ragged", dtype=BF16)
    wide = []
    for x in (q, k, v):
        memory = np.full((*x.shape[:2], 130), np.nan)
        memory[..., :128] = x
        wide.append(dev.put(to_storage(memory, BF16), BF16)[..., :128])
    try:
        out, got = built.attention.run(wide[0], wide[1:])
    except ValueError as error:
        assert "stride" in str(error) or "align" in str(error)
        return
    dev.synchronize()
    same_bits(dev.get(out, BF16), built.stored_out, "out ")
    same_bits(dev.get(got), lse, "lse ")


@pytest.mark.parametrize("layout", ["aligned", "moved", "stride130"])
def test_c25_append(device, layout):
    """append of 40 tokens into pages of 16, with the same layouts."""
    dev = device_of(device)
    new = [reference.rounded(uniform(32 + n, (40, 2, 128)), BF16) for n in range(2)]
    tensors = []
    for x in new:
        if layout == "moved":
            flat = to_storage(np.concatenate([[np.nan], x.ravel()]), BF16)
            tensors.append(dev.put(flat, BF16)[1:].reshape(x.shape))
        elif layout == "stride130":
            memory = np.full((40, 2, 130), np.nan)
            memory[..., :128] = x
            tensors.append(dev.put(to_storage(memory, BF16), BF16)[..., :128])
        else:
            tensors.append(dev.put(to_storage(x, BF16), BF16))
    caches = [Buffer((5, 16, 2, 128), BF16, 7.0) for _ in range(2)]
    order = np.array([4, 0, 2])
    slots = (order[:, None] * 16 + np.arange(16)).ravel()[:40]
    try:
        plait.append_kv(*tensors, [c.upload(dev) for c in caches], kv=plait.PagedKv(16),
                        slot_mapping=slots)
    except ValueError as error:
        assert ("stride" in str(error) or "align" in str(error)) and layout != "aligned"
        return
    dev.synchronize()
    for cache, x in zip(caches, new):
        want = np.full((5, 16, 2, 128), 7.0)
        want.reshape(80, 2, 128)[slots] = x
        same_bits(cache.download(), to_storage(want, BF16), "cache ")
