"""Bad input: one clear error that names array, place and value; nothing written; the next call
works."""

import os
import subprocess
import sys

import numpy as np
import pytest

import plait
from plait.reference import from_storage, to_storage

from harness import device_of

BF16 = "bfloat16"
HEADS, KV_HEADS, DIM = 4, 2, 64


def attention(device="cpu", **more):
    arguments = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": BF16,
                 "device": device, "bounds": plait.Bounds(requests=4, query_tokens=16, keys=100)}
    return plait.Attention(**(arguments | more))


def tensor(device, shape, value=0.0, dtype=BF16):
    return device_of(device).put(to_storage(np.full(shape, value), dtype), dtype)


def refused(call, *words):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    text = str(error.value)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    assert len(text) < 600 and "\n" not in text.strip(), text
    return text


# --- construction ---------------------------------------------------------------------------------

CONFIGS = {
    "heads not a multiple": ({"num_qo_heads": 5}, ("num_qo_heads", "5", "2")),
    "no kv heads": ({"num_kv_heads": 0}, ("num_kv_heads", "0")),
    "head_dim not of 8": ({"head_dim": 44}, ("44", "8", "256")),
    "head_dim too large": ({"head_dim": 320}, ("320", "256")),
    "dtype": ({"dtype": "float64"}, ("float64", "bfloat16", "float16", "float32")),
    "fp8 queries": ({"dtype": "float8_e4m3fn"}, ("float8_e4m3fn", "q and out", "kv_dtype")),
    "another fp8": ({"kv_dtype": "float8_e4m3fnuz"}, ("float8_e4m3fnuz", "float8_e4m3fn", "float8_e5m2")),
    "16-bit keys of another dtype": ({"kv_dtype": "float16"}, ("kv_dtype", "float16", "bfloat16")),
    "kernel": ({"kernel": "fast"}, ("kernel", "fast", "auto")),
    "sm90a on a CPU": ({"kernel": "sm90a"}, ("sm90a", "cpu")),
    "scheduler": ({"scheduler": "best"}, ("scheduler", "best", "lpt")),
    "device": ({"device": "tpu"}, ("tpu", "cpu", "cuda")),
    "a second cpu": ({"device": "cpu:1"}, ("cpu:1", "cuda:<index>")),
    "device index no ASCII number": ({"device": "cuda:\N{SUPERSCRIPT TWO}"}, ("cuda:<index>",)),
    "workspace of another type": ({"workspace": 3}, ("workspace", "plait.Workspace", "int")),
    "max_ctas": ({"max_ctas": -1}, ("max_ctas", "-1")),
    "sm_scale": ({"sm_scale": -1.0}, ("sm_scale", "-1")),
    "sm_scale nan": ({"sm_scale": float("nan")}, ("sm_scale", "nan")),
    "sm_scale that float32 rounds to 0": ({"sm_scale": 1e-46}, ("sm_scale", "1e-46", "float32")),
    "sm_scale beyond float32": ({"sm_scale": 1e39}, ("sm_scale", "1e+39", "float32")),
    "bounds requests": ({"bounds": plait.Bounds(requests=0, query_tokens=1, keys=1)},
                        ("requests", "0")),
    "bounds keys": ({"bounds": plait.Bounds(requests=1, query_tokens=1, keys=-3)}, ("keys", "-3")),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_configurations(name):
    more, words = CONFIGS[name]
    refused(lambda: attention(**more), *words)


# One line that names argument and value, not the extension's list of overloads.
TYPES = {
    "float heads": ({"num_qo_heads": 4.0}, ("num_qo_heads is 4.0", "integer")),
    "heads of 2^31": ({"num_kv_heads": 2**31}, ("num_kv_heads is 2147483648", "2147483647")),
    "bool heads": ({"num_kv_heads": True}, ("num_kv_heads is True", "integer")),
    "text dim": ({"head_dim": "64"}, ("head_dim is '64'", "integer")),
    "half a pair of dims": ({"head_dim": None, "head_dim_qk": 64.0, "head_dim_vo": 64},
                            ("head_dim_qk is 64.0", "integer")),
    "no bounds": ({"bounds": None}, ("bounds is None", "plait.Bounds")),
    "kv by name": ({"kv": "paged"}, ("kv is 'paged'", "PagedKv")),
    "variant by name": ({"variant": "causal"}, ("variant is 'causal'", "plait.Variant")),
    "float max_ctas": ({"max_ctas": 1.5}, ("max_ctas is 1.5", "integer")),
    "text scale": ({"sm_scale": "1"}, ("sm_scale is '1'", "number")),
    "kernel of no name": ({"kernel": None}, ("kernel is None", "auto")),
    "scheduler of no name": ({"scheduler": 1}, ("scheduler is 1", "lpt")),
}


@pytest.mark.parametrize("name", TYPES)
def test_scalars_of_wrong_types(name):
    more, words = TYPES[name]
    refused(lambda: attention(**more), "Attention: ", *words)
    good = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM,
            "bounds": plait.Bounds(requests=4, query_tokens=16, keys=100)}
    assert plait.workspace_bytes(**good | {"num_qo_heads": np.int64(HEADS)}) > 0
    refused(lambda: plait.workspace_bytes(**good | more), "workspace_bytes: ", *words)


