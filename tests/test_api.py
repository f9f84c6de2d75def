"""The Python surface: NumPy and torch tensors, uncopied and strided; merge and append; plans as
data; workspaces shared; threads."""

import json
import threading

import numpy as np
import pytest

import plait
from plait import reference
from plait.reference import from_storage, rounded, to_storage

import harness
from harness import Buffer, Case, compare, device_of, same_bits

BF16 = "bfloat16"


def small(device="cpu", dtype="float32", kv=None, **more):
    return plait.Attention(**({"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype,
                               "device": device, "kv": kv or plait.RaggedKv(),
                               "variant": plait.causal(),
                               "bounds": plait.Bounds(requests=4, query_tokens=64, keys=300)} | more))


def data(seed, q_len=3, kv_len=40, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [rounded(rng.standard_normal((n, h, 64)).astype(np.float32), dtype)
            for n, h in ((q_len, 4), (kv_len, 2), (kv_len, 2))]


# --- tensors --------------------------------------------------------------------------------------

def test_readme_example():
    attn = small()
    q, k, v = data(1)
    attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    out, lse = attn.run(q, (k, v))
    want, want_lse = reference.attention(q, k, v, causal=True)
    assert out.dtype == np.float32 and lse.dtype == np.float32
    compare("out", out, want, 1e-5)
    compare("lse", lse, want_lse, 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_tensors_give_the_bits_of_numpy(dtype):
    torch = pytest.importorskip("torch")
    attn = small(dtype=dtype)
    arrays = [to_storage(x, dtype) for x in data(2, dtype=dtype)]
    attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    out, lse = attn.run(arrays[0], arrays[1:])
    tensors = [torch.from_numpy(x.view(np.int16) if dtype == BF16 else x) for x in arrays]
    if dtype == BF16:
        tensors = [x.view(torch.bfloat16) for x in tensors]
    attn.plan(qo_indptr=torch.tensor([0, 3]), kv_indptr=torch.tensor([0, 40], dtype=torch.int32))
    t_out, t_lse = attn.run(tensors[0], tensors[1:])
    assert isinstance(t_out, torch.Tensor) and t_out.dtype == getattr(torch, dtype)
    assert t_lse.dtype == torch.float32
    t_out = t_out.view(torch.int16).numpy().view(np.uint16) if dtype == BF16 else t_out.numpy()
    same_bits(t_out, out, "out ")
    same_bits(t_lse.numpy(), lse, "lse ")


def test_torch_views_are_not_copied():
    torch = pytest.importorskip("torch")
    attn = small()
    attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    q, k, v = (torch.from_numpy(x) for x in data(3))
    wide = torch.full((3, 9, 80), 7.0)
    out = wide[:, 2:6, 8:72]
    got, _ = attn.run(q, (k, v), out=out)
    assert got is out
    want, _ = reference.attention(q.numpy(), k.numpy(), v.numpy(), causal=True)
    compare("out", out.numpy(), want, 1e-5)
    outside = wide.clone()
    outside[:, 2:6, 8:72] = 7
    assert (outside == 7).all()


def test_read_only_inputs_pass_and_read_only_outputs_do_not():
    attn = small()
    attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    arrays = data(4)
    for x in arrays:
        x.flags.writeable = False
    out, _ = attn.run(arrays[0], arrays[1:])
    compare("out", out, reference.attention(*arrays, causal=True)[0], 1e-5)
    for name, shape in (("out", (3, 4, 64)), ("lse", (3, 4))):
        frozen = np.full(shape, 7.0, np.float32)
        frozen.flags.writeable = False
        with pytest.raises((ValueError, TypeError)) as error:
            attn.run(arrays[0], arrays[1:], **{name: frozen})
        assert name in str(error.value) and "read-only" in str(error.value)
        assert (frozen == 7).all()


def test_what_is_no_tensor_is_named():
    attn = small()
    attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    q, k, v = data(5)
    for arguments, name in (((None, (k, v)), "q"), (("q", (k, v)), "q"), ((q, (k, [1.0])), "v")):
        with pytest.raises((TypeError, ValueError, AttributeError)) as error:
            attn.run(*arguments, out=np.empty((3, 4, 64), np.float32),
                     lse=np.empty((3, 4), np.float32))
        assert name in str(error.value)
    with pytest.raises((TypeError, ValueError)) as error:
        attn.plan(qo_indptr=[0, 3], kv_indptr=np.array([0, "a"], object))
    assert "kv_indptr" in str(error.value) or "qo_indptr" in str(error.value)


def test_mixed_devices_are_refused():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    attn = small("cuda:0")
    attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    q, k, v = (torch.from_numpy(x).cuda() for x in data(6))
    with pytest.raises(ValueError) as error:
        attn.run(q, (k.cpu(), v))
    assert "k" in str(error.value) and "cpu" in str(error.value)


# --- the attention object -------------------------------------------------------------------------

def test_one_plan_many_runs_and_many_plans(device):
    """A plan serves any number of layers; a new plan replaces it; equal lengths, equal bits."""
    dev = device_of(device)
    attn = small(device)
    layers = [[dev.put(x) for x in data(seed)] for seed in range(3)]
    first = {}
    for repeat in range(2):
        for kv_len in (40, 17, 0):
            attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, kv_len]))
            for n, (q, k, v) in enumerate(layers):
                out, lse = attn.run(q, (k, v))
                dev.synchronize()
                got = dev.get(out), dev.get(lse)
                if repeat:
                    same_bits(got[0], first[n, kv_len], f"layer {n}, kv_len {kv_len} ")
                first[n, kv_len] = got[0]
                q, k, v = (dev.get(x) for x in (q, k, v))
                want = reference.attention(q, k[:kv_len], v[:kv_len], causal=True)
                compare("out", got[0], want[0], 1e-5)
                compare("lse", got[1], want[1], 2e-5)


