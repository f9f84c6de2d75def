"""Bad input: one clear error that names array, place and value; nothing written; the next call works."""

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
    "fp8 is not there yet": ({"dtype": "float8_e4m3fn"}, ("float8_e4m3fn", "bfloat16")),
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


def test_bad_formats_and_variants():
    refused(lambda: plait.PagedKv(0), "page_size", "0")
    refused(lambda: plait.PagedKv(16, layout="DHN"), "layout", "DHN", "NHD", "HND")
    refused(lambda: plait.ComposedKv(plait.RaggedKv(), 9), "num_levels", "9", "8")
    refused(lambda: plait.sliding_window(-1), "window_left", "-1")
    refused(lambda: plait.sliding_window(3, sink_tokens=-2), "sink_tokens", "-2")
    refused(lambda: plait.soft_cap(0.0), "cap", "0")
    refused(lambda: plait.soft_cap(1.0) | plait.soft_cap(2.0), "soft_cap")
    shift = "struct A { PLAIT_HD static float logits_transform(const Params&, const LogitContext&, " \
            "float x) { return x + 1; } };"
    refused(lambda: plait.soft_cap(1.0) | plait.custom("a", "A", shift), "logits_transform", "soft_cap")
    refused(lambda: plait.causal() | plait.soft_cap(1.0) | plait.custom("a", "A", shift.replace(
        "logits_transform", "output_transform").replace("LogitContext", "OutputContext"),
        use_softmax=False), "softmax")
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


def test_bad_scales_and_variant_arguments(device):
    attn = attention(device, variant=plait.soft_cap(5.0))
    attn.plan(**arrays(qo_indptr=[0, 3], kv_indptr=[0, 20]))
    a = run_arguments(device)

    def run(**more):
        return attn.run(a["q"], (a["k"], a["v"]), out=a["out"], lse=a["lse"], **more)

    for scale in (0.0, -1.0, 1e-46, float("inf"), float("nan")):
        refused(lambda: run(sm_scale=scale), "sm_scale")
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
    refused(lambda: plait.merge_states(None, lse), "v must be a tensor", "NoneType")
    refused(lambda: plait.merge_states(v[:, 0], lse), "v")
    refused(lambda: plait.merge_states(v, tensor(device, (3, 2, HEADS))), "lse", "float32")
    refused(lambda: plait.merge_states(v[:, :0], lse[:, :0]), "v")
    refused(lambda: plait.merge_states(v, lse, out=tensor(device, (3, HEADS, 32))), "out")
    refused(lambda: plait.merge_state(v[:, 0], lse[:, 0], v[:2, 1], lse[:, 1]), "v_b")


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