def test_bounds_formats_and_workspaces_of_wrong_types():
    good = {"requests": 1, "query_tokens": 1, "keys": 1}
    for name in (*good, "max_q_len"):
        for value, taken in ((2.0, "integer"), (2**31, "2147483647")):
            more = good | {name: value}
            refused(lambda: plait.Bounds(**more), f"Bounds: {name} is {value}", taken)  # noqa: B023
    assert plait.Bounds(**good, total_pages=2**31).total_pages == 2**31
    refused(lambda: plait.Bounds(**good, total_pages=None), "total_pages is None", "integer")
    refused(lambda: plait.PagedKv(16.0), "page_size is 16.0", "integer")
    refused(lambda: plait.ComposedKv(None, 2), "format is None", "PagedKv")
    refused(lambda: plait.ComposedKv(plait.PagedKv(16), "2"), "num_levels is '2'", "integer")
    refused(lambda: plait.Workspace(bytes=1e6), "bytes is 1000000.0", "integer")


def test_kv_that_is_no_pair():
    attn = attention()
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    a = run_arguments("cpu")
    q, k, v = a["q"], a["k"], a["v"]
    refused(lambda: attn.run(q, None), "kv is None", "(k, v)")
    refused(lambda: attn.run(q, (k, None)), "v of kv=(k, v) is None", "5-D")
    refused(lambda: attn.run(q, (None, v)), "k of kv=(k, v) is None", "5-D")
    refused(lambda: attn.run(q, (k, v, v)), "kv has 3 tensors", "(k, v)")
    refused(lambda: attn.run(q, (k, v), sm_scale="1"), "sm_scale is '1'", "number")
    cache = tensor("cpu", (4, 16, KV_HEADS, DIM))
    for caches in ((cache,), (cache, None), (cache, cache, cache)):
        refused(lambda: plait.append_kv(k, v, caches, kv=plait.PagedKv(16),  # noqa: B023
                                        slot_mapping=np.zeros(20, np.int64)),
                "kv_cache has", "(k, v)")
    refused(lambda: plait.append_kv(k, v, (cache, cache), kv=None), "kv is None", "PagedKv")


def test_bad_formats_and_variants():
    refused(lambda: plait.PagedKv(0), "page_size", "0")
    refused(lambda: plait.PagedKv(16, layout="DHN"), "layout", "DHN", "NHD", "HND")
    refused(lambda: plait.ComposedKv(plait.RaggedKv(), 9), "num_levels", "9", "8")
    refused(lambda: plait.sliding_window(-1), "window_left", "-1")
    refused(lambda: plait.sliding_window(3, sink_tokens=-2), "sink_tokens", "-2")
    refused(lambda: plait.soft_cap(0.0), "cap", "0")
    refused(lambda: plait.soft_cap(1.0) | plait.soft_cap(2.0), "soft_cap")
    for bad in (1.5, None, True, 2**30 + 1):
        refused(lambda bad=bad: plait.sliding_window(bad), "sliding_window", "window_left", str(bad))
        refused(lambda bad=bad: plait.sliding_window(3, bad), "sink_tokens", str(bad))
    for bad in ("x", None, True, float("nan")):
        refused(lambda bad=bad: plait.soft_cap(bad), "soft_cap", "cap", str(bad))
    for name, bad in (("name", 3), ("struct_name", None), ("source", 1.5), ("params", [1]),
                      ("params", {3: 1.0}), ("use_softmax", 3)):
        good = {"name": "n", "struct_name": "N", "source": "struct N {};"}
        refused(lambda args=good | {name: bad}: plait.custom(**args), "custom", name)
    shift = "struct A { PLAIT_HD static float logits_transform(const Params&, const LogitContext&, " \
            "float x) { return x + 1; } };"
    refused(lambda: plait.custom("b", "A", shift) | plait.custom("a", "A", shift.replace(
        "logits_transform", "output_transform").replace("LogitContext", "OutputContext"),
        use_softmax=False), "softmax")
    refused(lambda: plait.rope(theta=0), "theta", "0")
    refused(lambda: plait.rope(theta="x"), "theta", "'x'")
    refused(lambda: plait.rope(scale=-1), "scale", "-1")
    refused(lambda: plait.rope(rotary_dim=12), "rotary_dim", "12", "8")
    refused(lambda: plait.rope(rotary_dim=0), "rotary_dim", "0")
    refused(lambda: plait.rope(low_freq_factor=5), "low_freq_factor", "5", "high_freq_factor", "4")
    refused(lambda: plait.rope(old_context_len=0.5), "old_context_len", "0.5")
    refused(lambda: plait.rms_norm(eps=0), "eps", "0")
    refused(lambda: plait.alibi_slopes(0), "num_heads", "0")
    refused(lambda: plait.custom("a", "A", "struct A { int x; };"), "'a'", "logits_transform")
    refused(lambda: plait.custom("a", "B", shift), "struct B")
    refused(lambda: plait.custom("a", "A", shift.replace("logits_transform", "logit_transform")),
            "logit_transform", "logits_transform")
    refused(lambda: plait.custom("a", "A", shift, {"1x": 1.0}), "1x", "identifier")
    refused(lambda: plait.custom("a", "A", shift, {"x": "1"}), "x")