def test_plan_copies_host_arrays(device):
    """The caller's index arrays may be rewritten as soon as plan() returns."""
    dev = device_of(device)
    attn = small(device, kv=plait.PagedKv(16), dtype=BF16)
    v = np.zeros((8, 16, 2, 64), np.float32) + np.arange(8)[:, None, None, None]
    cache = [dev.put(to_storage(x, BF16), BF16) for x in (np.zeros_like(v), v)]
    q = dev.put(to_storage(np.zeros((1, 4, 64)), BF16), BF16)
    arrays = {"qo_indptr": np.array([0, 1]), "kv_page_indptr": np.array([0, 1]),
              "kv_page_indices": np.array([5]), "kv_len": np.array([16])}
    attn.plan(**arrays)
    for x in arrays.values():
        x[:] = 1 << 30
    out, _ = attn.run(q, cache)
    dev.synchronize()
    assert (from_storage(dev.get(out, BF16), BF16) == 5).all()


def test_a_workspace_shared_by_two_attentions(device):
    dev = device_of(device)
    need = max(small(device, max_ctas=c).workspace_bytes for c in (4, 12))
    workspace = plait.Workspace(device=device, bytes=need)
    bounds = plait.Bounds(requests=4, query_tokens=64, keys=8000)
    many = small(device, workspace=workspace, max_ctas=12, bounds=bounds)
    window = small(device, workspace=workspace, max_ctas=4, bounds=bounds,
                   variant=plait.causal() | plait.sliding_window(100))
    q, k, v = data(9, 2, 8000)
    on_device = [dev.put(x) for x in (q, k, v)]
    for attn in (many, window):
        attn.plan(qo_indptr=np.array([0, 2]), kv_indptr=np.array([0, 8000]))
    assert len(many.current_plan.merge_indptr) > 0
    for attn, more in ((many, {}), (window, {"window_left": 100}), (many, {})):
        out, _ = attn.run(on_device[0], on_device[1:])
        dev.synchronize()
        compare("out", dev.get(out), reference.attention(q, k, v, causal=True, **more)[0], 1e-5)


def test_lse_is_optional(device):
    dev = device_of(device)
    attn = small(device)
    attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    q, k, v = (dev.put(x) for x in data(7))
    out, lse = attn.run(q, (k, v))
    again, none = attn.run(q, (k, v), return_lse=False)
    assert none is None
    dev.synchronize()
    same_bits(dev.get(again), dev.get(out), "out ")


def test_per_call_cap(device):
    """run(cap=...) takes another cap than the variant's."""
    from variants import SoftCap

    dev = device_of(device)
    attn = small(device, variant=plait.soft_cap(50.0))
    attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    q, k, v = data(8)
    for cap in (None, 0.5, 2.0):
        out, _ = attn.run(*[dev.put(q), (dev.put(k), dev.put(v))], **({"cap": cap} if cap else {}))
        dev.synchronize()
        want, _ = reference.attention(q, k, v, functors=SoftCap(cap or 50.0))
        compare(f"cap {cap}: out", dev.get(out), want, 1e-5)


