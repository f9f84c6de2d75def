"""Attention: compiled once, planned once a step, run once a layer."""

import ctypes
import math
import os

from plait import _plait
from plait.arguments import SCHEDULERS, instance, integer, needed, number
from plait.cost_model import read_cost_model
from plait.formats import KvFormat, RaggedKv, given, level_tuples
from plait.nvrtc import use_wheels
from plait.plan import Plan
from plait.tensors import empty_like, parse_device
from plait.variants import Variant, full


class Bounds(_plait.Bounds):
    """Capacities of an Attention: requests and query tokens of a step, keys of a request, pages of
    a step's host tables (0: requests * ceil(keys / page_size)), and the most query tokens of a
    request (0: query_tokens; 1: decode only).

    Raises TypeError for what is no integer, ValueError for one that does not fit 32 bits
    (total_pages: 64).
    """

    def __init__(self, *, requests, query_tokens, keys, total_pages=0, max_q_len=0):
        super().__init__(
            requests=integer("Bounds", "requests", requests),
            query_tokens=integer("Bounds", "query_tokens", query_tokens),
            keys=integer("Bounds", "keys", keys),
            total_pages=integer("Bounds", "total_pages", total_pages, -(2**63), 2**63 - 1),
            max_q_len=integer("Bounds", "max_q_len", max_q_len),
        )


class Workspace:
    """Memory for partial states, shared by the Attentions of a model; one run in flight.

    Workspace(device="cuda:0", bytes=n) allocates; Workspace(buffer=tensor) borrows a contiguous,
    256-byte aligned tensor of any dtype and keeps it alive. Raises ValueError for other buffers.
    """

    def __init__(self, *, device=None, bytes=None, buffer=None):
        if (buffer is None) == (bytes is None):
            raise ValueError("Workspace takes either bytes= (and device=) or buffer=")
        if buffer is not None and device is not None:
            raise ValueError("Workspace: device= is the buffer's own; leave it out")
        self._buffer = buffer
        if buffer is not None:
            self._impl = _plait.Workspace(buffer)
        else:
            bytes = integer("Workspace", "bytes", bytes, -(2**63), 2**63 - 1)
            self._impl = _plait.Workspace(parse_device("cpu" if device is None else device), bytes)

    @property
    def bytes(self) -> int:
        """Its size."""
        return self._impl.bytes

    @property
    def device(self) -> str:
        """Where it lies: "cpu" or "cuda:<index>"."""
        return self._impl.device


def _config(
    where,
    /,
    *,
    num_qo_heads,
    num_kv_heads,
    bounds,
    head_dim=None,
    head_dim_qk=None,
    head_dim_vo=None,
    dtype="bfloat16",
    kv_dtype=None,
    kv=None,
    device="cpu",
    variant=None,
    sm_scale=None,
    scheduler="auto",
    kernel="auto",
    max_ctas=0,
    invariant=False,
    cost_model=None,
):
    if head_dim is not None and (head_dim_qk is not None or head_dim_vo is not None):
        raise ValueError("give either head_dim, or head_dim_qk and head_dim_vo")
    if head_dim is None and (head_dim_qk is None or head_dim_vo is None):
        raise ValueError("head_dim is missing (or head_dim_qk and head_dim_vo)")
    if sm_scale is not None:
        _check_scale(sm_scale, where)
    if head_dim is None:
        head_dim_qk = integer(where, "head_dim_qk", head_dim_qk)
        head_dim_vo = integer(where, "head_dim_vo", head_dim_vo)
    else:
        head_dim_qk = head_dim_vo = integer(where, "head_dim", head_dim)
    kv = RaggedKv() if kv is None else kv
    variant = full() if variant is None else variant
    return _plait.attention_config(
        num_qo_heads=integer(where, "num_qo_heads", num_qo_heads),
        num_kv_heads=integer(where, "num_kv_heads", num_kv_heads),
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        dtype=_dtype_name(dtype),
        kv_dtype=None if kv_dtype is None else _dtype_name(kv_dtype),
        kv=instance(where, "kv", kv, KvFormat, "RaggedKv(), PagedKv(...) or ComposedKv(...)"),
        variant=instance(where, "variant", variant, Variant, "a plait.Variant, as causal()"),
        bounds=instance(where, "bounds", bounds, _plait.Bounds, "plait.Bounds(...)"),
        device=parse_device(device),
        sm_scale=sm_scale or 0.0,
        scheduler=instance(where, "scheduler", scheduler, str, SCHEDULERS),
        kernel=instance(where, "kernel", kernel, str, "a kernel's name or 'auto'"),
        max_ctas=integer(where, "max_ctas", max_ctas),
        chunk_keys=_chunk_keys(where, invariant),
        cost_model=None if cost_model is None else read_cost_model(where, cost_model),
    )