def test_error_in_user_source_points_into_it():
    source = """struct Wrong {
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float logit) {
    return logit + p.slope;
  }
};"""
    with pytest.raises(RuntimeError) as error:
        attention(variant=plait.custom("wrong", "Wrong", source, {"bias": 1.0}))
    text = str(error.value)
    assert "wrong" in text and "slope" in text and "3" in text
    assert len(text.splitlines()) <= 15, text


# --- plan -----------------------------------------------------------------------------------------

def arrays(**more):
    return {n: np.array(x, np.int32) if isinstance(x, list) else x for n, x in more.items()}


RAGGED = {
    "qo_indptr not from 0": (arrays(qo_indptr=[1, 2], kv_indptr=[0, 3]), ("qo_indptr[0]", "1")),
    "qo_indptr decreasing": (arrays(qo_indptr=[0, 3, 2], kv_indptr=[0, 3, 5]), ("qo_indptr[2]", "2")),
    "qo_indptr empty": (arrays(qo_indptr=[], kv_indptr=[0]), ("qo_indptr",)),
    "qo_indptr 2-D": (arrays(qo_indptr=np.zeros((1, 2), np.int32), kv_indptr=[0, 1]), ("qo_indptr",)),
    "qo_indptr float": (arrays(qo_indptr=np.zeros(2, np.float32), kv_indptr=[0, 1]),
                        ("qo_indptr", "float32", "int32", "int64")),
    "too many requests": (arrays(qo_indptr=[0] * 6, kv_indptr=[0] * 6), ("requests", "5", "4")),
    "too many tokens": (arrays(qo_indptr=[0, 17], kv_indptr=[0, 20]), ("query_tokens", "17", "16")),
    "too many keys": (arrays(qo_indptr=[0, 1, 2], kv_indptr=[0, 5, 106]), ("101", "100")),
    "kv_indptr length": (arrays(qo_indptr=[0, 1], kv_indptr=[0, 5, 6]), ("kv_indptr",)),
    "kv_indptr decreasing": (arrays(qo_indptr=[0, 1, 2], kv_indptr=[0, 5, 4]), ("kv_indptr[2]", "4")),
    "kv_len negative": (arrays(qo_indptr=[0, 1], kv_begin=[0], kv_len=[-1]), ("kv_len[0]", "-1")),
    "kv_begin negative": (arrays(qo_indptr=[0, 1], kv_begin=[-4], kv_len=[1]), ("kv_begin[0]", "-4")),
    "kv_begin without kv_len": (arrays(qo_indptr=[0, 1], kv_begin=[0]), ("kv_len",)),
    "no keys at all": (arrays(qo_indptr=[0, 1]), ("kv_indptr",)),
    "paged tables": (arrays(qo_indptr=[0, 1], kv_page_indptr=[0, 1], kv_page_indices=[0],
                            kv_len=[1]), ("kv_page_indptr",)),
    "levels": (dict(arrays(qo_indptr=[0, 1]), levels=[plait.Level(kv_len=np.array([1]))]), ("levels",)),
}
PAGED = {
    "kv_len beyond the pages": (arrays(qo_indptr=[0, 1], kv_page_indptr=[0, 1], kv_page_indices=[3],
                                       kv_len=[17]), ("kv_len[0]", "17")),
    "page id negative": (arrays(qo_indptr=[0, 1], kv_page_indptr=[0, 2], kv_page_indices=[3, -2],
                                kv_len=[17]), ("kv_page_indices[1]", "-2")),
    "table too narrow": (arrays(qo_indptr=[0, 1], block_table=np.zeros((1, 2), np.int32), kv_len=[33]),
                         ("33", "2")),
    "table id negative": (arrays(qo_indptr=[0, 1], block_table=np.array([[0, -7]], np.int32),
                                 kv_len=[20]), ("block_table", "-7")),
    "request_map": (arrays(qo_indptr=[0, 1], block_table=np.zeros((2, 2), np.int32), kv_len=[20],
                           request_map=[2]), ("request_map[0]", "2")),
    "two tables": (arrays(qo_indptr=[0, 1], block_table=np.zeros((2, 2), np.int32), kv_len=[20],
                          kv_page_indptr=[0, 1], kv_page_indices=[0]), ("block_table", "kv_page_ind")),
    "no table": (arrays(qo_indptr=[0, 1], kv_len=[20]), ("block_table",)),
    "ragged table": (arrays(qo_indptr=[0, 1], kv_indptr=[0, 20]), ("kv_indptr",)),
    "lengths disagree": (arrays(qo_indptr=[0, 1], kv_page_indptr=[0, 2], kv_page_indices=[3, 1],
                                kv_len=[17], kv_last_page_len=[5]), ("kv_l",)),
}