def test_many_threads(device):
    """Each thread its own Attention and workspace: the same bits as alone."""
    case = [Case("csr_p16", "causal", "primes", BF16, 64), Case("ragged", "window17", "mixed", BF16, 64),
            Case("slots", "full", "extend", "float16", 64), Case("csr_p16", "soft_cap", "long", BF16, 64)]
    alone = [harness.execute(harness.build(c, device))[1:] for c in case]
    wrong = []

    def work(n):
        try:
            for _ in range(5):
                _, out, lse = harness.execute(harness.build(case[n], device))
                same_bits(out, alone[n][0], f"thread {n} ")
                same_bits(lse, alone[n][1], f"thread {n} ")
        except BaseException as error:  # noqa: BLE001 - reported below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(case))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("shared", ("attention", "workspace"))
def test_two_threads_at_once_are_refused(shared):
    """Never another call's numbers: a call is right, or refused while the other thread's is
    running."""
    workspace = plait.Workspace(bytes=1 << 24)
    q, k, v = data(9, kv_len=300)
    attentions = [small(variant=plait.causal(), workspace=workspace) for _ in range(2)]
    if shared == "attention":
        attentions[1] = attentions[0]
    for attn in attentions:
        attn.plan(qo_indptr=np.array([0, len(q)]), kv_indptr=np.array([0, len(k)]))
    want = attentions[0].run(q, (k, v))
    wrong, refusals = [], []

    def work(attn):
        for _ in range(200):
            try:
                same_bits(attn.run(q, (k, v))[0], want[0], "out ")
            except ValueError as error:
                refusals.append(str(error))
            except BaseException as error:  # noqa: BLE001 - reported below
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(attn,)) for attn in attentions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]
    assert all(f"the {shared} is in use by another thread" in text for text in refusals)
    same_bits(attentions[0].run(q, (k, v))[0], want[0], "out ")


def test_plans_print_and_compare():
    attn = small(max_ctas=8)
    a = attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 40]))
    b = attn.plan(qo_indptr=np.array([0, 3]), kv_indptr=np.array([0, 41]))
    assert a != b and a == plait.Plan.from_json(a.to_json()) and attn.current_plan == b
    assert "1 " in str(a) and len(str(a).splitlines()) > 1 and "items" in repr(a)
    for bad in ("{}", '{"items": 1}'):
        with pytest.raises(ValueError):
            plait.Plan.from_json(bad)
    for field, value in (("num_ctas", 2**40), ("num_ctas", "x"), ("num_ctas", 1.5),
                         ("chosen", 2**32),
                         ("total_keys", 2**70), ("candidates", [1]), ("candidates", [{}]),
                         ("candidates", None), ("row_map", [1.5]), ("row_map", [2**40]),
                         ("row_map", 3), ("cta_item_indptr", []), ("cta_item_indptr", [-1] * 9),
                         ("cta_item_indptr", [0] * 8 + [99]), ("merge_indptr", [0, 10**6, -5]),
                         ("merge_indptr", [0, 10**6]), ("token_request", [0]),
                         ("items", a.to_dict()["items"]
                          | {"row_block": [7] * len(a.items)}),
                         ("items", a.to_dict()["items"] | {"kv_begin": [1, 2, 3] * 99})):
        with pytest.raises(ValueError, match=field):
            plait.Plan.from_json(json.dumps(a.to_dict() | {field: value}))


def test_kernel_names():
    assert "cpu" in small().kernel_name


# --- merge ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_merge_states(device, dtype, n):
    dev, rng = device_of(device), np.random.default_rng(n)
    v = rounded(rng.standard_normal((7, n, 3, 40)).astype(np.float32), dtype)
    lse = (4 * rng.standard_normal((7, n, 3))).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    v[np.isneginf(lse)] = np.nan  # never read
    wide = Buffer(v.shape, dtype, np.nan, order=(1, 0, 2, 3), pad=[(0, 1), (1, 0), (0, 2), (0, 8)])
    wide.host[:] = to_storage(v, dtype)
    out = Buffer((7, 3, 40), dtype, 7.0, pad=[(1, 0), (0, 2), (0, 8)])
    out_lse = Buffer((7, 3), "float32", 7.0, pad=[(0, 1), (2, 0)])
    plait.merge_states(wide.upload(dev), dev.put(lse), out=out.upload(dev), out_lse=out_lse.upload(dev))
    dev.synchronize()
    want, want_lse = reference.merge([(v[:, i], lse[:, i]) for i in range(n)])
    compare("out", from_storage(out.download(), dtype), want,
            harness.EPSILON[dtype] * np.abs(want) + 4e-6)
    compare("lse", out_lse.download(), want_lse, 4e-6)