def _chunk_keys(where, invariant):
    if isinstance(invariant, bool):
        return _plait.INVARIANT_CHUNK if invariant else 0
    keys = integer(where, "invariant", invariant)
    if keys not in (512, 1024, 2048):
        raise ValueError(
            f"{where}: invariant is {keys}; it must be True, False, or the keys of a chunk: "
            "512, 1024 or 2048"
        )
    return keys


def _dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def _check_scale(sm_scale, where, name="sm_scale"):
    # What arrives below, where an sm_scale of 0 means "not given".
    as_float = ctypes.c_float(number(where, name, sm_scale)).value
    if not (math.isfinite(as_float) and as_float > 0):
        raise ValueError(f"{where}: {name} is {sm_scale}; it must be finite and > 0 in float32")
    return as_float


def _rows(q):
    try:
        shape = q.shape
    except AttributeError:
        raise TypeError(f"q must be a tensor, not {type(q).__name__}") from None
    return shape[0] if shape else 0  # a scalar is refused where everything else is


def workspace_bytes(**config) -> int:
    """Bytes of workspace that an Attention of this configuration needs; takes its arguments.

    Follows from bounds and device alone, and compiles nothing. Raises RuntimeError for a GPU where
    there is no driver: the number of multiprocessors counts.
    """
    return _plait.workspace_bytes(_config("workspace_bytes", **config))