@pytest.mark.parametrize("name", [*RAGGED, *PAGED])
def test_bad_plans_leave_the_plan_before(device, name):
    """A refused plan changes nothing: the plan before still runs, and the next one does too."""
    dev = device_of(device)
    bad, words = (RAGGED.get(name) or PAGED[name])
    kv = plait.RaggedKv() if name in RAGGED else plait.PagedKv(16)
    attn = attention(device, kv=kv)
    shape = (40, KV_HEADS, DIM) if name in RAGGED else (4, 16, KV_HEADS, DIM)
    cache = tensor(device, shape), tensor(device, shape, 3.0)
    q = tensor(device, (2, HEADS, DIM))
    good = (arrays(qo_indptr=[0, 1, 2], kv_indptr=[0, 20, 25]) if name in RAGGED else
            arrays(qo_indptr=[0, 1, 2], kv_page_indptr=[0, 2, 3], kv_page_indices=[1, 0, 3],
                   kv_len=[20, 5]))
    before = attn.plan(**good)
    refused(lambda: attn.plan(**bad), *words)
    for again in (False, True):
        if again:
            assert attn.plan(**good) == before
        out, lse = attn.run(q, cache)
        dev.synchronize()
        assert (from_storage(dev.get(out, BF16), BF16) == 3).all()
        assert np.allclose(dev.get(lse), np.log([[20], [5]]), atol=1e-5)


def test_run_before_plan(device):
    attn = attention(device)
    refused(lambda: attn.run(tensor(device, (1, HEADS, DIM)),
                             (tensor(device, (1, KV_HEADS, DIM)), tensor(device, (1, KV_HEADS, DIM)))),
            "plan")


# --- run ------------------------------------------------------------------------------------------

def run_arguments(device):
    return {"q": tensor(device, (3, HEADS, DIM)), "k": tensor(device, (20, KV_HEADS, DIM)),
            "v": tensor(device, (20, KV_HEADS, DIM), 2.0),
            "out": tensor(device, (3, HEADS, DIM), 7.0),
            "lse": tensor(device, (3, HEADS), 7.0, "float32")}