def test_merge_of_cuts_is_the_whole(device):
    dev = device_of(device)
    q, k, v = data(11, 5, 90)
    attn = small(device, variant=plait.full())
    parts = []
    for cut in (slice(0, 31), slice(31, 31), slice(31, 90)):
        attn.plan(qo_indptr=np.array([0, 5]), kv_begin=np.array([cut.start]),
                  kv_len=np.array([cut.stop - cut.start]))
        out, lse = attn.run(dev.put(q), (dev.put(k), dev.put(v)))
        dev.synchronize()
        parts.append((dev.get(out).copy(), dev.get(lse).copy()))
    out, lse = plait.merge_states(dev.put(np.stack([o for o, _ in parts], 1)),
                                  dev.put(np.stack([x for _, x in parts], 1)))
    dev.synchronize()
    want, want_lse = reference.attention(q, k, v)
    compare("out", dev.get(out), want, 1e-5)
    compare("lse", dev.get(lse), want_lse, 2e-5)


# --- append ---------------------------------------------------------------------------------------

APPEND_FORMATS = ["csr_p16", "csr_p3_joint", "csr_p64_strided", "csr_last_p16_hnd", "padded_p3_hnd_joint",
                  "slots", "slots_i64_strided", "ragged_gaps", "ragged_strided"]


@pytest.mark.parametrize("by", ["slots", "positions"])
@pytest.mark.parametrize("new_dtype,dtype", [("float32",) * 2, ("bfloat16",) * 2,
                                             ("bfloat16", "float8_e4m3fn"), ("float32", "float8_e5m2")])
@pytest.mark.parametrize("format_name", APPEND_FORMATS)
def test_append(device, format_name, new_dtype, dtype, by):
    """Every new token lands where the format says, -1 is skipped, nothing else is written. In an fp8
    cache as value / scale, rounded."""
    dev, rng = device_of(device), np.random.default_rng(5)
    format = harness.FORMATS[format_name]
    lens, heads, d = [5, 0, 37, 17], 3, 40
    joint = format.joint
    ids = [np.arange(n * heads * d, dtype=np.float32).reshape(n, heads, d) % 199 for n in lens]
    empty = [[to_storage(np.full_like(x, 7.0), dtype) for x in ids]] * 2
    scales = (0.6, 0.75) if new_dtype != dtype else (1, 1)
    full = [[to_storage(sign * x / np.float32(scale), dtype) for x in ids]
            for sign, scale in zip((1, -1), scales)]
    caches = {}
    for name, (lists_k, lists_v) in (("empty", empty), ("full", full)):
        caches[name] = harness.place_lists(format, [lists_k], [lists_v], heads, d, d, dtype, dev,
                                           np.random.default_rng(3), fill=7.0)
    cache, want = caches["empty"], caches["full"]
    tables = {n: x for n, x in cache.levels[0].items() if n not in ("kv_len", "kv_last_page_len")}
    order = rng.permutation(sum(lens))
    request = np.repeat(np.arange(4), lens)[order]
    position = np.concatenate([np.arange(n) for n in lens])[order]
    skipped = rng.random(len(order)) < 0.2
    wide = []
    for sign in (1, -1):
        buffer = Buffer((len(order), heads, d), new_dtype, np.nan, pad=[(1, 0), (1, 1), (0, 8)])
        buffer.host[:] = to_storage(sign * np.concatenate(ids)[order], new_dtype)
        wide.append(buffer.upload(dev))
    index = np.dtype(format.index)
    size = max(format.page_size, 1)
    if by == "slots":
        slots = np.array([slot_of(format, cache.levels[0], r, p, size)
                          for r, p in zip(request, position)])
        arguments = {"slot_mapping": np.where(skipped, -1, slots).astype(index)}
    else:
        arguments = {"batch_indices": np.where(skipped, -1, request).astype(index),
                     "positions": position.astype(index), **tables}
    for buffer in (cache.k, cache.v):
        if buffer is not None:
            buffer.upload(dev)
    plait.append_kv(*wide, cache.k.tensor if joint else (cache.k.tensor, cache.v.tensor),
                    kv=harness.kv_format(format), **arguments,
                    **({"kv_dtype": dtype, "k_scale": scales[0], "v_scale": scales[1]}
                       if new_dtype != dtype else {}))
    dev.synchronize()
    for buffer, full_buffer in ((cache.k, want.k), (cache.v, want.v)):
        if buffer is None:
            continue
        expected = full_buffer.host.copy()
        for r, p in zip(request[skipped], position[skipped]):
            unwrite(format, expected, cache.levels[0], r, p, size, to_storage(np.float32(7.0), dtype))
        same_bits(buffer.download(), expected, "cache ")