class Attention:
    """Attention of one shape, KV format and variant, compiled for one device.

    num_qo_heads is a multiple of num_kv_heads; head dims are multiples of 8 up to 256. dtype is
    that of q and out: "float32", "bfloat16" or "float16" (NumPy's bfloat16 is uint16). kv_dtype is
    that of K and V: dtype (None), or "float8_e4m3fn" or "float8_e5m2" (or their bits as uint8),
    whose values are the stored numbers times the scales that run() takes.
    bounds are the capacities that grid, workspace and kernels follow from. workspace may be shared;
    None makes one. sm_scale: 1 / sqrt(head_dim_qk). scheduler: "auto"; "lpt", Algorithm 1 of the
    paper; "unsplit", which cuts no request's keys; "prefix_sum", which plans lengths on the host as
    those on the device are planned. kernel: "auto"; on CUDA "plain", the slow,
    obvious one, "sm80" or "sm90a", also in a tile of query rows x keys x stages, "sm80 128x64x2" or
    "sm90 128x144x2"; on the CPU "cpu x86-64-v4", "cpu x86-64-v3" or "cpu baseline", for
    built-in variants, where the machine has these instructions. invariant: True makes the bits of
    a row depend on its own query and keys alone, not on the batch around it, on how it is cut or on
    how the cache lies; they are folded in chunks of 2048 keys, or of 512 or 1024, given instead of
    True (docs/invariant.md has the contract and what it costs).
    built-in variants, where the machine has these instructions.
    cost_model: a file that `plait tune -o` wrote on this GPU, whose costs plans are made by; None:
    those shipped. Plan.cost_model says which; equal lengths give equal plans under equal costs.
    Raises ValueError for what no kernel takes, RuntimeError without driver, NVRTC or memory.
    Not for two threads at once: plan() and run() raise ValueError then.

    >>> import numpy as np, plait
    >>> attn = plait.Attention(num_qo_heads=4, num_kv_heads=2, head_dim=64, dtype="float32",
    ...                        variant=plait.causal(),
    ...                        bounds=plait.Bounds(requests=8, query_tokens=64, keys=256))
    >>> q = np.ones((3, 4, 64), np.float32)
    >>> k = v = np.ones((10, 2, 64), np.float32)
    >>> plan = attn.plan(qo_indptr=np.array([0, 1, 3]), kv_indptr=np.array([0, 7, 10]))
    >>> out, lse = attn.run(q, (k, v))
    >>> out.shape, lse.shape, bool((out == 1).all())
    ((3, 4, 64), (3, 4), True)
    """

    def __init__(
        self,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        bounds: Bounds,
        head_dim: int | None = None,
        head_dim_qk: int | None = None,
        head_dim_vo: int | None = None,
        dtype: str = "bfloat16",
        kv_dtype: str | None = None,
        kv: KvFormat | None = None,
        device: str = "cpu",
        variant: Variant | None = None,
        workspace: Workspace | None = None,
        sm_scale: float | None = None,
        scheduler: str = "auto",
        kernel: str = "auto",
        max_ctas: int = 0,
        invariant: bool | int = False,
        cost_model: str | os.PathLike | None = None,
    ):
        config = _config(
            "Attention",
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kv=kv,
            device=device,
            variant=variant,
            bounds=bounds,
            sm_scale=sm_scale,
            scheduler=scheduler,
            kernel=kernel,
            max_ctas=max_ctas,
            invariant=invariant,
            cost_model=cost_model,
        )
        if parse_device(device)[0] != 1:
            use_wheels()
        if not isinstance(workspace, (Workspace, type(None))):
            raise TypeError(f"workspace must be a plait.Workspace, not {type(workspace).__name__}")
        self._workspace = workspace  # keeps a borrowed buffer alive
        self._impl = _plait.Attention(config, None if workspace is None else workspace._impl)
        self._target = self._impl.target
        self._out_tail = (num_qo_heads, head_dim_vo if head_dim is None else head_dim)
        self._has_lse = True if variant is None else variant.use_softmax
        self._workspace_bytes = _plait.workspace_bytes(config)
        self._tables = None
        self._captured = []

    @property
    def workspace_bytes(self) -> int:
        """Bytes this Attention needs of its workspace."""
        return self._workspace_bytes

    @property
    def kernel_name(self) -> str:
        """What runs: "cpu ...", "plain ...", "sm80 ...", "sm90 ..."."""
        return self._impl.kernel_name

    @property
    def num_ctas(self) -> int:
        """CTAs of the grid (CPU: threads) that plans spread work over."""
        return self._impl.num_ctas

    @property
    def current_plan(self) -> Plan:
        """A copy of the plan that run() executes. Raises ValueError where it is the device's."""
        return Plan(self._impl.current_plan(), self._target)

    def plan(
        self,
        *,
        qo_indptr,
        kv_len=None,
        block_table=None,
        request_map=None,
        kv_page_indptr=None,
        kv_page_indices=None,
        kv_last_page_len=None,
        kv_indptr=None,
        kv_begin=None,
        levels=None,
        custom_mask=None,
        packed_custom_mask=None,
        mask_indptr=None,
        first_masked_key=None,
        q_positions=None,
        stream=None,
    ) -> Plan | None:
        """Plans one step; run() then executes it any number of times. Never waits for the device.

        All are int32 or int64 and 1-D, block_table 2-D. Lengths and indptrs lie on the host; page
        tables lie on host or device. Host arrays are copied; device arrays are kept and must stay
        unchanged until the runs are done. Which tables a format takes: RaggedKv, PagedKv, Level.

        Or all of them lie on the device, qo_indptr and lengths too (RaggedKv and PagedKv, without
        levels, mask and q_positions): then one kernel plans on the stream, the same cuts as
        scheduler="prefix_sum" makes of these lengths on the host. It can be captured in a CUDA
        graph, alone or with the runs behind it, and plans the lengths that it finds when it runs;
        nothing comes back. The number of requests is that of the arrays; those without queries
        take part in nothing. Lengths are not checked but forced within the bounds, so that wrong
        ones give wrong results; where keys lie (kv_begin, kv_indptr, kv_page_indptr, request_map,
        page ids) goes unchecked, and wrong values read other memory. What a captured plan() reads
        lives as long as this object, which must outlive the graph. The first such plan() loads its
        kernel and allocates memory; later ones only launch.

        levels: of a ComposedKv, as many Level as it has levels, or what compose_radix() made.

        Variant custom_mask() takes one of packed_custom_mask, uint8 bits (little-endian; each
        request begins in a new byte), and custom_mask, bools; on host or device, read once, 1-D: of
        request i q_len rows of kv_len - first_masked_key[i] keys each, one request after the other,
        or beginning at mask_indptr [n + 1] (bytes or bools). A query sees all keys before
        first_masked_key [n] (default 0). Of one request custom_mask may be [q_len, masked keys].

        q_positions [query tokens]: the absolute position of each query, as of drafts in a tree;
        without it the last query is at the last key. Causal, window, ALiBi and RoPE of Q follow it;
        keys are where their list has them.
        Returns a copy of the plan, None where it is made on the device. Raises ValueError naming
        array, place and value; the plan before then stays.
        """
        needed("plan", qo_indptr=qo_indptr)
        tables = given(
            kv_len=kv_len,
            block_table=block_table,
            request_map=request_map,
            kv_page_indptr=kv_page_indptr,
            kv_page_indices=kv_page_indices,
            kv_last_page_len=kv_last_page_len,
            kv_indptr=kv_indptr,
            kv_begin=kv_begin,
        )
        queries = given(
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            mask_indptr=mask_indptr,
            first_masked_key=first_masked_key,
            q_positions=q_positions,
        )
        self._plan(qo_indptr, tables, level_tuples(levels), stream, queries)
        if self._impl.planned_on_device:
            return None
        return Plan(self._impl.current_plan(), self._target)

    def _plan(self, qo_indptr, tables, levels, stream=None, queries=None):
        """plan() without the copy that it returns."""
        queries = queries or {}
        self._impl.plan(qo_indptr, tables, levels, queries, stream)
        # Device arrays are borrowed until the next plan, by a graph as long as it may be replayed.
        self._tables = (qo_indptr, tables, levels, queries)
        if self._impl.planned_in_capture:
            self._captured.append(self._tables)

    def run(
        self,
        q,
        kv,
        *,
        out=None,
        lse=None,
        return_lse=True,
        sm_scale=None,
        k_scale=1.0,
        v_scale=1.0,
        stream=None,
        **variant_args,
    ):
        """Attention of the planned batch.

        q [rows, num_qo_heads, head_dim_qk]; rows past the planned tokens are padding and come out
        as (0, -inf). kv: (k, v), ragged [kv rows, num_kv_heads, dim] or paged by the layout, or one
        5-D tensor. Any strides with the last one 1 (on tensor cores, rows of q, k, v and out at
        multiples of 16 bytes). out and lse (float32) are made like q where not given;
        return_lse=False without lse= writes none. k_scale, v_scale: numbers; of fp8 K and V,
        value = stored number * scale. variant_args: parameters of the variant.
        Returns (out [rows, num_qo_heads, head_dim_vo], lse [rows, num_qo_heads], natural log; None
        without softmax). Raises ValueError before anything is written, also where out or lse
        shares memory with another tensor of the call.
        """
        if type(kv) is tuple or type(kv) is list:
            if len(kv) != 2:
                raise ValueError(
                    f"run: kv has {len(kv)} tensors; taken are (k, v) or one 5-D tensor"
                )
            k, v = kv
            for name, tensor in (("k", k), ("v", v)):
                if tensor is None:
                    raise TypeError(
                        f"run: {name} of kv=(k, v) is None; taken are two tensors, or one 5-D "
                        f"tensor as kv"
                    )
        elif kv is None:
            raise TypeError("run: kv is None; taken are (k, v) or one 5-D tensor")
        else:
            k, v = kv, None
        if q is None:
            raise TypeError("run: q is None; taken is a tensor")
        if sm_scale is None:
            sm_scale = 0.0
        else:
            _check_scale(sm_scale, "run")
        if type(k_scale) is not float or k_scale != 1.0:
            k_scale = _check_scale(k_scale, "run", "k_scale")
        if type(v_scale) is not float or v_scale != 1.0:
            v_scale = _check_scale(v_scale, "run", "v_scale")
        if out is None:
            out = empty_like(q, (_rows(q), *self._out_tail))
        if lse is None and return_lse and self._has_lse:
            lse = empty_like(q, (_rows(q), self._out_tail[0]), float32=True)
        self._impl.run(q, k, v, out, lse, sm_scale, k_scale, v_scale, stream, variant_args or None)
        return out, lse