RUNS = {
    "q 2-D": ("q", lambda d: tensor(d, (3, HEADS * DIM)), ("q",)),
    "q heads": ("q", lambda d: tensor(d, (3, HEADS + 1, DIM)), ("q", "5", "4")),
    "q dim": ("q", lambda d: tensor(d, (3, HEADS, 128)), ("q", "128", "64")),
    "q dtype": ("q", lambda d: tensor(d, (3, HEADS, DIM), 0, "float32"), ("q", "float32", "bfloat16")),
    "q too few rows": ("q", lambda d: tensor(d, (2, HEADS, DIM)), ("q", "2", "3")),
    "q last stride": ("q", lambda d: tensor(d, (3, HEADS, 2 * DIM))[..., ::2], ("q", "stride", "2")),
    "k heads": ("k", lambda d: tensor(d, (20, 3, DIM)), ("k", "3", "2")),
    "k dtype": ("k", lambda d: tensor(d, (20, KV_HEADS, DIM), 0, "float16"), ("k", "float16")),
    "k too few rows": ("k", lambda d: tensor(d, (19, KV_HEADS, DIM)), ("k", "20", "19")),
    "v too few rows": ("v", lambda d: tensor(d, (7, KV_HEADS, DIM)), ("v", "20", "7")),
    "v dim": ("v", lambda d: tensor(d, (20, KV_HEADS, 32)), ("v", "32", "64")),
    "out shape": ("out", lambda d: tensor(d, (3, HEADS, 32)), ("out", "32", "64")),
    "out rows": ("out", lambda d: tensor(d, (2, HEADS, DIM)), ("out", "2", "3")),
    "out dtype": ("out", lambda d: tensor(d, (3, HEADS, DIM), 0, "float32"), ("out", "float32")),
    "lse dtype": ("lse", lambda d: tensor(d, (3, HEADS)), ("lse", "float32")),
    "lse shape": ("lse", lambda d: tensor(d, (3, HEADS + 1), 0, "float32"), ("lse", "5", "4")),
}


@pytest.mark.parametrize("name", RUNS)
def test_bad_runs_write_nothing(device, name):
    dev = device_of(device)
    attn = attention(device)
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    good = run_arguments(device)
    which, make, words = RUNS[name]
    bad = dict(good)
    bad[which] = make(device)

    def run(a):
        return attn.run(a["q"], (a["k"], a["v"]), out=a["out"], lse=a["lse"])

    refused(lambda: run(bad), *words)
    dev.synchronize()
    for output, dtype in (("out", BF16), ("lse", "float32")):
        if output != which:
            assert (from_storage(dev.get(good[output], dtype), dtype) == 7).all(), f"{output} is written"
    run(good)
    dev.synchronize()
    assert (from_storage(dev.get(good["out"], BF16), BF16) == 2).all()


# A run's or a merge's output and what it lies on, as (tensor written, another of the call).
OVERLAPS = [("out", "q"), ("out", "k"), ("out", "v"), ("lse", "q"), ("lse", "k"), ("lse", "out")]