def slot_of(format, table, request, position, size):
    """page * page_size + offset; ragged: the row."""
    if format.page_size == 0:
        begin = table["kv_begin"] if "kv_begin" in table else table["kv_indptr"]
        return begin[request] + position
    if "block_table" in table:
        row = table["request_map"][request] if "request_map" in table else request
        page = table["block_table"][row, position // size]
    else:
        page = table["kv_page_indices"][table["kv_page_indptr"][request] + position // size]
    return page * size + position % size


def unwrite(format, cache, table, request, position, size, value):
    slot = slot_of(format, table, request, position, size)
    if format.page_size == 0:
        cache[slot] = value
    elif format.layout == "NHD":
        cache[slot // size, ..., slot % size, :, :] = value
    else:
        cache[slot // size, ..., slot % size, :] = value


def test_append_then_attend(device):
    """A cache that grows token by token gives what the whole cache gives."""
    dev = device_of(device)
    attn = small(device, kv=plait.PagedKv(4), dtype=BF16)
    q, k, v = data(12, 1, 21, BF16)
    cache = [dev.put(to_storage(np.full((9, 4, 2, 64), np.nan), BF16), BF16) for _ in range(2)]
    pages = np.array([7, 2, 5, 0, 3, 8])
    for n in range(21):
        plait.append_kv(*[dev.put(to_storage(x[n:n + 1], BF16), BF16) for x in (k, v)], cache,
                        kv=plait.PagedKv(4), slot_mapping=np.array([pages[n // 4] * 4 + n % 4]))
        attn.plan(qo_indptr=np.array([0, 1]), kv_len=np.array([n + 1]), block_table=pages[None])
        out, _ = attn.run(dev.put(to_storage(q, BF16), BF16), cache)
        dev.synchronize()
        want, _ = reference.attention(q, k[:n + 1], v[:n + 1], causal=True)
        compare(f"after {n + 1} tokens: out", from_storage(dev.get(out, BF16), BF16), want,
                4e-3 + 1.6e-2 * np.abs(want))


@pytest.mark.parametrize("kv_len,max_ctas", [(130, 0), (9000, 12)])
def test_nan_in_a_key_reaches_the_rows_that_see_it(device, kernel, kv_len, max_ctas):
    """No NaN is swallowed as an empty set; rows that do not see the key are as without it."""
    rng, bad = np.random.default_rng(13), kv_len - 30
    q, k, v = (rounded(rng.standard_normal((n, h, 128)).astype(np.float32), BF16)
               for n, h in ((64, 4), (kv_len, 2), (kv_len, 2)))
    k[bad, 1, 7] = np.nan  # kv head 1: query heads 2 and 3
    out, lse, _ = harness.attend((q, [k], [v]), device, kernel, format="csr_p16", dtype=BF16,
                                 max_ctas=max_ctas)
    sees = np.arange(64) + kv_len - 64 >= bad
    assert np.isnan(out[sees, 2:]).all() and np.isnan(lse[sees, 2:]).all()
    k[bad, 1, 7] = 0
    want, want_lse = reference.attention(q, k, v, causal=True)
    fine = np.ones((64, 4), bool)
    fine[sees, 2:] = False
    compare("out", out[fine], want[fine], 4e-3 + 1.6e-2 * np.abs(want[fine]))
    compare("lse", lse[fine], want_lse[fine], 2.5e-3)