def inside(memory, shape, dtype, start):
    """A NumPy array of `shape`, `start` bytes into `memory`."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return memory[start:start + size].view(dtype).reshape(shape)


@pytest.mark.parametrize("written, other", OVERLAPS)
@pytest.mark.parametrize("start", [0, 4, "last element"])
def test_outputs_that_overlap_are_refused(written, other, start):
    attn = attention()
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    a = run_arguments("cpu")
    memory = np.zeros(20000, np.uint8)
    first = inside(memory, a[other].shape, a[other].dtype, 64)
    itemsize = a[written].dtype.itemsize
    ahead = first.nbytes - itemsize if start == "last element" else start
    first[...] = a[other]
    a[other] = first
    a[written] = inside(memory, a[written].shape, a[written].dtype, 64 + ahead)
    before = memory.copy()
    text = refused(lambda: attn.run(a["q"], (a["k"], a["v"]), out=a["out"], lse=a["lse"]),
                   "run: ", "share memory")
    assert written in text and other in text and (memory == before).all()
    a[written] = inside(memory, a[written].shape, a[written].dtype, 64 + first.nbytes)  # beside
    attn.run(a["q"], (a["k"], a["v"]), out=a["out"], lse=a["lse"])


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_what_lies_in_the_workspace_is_refused(name):
    memory = np.zeros(256 + (1 << 20), np.uint8)
    buffer = memory[-memory.ctypes.data % 256:][:1 << 20]
    attn = attention(workspace=plait.Workspace(buffer=buffer))
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    a = run_arguments("cpu")
    apart = a[name]
    a[name] = inside(buffer, apart.shape, apart.dtype, 64)
    text = refused(lambda: attn.run(a["q"], (a["k"], a["v"]), out=a["out"], lse=a["lse"]),
                   "run: ", "the workspace", "share memory")
    assert name in text and not memory.any()
    a[name] = apart
    attn.run(a["q"], (a["k"], a["v"]), out=a["out"], lse=a["lse"])


def test_interleaved_slices_are_no_overlap():
    """All of one [tokens, heads, dim], as engines that fuse projections have them; one head more
    and they touch."""
    attn = attention()
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 3]))
    joint = np.zeros((3, 2 * HEADS + 2 * KV_HEADS, DIM), np.uint16)
    k, v = joint[:, HEADS:HEADS + KV_HEADS], joint[:, HEADS + KV_HEADS:HEADS + 2 * KV_HEADS]
    v[...] = to_storage(np.full(v.shape, 2.0), BF16)
    attn.run(joint[:, :HEADS], (k, v), out=joint[:, -HEADS:])
    assert (from_storage(joint[:, -HEADS:], BF16) == 2).all()
    refused(lambda: attn.run(joint[:, :HEADS], (k, v), out=joint[:, -HEADS - 1:-1]),
            "out and v share memory")
    backwards = joint[::-1]
    attn.run(joint[:, :HEADS], (k, v), out=backwards[:, -HEADS:])
    refused(lambda: attn.run(joint[:, :HEADS], (k, v), out=backwards[:, :HEADS]),
            "out and q share memory")


def test_output_on_a_variant_argument_is_refused():
    source = "struct OnArg { PLAIT_HD static float logits_transform(const Params& p, " \
             "const LogitContext& c, float x) { return x + p.slopes[c.qo_head]; } };"
    attn = attention(variant=plait.custom("on_arg", "OnArg", source, {"slopes": plait.Tensor}))
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    a = run_arguments("cpu")
    refused(lambda: attn.run(a["q"], (a["k"], a["v"]), lse=a["lse"], slopes=a["lse"][1]),
            "lse and slopes share memory")


def test_bad_scales_and_variant_arguments(device):
    attn = attention(device, variant=plait.soft_cap(5.0))
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    a = run_arguments(device)

    def run(**more):
        return attn.run(a["q"], (a["k"], a["v"]), out=a["out"], lse=a["lse"], **more)

    for scale in (0.0, -1.0, 1e-46, float("inf"), float("nan")):
        refused(lambda: run(sm_scale=scale), "sm_scale")  # noqa: B023
    refused(lambda: run(capp=3.0), "capp", "cap")
    refused(lambda: run(cap=a["lse"]), "cap")
    refused(lambda: attn.run(a["q"], (a["k"],)), "kv")
    run(cap=3.0)


def test_missing_and_wrong_tensor_parameters(device):
    source = """struct Bias {
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext& c, float logit) {
    return logit + p.slopes[c.qo_head];
  }
};"""
    attn = attention(device, variant=plait.custom("bias", "Bias", source, {"slopes": plait.Tensor}))
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    a = run_arguments(device)

    def run(**more):
        return attn.run(a["q"], (a["k"], a["v"]), out=a["out"], lse=a["lse"], **more)

    refused(lambda: run(), "slopes")
    refused(lambda: run(slopes=1.0), "slopes")
    refused(lambda: run(slopes=tensor(device, (HEADS,))), "slopes", "float32")
    refused(lambda: run(slopes=tensor(device, (2 * HEADS,), 0, "float32")[::2]), "slopes")
    run(slopes=tensor(device, (HEADS,), 0.5, "float32"))
    dev = device_of(device)
    dev.synchronize()
    assert np.allclose(dev.get(a["lse"]), np.log(20) + 0.5, atol=1e-5)


def test_lse_without_softmax_is_refused(device):
    source = "struct Linear { PLAIT_HD static float logits_transform(const Params&, " \
             "const LogitContext&, float x) { return x; } };"
    attn = attention(device, variant=plait.custom("linear", "Linear", source, use_softmax=False))
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    a = run_arguments(device)
    refused(lambda: attn.run(a["q"], (a["k"], a["v"]), lse=a["lse"]), "lse", "softmax")
    _, lse = attn.run(a["q"], (a["k"], a["v"]))
    assert lse is None


# --- workspace, merge, append ---------------------------------------------------------------------

def test_bad_workspaces():
    attn = attention()
    need = attn.workspace_bytes
    refused(lambda: attention(workspace=plait.Workspace(device="cpu", bytes=need - 1)), str(need),
            str(need - 1))
    refused(lambda: plait.Workspace(bytes=-1), "bytes", "-1")
    memory = np.zeros(need + 512, np.uint8)
    start = -memory.ctypes.data % 256
    refused(lambda: plait.Workspace(buffer=memory[start + 1:]), "buffer", "256")
    refused(lambda: plait.Workspace(buffer=memory[::2]), "buffer", "contiguous")
    frozen = memory[start:start + need]
    frozen.flags.writeable = False
    refused(lambda: plait.Workspace(buffer=frozen), "buffer")
    refused(lambda: plait.Workspace(), "bytes")


def test_array_of_another_dtype_is_named():
    attn = attention()
    for dtype in (object, "U1"):
        array = np.zeros(2, dtype)
        refused(lambda: attn.plan(qo_indptr=array, kv_indptr=np.zeros(2, np.int64)), "qo_indptr",  # noqa: B023
                str(array.dtype), "which no tensor argument takes")


def test_parameter_named_like_an_argument_of_run():
    refused(lambda: plait.custom("v", "V", "", params={"lse": plait.Tensor}), "lse", "run()")


def test_threads_that_cannot_be_started():
    """One error, rather than a wait for threads that are not there."""
    script = """if 1:
        import resource, plait
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        plait.Attention(num_qo_heads=1, num_kv_heads=1, head_dim=8,
                        bounds=plait.Bounds(requests=1, query_tokens=1, keys=1))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PLAIT_NUM_THREADS": "1024", "OPENBLAS_NUM_THREADS": "1"})
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: cpu: of 1024 threads only"), done.stderr
    assert "PLAIT_NUM_THREADS" in last


def test_bad_merges(device):
    v, lse = tensor(device, (3, 2, HEADS, DIM)), tensor(device, (3, 2, HEADS), 0, "float32")
    plait.merge_states(v, lse)
    refused(lambda: plait.merge_states(v, lse[:2]), "lse")
    refused(lambda: plait.merge_states(None, lse), "merge_states: v is None")
    refused(lambda: plait.merge_states(v[:, 0], lse), "v")
    refused(lambda: plait.merge_states(v, tensor(device, (3, 2, HEADS))), "lse", "float32")
    refused(lambda: plait.merge_states(v[:, :0], lse[:, :0]), "v")
    refused(lambda: plait.merge_states(v, lse, out=tensor(device, (3, HEADS, 32))), "out")
    refused(lambda: plait.merge_state(v[:, 0], lse[:, 0], v[:2, 1], lse[:, 1]), "v_b")


def test_merges_that_overlap_are_refused():
    rng = np.random.default_rng(1)
    memory, lse_memory = (rng.standard_normal((2, 5, HEADS, *tail), np.float32)
                          for tail in ((DIM,), ()))
    (a, b), (lse_a, lse_b) = memory[:, 1:4], lse_memory[:, 1:4]
    want = plait.merge_state(a, lse_a, b, lse_b)
    shifted, turned = (memory[0, :3], memory[1, 2:]), memory[0, 1:4, ::-1]
    for out, name in ((shifted[0], "v_a"), (shifted[1], "v_b"), (turned, "v_a")):
        refused(lambda: plait.merge_state(a, lse_a, b, lse_b, out=out),  # noqa: B023
                f"merge_state: out and {name} share memory")
    refused(lambda: plait.merge_state(a, lse_a, b, lse_b, out_lse=lse_memory[1, :3]),
            "out_lse and lse_b share memory")
    states, lses = memory.transpose(1, 0, 2, 3), lse_memory.transpose(1, 0, 2)
    refused(lambda: plait.merge_states(states, lses, out=states[:, 0]), "out and v share memory")
    refused(lambda: plait.merge_states(states, lses, out_lse=lses[:, 1]),
            "out_lse and lse share memory")
    mine = np.zeros((5, 3, HEADS, DIM), np.float32)  # the result beside the states of its row
    mine[:, :2] = states
    out, _ = plait.merge_states(mine[:, :2], lses, out=mine[:, 2])
    assert (out == plait.merge_states(states, lses)[0]).all()
    out, lse = plait.merge_state(a, lse_a, b, lse_b, out=b, out_lse=lse_b)  # in place
    assert (out == want[0]).all() and (lse == want[1]).all()


def test_every_overlap_is_refused():
    """Random views of one memory against NumPy's exact answer. What is apart may be refused, if no
    one step keeps the two from each other."""
    rng = np.random.default_rng(7)
    taken = refusals = 0
    for _ in range(2000):
        memory, aside = np.zeros((2, 6 * 40), np.float32)
        views = []
        for _ in range(2):
            row, head = rng.choice([40, 40, -40, 13, 80]), rng.choice([2, 3, 10, -10])
            views.append((int(rng.integers(0, 200)), (3, 2, 2), (int(row), int(head), 1)))
        reach = [[start + sum(s * (n - 1) for s, n in zip(strides, shape) if (s < 0) == low)
                  for low in (True, False)] for start, shape, strides in views]
        if any(low < 0 or high >= memory.size for low, high in reach):
            continue
        a, out = (np.lib.stride_tricks.as_strided(memory[start:], shape, [4 * s for s in strides])
                  for start, shape, strides in views)
        b = np.lib.stride_tricks.as_strided(aside[views[0][0]:], a.shape, a.strides)
        lse = np.zeros((3, 2), np.float32)
        same = a.ctypes.data == out.ctypes.data and a.strides == out.strides
        try:
            plait.merge_state(a, lse, b, lse, out=out)
            taken += 1
            assert same or not np.shares_memory(a, out), views
        except ValueError as error:
            if "out and v_a share memory" in str(error):
                refusals += 1
                assert not same, views
            else:  # two elements of `out` in one place
                assert "share memory: a stride" in str(error), error
    assert taken > 100 and refusals > 100


def test_appends_that_overlap_are_refused():
    kv, slots = plait.PagedKv(16), np.array([5, 7])
    cache = np.full((4, 2, 16, KV_HEADS, DIM), 7, np.uint16)
    new = np.ones((2, KV_HEADS, DIM), np.uint16)
    k, v = cache[:, 0], cache[:, 1]

    def append(k_new, v_new, kv_cache):
        plait.append_kv(k_new, v_new, kv_cache, kv=kv, slot_mapping=slots)

    refused(lambda: append(new, new, (k, k)), "append_kv: k_cache and v_cache share memory")
    refused(lambda: append(k[0, 3:5], new, (k, v)), "k_cache and k_new share memory")
    refused(lambda: append(new, k[0, 3:5], (k, v)), "k_cache and v_new share memory")
    refused(lambda: append(new, v[3, :2], (k, v)), "v_cache and v_new share memory")
    refused(lambda: append(v[1, 3:5], new, cache), "k_cache and k_new share memory")
    assert (cache == 7).all()
    append(new, new, (k, v))
    assert (cache[0, :, [5, 7]] == 1).all() and (cache == 1).sum() == 2 * 2 * KV_HEADS * DIM


def test_composed_formats_are_refused_by_name():
    composed = plait.ComposedKv(plait.PagedKv(16), 2)
    refused(lambda: plait.ComposedKv(composed, 2), "format", "composed already", "2 levels")
    new, cache = np.zeros((1, 2, 8), np.uint16), np.zeros((3, 2, 16, 2, 8), np.uint16)
    refused(lambda: plait.append_kv(new, new, cache, kv=composed, slot_mapping=np.array([0])),
            "append_kv", "composed", "2 levels")


APPENDS = {
    "slot too large": (dict(slot_mapping=[0, 64]), ("slot_mapping[1]", "64")),
    "slot -2": (dict(slot_mapping=[-2, 3]), ("slot_mapping[0]", "-2")),
    "slots too few": (dict(slot_mapping=[0]), ("slot_mapping", "2")),
    "slots and positions": (dict(slot_mapping=[0, 1], batch_indices=[0, 0], positions=[0, 1]),
                            ("slot_mapping", "batch_indices")),
    "neither": (dict(), ("slot_mapping",)),
    "position beyond the pages": (dict(batch_indices=[0, 0], positions=[15, 32],
                                       kv_page_indptr=[0, 2], kv_page_indices=[1, 2]),
                                  ("positions[1]", "32")),
    "batch index": (dict(batch_indices=[0, 1], positions=[0, 0], kv_page_indptr=[0, 2],
                         kv_page_indices=[1, 2]), ("batch_indices[1]", "1")),
    "page id": (dict(batch_indices=[0, 0], positions=[0, 16], kv_page_indptr=[0, 2],
                     kv_page_indices=[1, 4]), ("kv_page_indices[1]", "4")),
}


@pytest.mark.parametrize("name", APPENDS)
def test_bad_appends_write_nothing(device, name):
    dev = device_of(device)
    bad, words = APPENDS[name]
    new = tensor(device, (2, KV_HEADS, DIM), 1.0)
    cache = [tensor(device, (4, 16, KV_HEADS, DIM), 7.0) for _ in range(2)]
    refused(lambda: plait.append_kv(new, new, cache, kv=plait.PagedKv(16), **arrays(**bad)), *words)
    dev.synchronize()
    assert all((from_storage(dev.get(x, BF16), BF16) == 7).all() for x in cache)
    plait.append_kv(new, new, cache, kv=plait.PagedKv(16), slot_mapping=np.array([5, -1]))
    dev.synchronize()
    for x in cache:
        values = from_storage(dev.get(x, BF16), BF16).reshape(64, -1)
        assert (values[5] == 1).all() and (np.delete(values, 5, 0) == 7).all()
