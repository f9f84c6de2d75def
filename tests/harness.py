"""One case of attention, end to end: build it, run it on a device, compare with the float64
reference.

Every slot of the cache that no key owns, every padding row of q and everything around strided
tensors is NaN; outputs lie in buffers full of a sentinel that must survive around them. The kernel
runs before its reference, whose answer could otherwise sit in reused memory. The tolerance is twice
the error of the same computation done plainly in the case's dtype, plus the rounding of one result.
"""

import dataclasses
import itertools
import zlib
from dataclasses import dataclass, field

import numpy as np

import plait
from plait import reference

from variants import VARIANTS, Masked

SENTINEL = 7.0
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half an ulp, relative


# --- devices: NumPy on the CPU, torch on CUDA -----------------------------------------------------

class CpuDevice:
    name = "cpu"

    def put(self, array, dtype=None):
        """A tensor of this device from a NumPy array (storage of `dtype`); always a copy."""
        return np.array(array, copy=True)

    def get(self, tensor, dtype=None):
        return np.asarray(tensor)

    def synchronize(self):
        pass


class CudaDevice:
    def __init__(self, name="cuda:0"):
        import torch

        self.torch = torch
        self.name = name

    def put(self, array, dtype=None):
        array = np.ascontiguousarray(array)
        if dtype == "bfloat16":
            return self.torch.from_numpy(array.view(np.int16).copy()).view(self.torch.bfloat16).to(
                self.name)
        tensor = self.torch.from_numpy(array.copy()).to(self.name)
        return tensor.view(getattr(self.torch, dtype)) if dtype in reference.FP8 else tensor

    def get(self, tensor, dtype=None):
        if dtype == "bfloat16":
            return tensor.cpu().contiguous().view(self.torch.int16).numpy().view(np.uint16)
        if dtype in reference.FP8:
            return tensor.cpu().contiguous().view(self.torch.uint8).numpy()
        return tensor.cpu().numpy()

    def synchronize(self):
        self.torch.cuda.synchronize(self.name)


_devices = {}


def device_of(name):
    if name not in _devices:
        _devices[name] = CpuDevice() if name == "cpu" else CudaDevice(name)
    return _devices[name]


class Buffer:
    """A tensor inside a larger allocation: `view` of it, by slicing and permuting, on host and
    device.

    order: the order of the dimensions in memory (the last stays last). pad: extra elements before
    and after the view in each dimension of the memory.
    """

    def __init__(self, shape, dtype, fill, order=None, pad=None):
        self.shape, self.dtype = tuple(shape), dtype
        self.order = tuple(order or range(len(shape)))
        pad = tuple(pad or [(0, 0)] * len(shape))
        memory = [self.shape[d] for d in self.order]
        self.slices = tuple(slice(a, a + n) for (a, b), n in zip(pad, memory))
        self.inverse = tuple(int(i) for i in np.argsort(self.order))
        filler = reference.to_storage(np.float32(fill), dtype)
        self.memory = np.full([n + a + b for (a, b), n in zip(pad, memory)], filler, filler.dtype)
        self.host = self.memory[self.slices].transpose(self.inverse)  # writable view

    def upload(self, device):
        self.device = device
        self.base = device.put(self.memory, self.dtype)
        inner = self.base[self.slices]
        self.tensor = (inner.transpose(self.inverse) if isinstance(inner, np.ndarray)
                       else inner.permute(self.inverse))
        return self.tensor

    def download(self):
        """Stored values of the view after the run; asserts that nothing around it was written."""
        after = self.device.get(self.base, self.dtype)
        outside = np.ones(after.shape, bool)
        outside[self.slices] = False
        changed = outside & (bits(after) != bits(self.memory))
        assert not changed.any(), (
            f"written outside the tensor at {tuple(np.argwhere(changed)[0])} of its allocation")
        return after[self.slices].transpose(self.inverse)


def bits(array):
    array = np.asarray(array)
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize])


# --- formats --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Format:
    table: str            # ragged: indptr, begin; paged: csr, csr_last, block_table, request_map
    page_size: int = 0    # 0: ragged
    layout: str = "NHD"
    joint: bool = False   # one 5-D tensor
    strided: bool = False
    index: str = "int32"
    composed: bool = False
    device_tables: bool = False  # page tables on the device (lengths stay on the host)


FORMATS = {
    "ragged": Format("indptr"),
    "ragged_gaps": Format("begin"),
    "ragged_gaps_i64": Format("begin", index="int64"),
    "ragged_strided": Format("indptr", strided=True),
    "csr_p16": Format("csr", 16),
    "csr_last_p16_hnd": Format("csr_last", 16, "HND", index="int64"),
    "csr_p1": Format("csr", 1),
    "csr_p3_joint": Format("csr_last", 3, joint=True),
    "csr_p64_strided": Format("csr", 64, strided=True),
    "padded_p16": Format("block_table", 16, index="int64"),
    "padded_p64_hnd": Format("block_table", 64, "HND"),
    "padded_p3_hnd_joint": Format("block_table", 3, "HND", joint=True),
    "slots": Format("request_map", 1),
    "slots_i64_strided": Format("request_map", 1, strided=True, index="int64"),
    "shared_p16": Format("csr", 16, composed=True),
    "shared_p1_hnd": Format("block_table", 1, "HND", composed=True),
    "shared_ragged": Format("begin", composed=True),
}
DEVICE_FORMATS = {  # only where there is a device memory
    "device_csr_p16": Format("csr", 16, device_tables=True),
    "device_csr_p1_i64": Format("csr", 1, index="int64", device_tables=True),
    "device_padded_p16_hnd": Format("block_table", 16, "HND", device_tables=True),
    "device_slots": Format("request_map", 1, device_tables=True),
    "device_shared_p16": Format("csr", 16, composed=True, device_tables=True),
}
PAGE_FORMATS = {  # kernels that read boxes of a page: its size against theirs and the tile's
    f"pages{size}_{layout}": Format(("csr", "block_table", "csr_last")[i % 3], size, layout, joint=i % 2 == 1,
                                    strided=i % 4 == 2, index=("int32", "int64")[i // 3 % 2])
    for i, (size, layout) in enumerate(itertools.product((8, 16, 24, 32, 48, 64, 128, 256),
                                                         ("NHD", "HND")))
}

LENGTHS = {  # (q_len, kv_len) of each request
    "none": [],
    "zeros": [(0, 0), (1, 0), (0, 5), (3, 0), (2, 1), (0, 0)],
    "one": [(1, 1)],
    "decode": [(1, n) for n in (1, 63, 64, 65, 0, 127, 128, 129, 257, 2)],
    "tiles": [(63, 63), (64, 64), (65, 65), (1, 1), (0, 130)],
    "prefill": [(127, 130), (129, 129)],
    "extend": [(5, 197), (17, 64), (97, 64), (3, 301)],
    "primes": [(7, 13), (11, 101), (2, 499), (1, 31)],
    "mixed": [(1, 211), (64, 64), (1, 5), (0, 9), (33, 140), (1, 0)],
    "long": [(1, 3001), (1, 17), (2, 1500)],
}


@dataclass
class Keys:
    """Keys in a cache: lists (one a request, or one a node of a level) and the tables to find
    them."""

    k: Buffer
    v: Buffer | None        # None: joint
    levels: list            # table arguments, a dict a level
    total_pages: int


def _unit(dtype):
    """Elements of a stride that every kernel takes: 16 bytes."""
    return 16 if dtype.startswith("float8") else 8


def place_lists(format, lists_k, lists_v, num_kv_heads, d_qk, d_vo, dtype, device, rng,
                fill=np.nan, wild=None, num_spare=3):
    """Puts levels of lists of keys into one cache. lists_k[level][i]: [keys, kv heads, d_qk].

    num_spare pages belong to nobody.
    """
    index = np.dtype(format.index)
    lens = [[len(k) for k in level] for level in lists_k]
    if format.page_size == 0:
        begins, row = [], 0
        for level in lens:
            order = rng.permutation(len(level)) if format.table == "begin" else range(len(level))
            begin = np.zeros(len(level), index)
            for i in order:
                row += rng.integers(0, 4) if format.table == "begin" else 0
                begin[i] = row
                row += level[i]
            begins.append(begin)
        rows = row + (3 if format.table == "begin" else 0)
        pads = ([(2, 1), (1, 0), (0, _unit(dtype))] if format.strided else None)
        order = (1, 0, 2) if format.strided else None
        buffers = [Buffer((rows, num_kv_heads, d), dtype, fill, order, pads) for d in (d_qk, d_vo)]
        for level, begin in enumerate(begins):
            for i, b in enumerate(begin):
                for buffer, lists in zip(buffers, (lists_k, lists_v)):
                    buffer.host[b:b + lens[level][i]] = lists[level][i]
        if format.table == "indptr":
            tables = [{"kv_indptr": np.concatenate([[0], np.cumsum(lens[0])]).astype(index)}]
        else:
            tables = [{"kv_begin": begin, "kv_len": np.array(level, index)}
                      for begin, level in zip(begins, lens)]
        return Keys(*buffers, tables, 0)

    size = format.page_size
    num_pages = [[-(-n // size) for n in level] for level in lens]
    total = sum(map(sum, num_pages))
    ids = rng.permutation(total + num_spare)
    if wild == "page":
        wild = int(ids[-1])
    nhd = format.layout == "NHD"
    pads = ([(1, 1), (0, 2), (1, 0), (0, _unit(dtype))] if format.strided else None)

    def pages(d):
        inner = (size, num_kv_heads) if nhd else (num_kv_heads, size)
        return Buffer((total + num_spare, *inner, d), dtype, fill, pad=pads)

    if format.joint:
        assert d_qk == d_vo
        inner = (size, num_kv_heads) if nhd else (num_kv_heads, size)
        k = Buffer((total + num_spare, 2, *inner, d_qk), dtype, fill)
        v = None
        hosts = [k.host[:, 0], k.host[:, 1]]
    else:
        k, v = pages(d_qk), pages(d_vo)
        hosts = [k.host, v.host]
    tables, next_id = [], 0
    for level, counts in enumerate(num_pages):
        owned = []
        for i, count in enumerate(counts):
            mine = ids[next_id:next_id + count]
            next_id += count
            owned.append(mine)
            for host, lists in zip(hosts, (lists_k, lists_v)):
                for j, page in enumerate(mine):
                    rows = lists[level][i][j * size:(j + 1) * size]
                    if nhd:
                        host[page, :len(rows)] = rows
                    else:
                        host[page, :, :len(rows)] = rows.transpose(1, 0, 2)
        tables.append(page_table(format, owned, lens[level], index, rng, device, wild))
    return Keys(k, v, tables, sum(map(sum, num_pages)))


def page_table(format, owned, lens, index, rng, device, wild=None):
    """Table arguments of one level. Entries that must never be read are wild."""
    size, wild = format.page_size, np.iinfo(index).max if wild is None else wild
    lens = np.array(lens, index)
    placed = device.put if format.device_tables else np.asarray
    if format.table in ("csr", "csr_last"):
        indptr = np.concatenate([[0], np.cumsum([len(p) for p in owned])]).astype(index)
        indices = np.concatenate([np.empty(0, index), *owned]).astype(index)  # ends with its memory
        table = {"kv_page_indptr": placed(indptr), "kv_page_indices": placed(indices)}
        if format.table == "csr":
            return table | {"kv_len": lens}
        return table | {"kv_last_page_len": np.where(lens > 0, (lens - 1) % size + 1, 0).astype(index)}
    rows = len(owned) + (3 if format.table == "request_map" else 0)
    table = np.full((rows, max([len(p) for p in owned], default=0) + 2), wild, index)
    row_of = rng.permutation(rows)[:len(owned)] if format.table == "request_map" else range(len(owned))
    for row, pages in zip(row_of, owned):
        table[row, :len(pages)] = pages
    out = {"block_table": placed(table), "kv_len": lens}
    if format.table == "request_map":
        out["request_map"] = placed(np.array(row_of, index))
    return out


# --- a case ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Case:
    format: str = "csr_p16"
    variant: object = "causal"  # a name in VARIANTS, or a TestVariant
    lengths: object = "decode"  # a name in LENGTHS or a tuple of (q_len, kv_len)
    dtype: str = "bfloat16"
    head_dim_qk: int = 64
    head_dim_vo: int = 0        # 0: head_dim_qk
    num_kv_heads: int = 2
    group_size: int = 4
    padding: int = 0            # rows of q beyond the planned tokens
    strided: bool = False       # q, out, lse
    max_ctas: int = 0
    scheduler: str = "auto"
    given_out: bool = True      # out= and lse= given
    sm_scale: float | None = None
    split: bool = False         # the plan must be split
    decode_only: bool = False   # bounds with max_q_len 1
    scale_q: float = 1.5
    fill: float = np.nan        # what lies in every slot of the cache that no key owns
    wild: object = None         # entries of tables that must not be read; None: the largest index;
                                #   "page": a page that nobody owns
    spare_pages: int = 3        # pages that belong to nobody
    max_requests: int = 0       # bounds beyond the batch
    max_query_tokens: int = 0
    max_keys: int = 0
    max_pages: int = 0
    kv_dtype: str | None = None  # float8_e4m3fn or float8_e5m2, with scales; None: dtype
    k_scale: float = 1.0
    v_scale: float = 1.0
    invariant: object = False   # True, or keys of a chunk

    def __str__(self):
        named = self.lengths if isinstance(self.lengths, str) else "x".join(
            f"{a}.{b}" for a, b in self.lengths)
        dims = f"d{self.head_dim_qk}" + (f"v{self.head_dim_vo}" if self.head_dim_vo else "")
        flags = "".join(f"-{n}" for n, on in [
            ("decode", self.decode_only), ("pad", self.padding), ("strided", self.strided),
            ("alloc", not self.given_out), ("lpt", self.scheduler == "lpt"),
            (f"ctas{self.max_ctas}", self.max_ctas),
            (f"invariant{int(self.invariant)}", self.invariant), (f"scale{self.sm_scale}", self.sm_scale),
            (f"q{self.scale_q}", self.scale_q != 1.5),
            (f"{self.kv_dtype}*{self.k_scale}*{self.v_scale}", self.kv_dtype)] if on)
        variant = self.variant if isinstance(self.variant, str) else "variant"
        return (f"{self.format}-{variant}-{named}-{self.dtype}-{dims}-"
                f"h{self.num_kv_heads}x{self.group_size}{flags}")

    @property
    def requests(self):
        return LENGTHS[self.lengths] if isinstance(self.lengths, str) else list(self.lengths)


@dataclass
class Built:
    """A case's data on a device, its Attention, and what the reference needs."""

    case: Case
    device: object
    attention: object
    plan_args: dict
    q: Buffer
    keys: Keys
    request_keys: list            # (k, v) of each request, stored values as float32
    variant: object
    variant_args: dict
    out: Buffer
    lse: Buffer
    results: list = field(default_factory=list)

    @property
    def kv(self):
        return self.keys.k.tensor if self.keys.v is None else (self.keys.k.tensor,
                                                               self.keys.v.tensor)


def kv_format(format):
    kv = (plait.RaggedKv() if format.page_size == 0
          else plait.PagedKv(format.page_size, layout=format.layout))
    return plait.ComposedKv(kv, num_levels=2) if format.composed else kv


def share_prefixes(case, rng):
    """Splits each request's keys into a node two requests or more share and a rest of its own.

    Siblings are not neighbours in the batch (even and odd requests); short requests and the last
    one are under no node. Returns (prefix of each node, requests of each node, prefix length of
    each request).
    """
    requests = case.requests
    members = [[i for i in range(len(requests) - 1) if i % 2 == parity and requests[i][1] >= least]
               for parity, least in ((0, 5), (1, 40))]
    members = [m for m in members if m]
    lengths = [int(rng.integers(1, 1 + min(requests[i][1] for i in m))) for m in members]
    prefix_of = [0] * len(requests)
    for m, n in zip(members, lengths):
        for i in m:
            prefix_of[i] = n
    return lengths, members, prefix_of


def random_masks(requests, kind, rng):
    """Masks [q_len, kv_len] with a row of nothing here and there, and the first key each covers."""
    masks, first = [], []
    for q_len, kv_len in requests:
        begin = 0 if kind == "all" else int(rng.integers(max(0, kv_len - 70), kv_len + 1))
        mask = rng.random((q_len, kv_len)) < rng.random((q_len, 1)) * 1.2 - 0.1
        mask[:, :begin] = True
        masks.append(mask)
        first.append(begin)
    return masks, first


def mask_arguments(masks, first, index, device, rng):
    """plan() arguments of the masks: bits or bools, on host or device, with indptr or without."""
    covered = [mask[:, begin:] for mask, begin in zip(masks, first)]
    if rng.random() < 0.5:
        name, parts = "custom_mask", [mask.ravel() for mask in covered]
        joined = np.concatenate([np.empty(0, bool), *parts])
    else:
        name = "packed_custom_mask"
        parts = [np.packbits(mask.ravel(), bitorder="little") for mask in covered]
        joined = np.concatenate([np.empty(0, np.uint8), *parts])
    args = {name: device.put(joined) if rng.random() < 0.7 else joined}
    if any(first):
        args["first_masked_key"] = np.array(first, index)
    if rng.random() < 0.5:
        args["mask_indptr"] = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(index)
    return args


def build(case, device_name, kernel="auto", data=None, workspace=None):
    """data: (q [tokens, heads, d], k of each request, v of each request) as values; None:
    random."""
    device = device_of(device_name)
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    format = (FORMATS | DEVICE_FORMATS | PAGE_FORMATS)[case.format]
    requests = case.requests
    d_qk, d_vo = case.head_dim_qk, case.head_dim_vo or case.head_dim_qk
    heads_kv, heads_qo = case.num_kv_heads, case.num_kv_heads * case.group_size

    kv_dtype = case.kv_dtype or case.dtype

    def values(n, heads, d, scale=1.0, dtype=kv_dtype):
        return reference.to_storage(scale * rng.standard_normal((n, heads, d)), dtype)

    if format.composed:
        lengths, members, prefix_of = share_prefixes(case, rng)
        counts = [lengths, [kv - p for (_, kv), p in zip(requests, prefix_of)]]
    else:
        members, prefix_of = [], [0] * len(requests)
        counts = [[kv for _, kv in requests]]
    if data is None:
        lists_k = [[values(n, heads_kv, d_qk, 1 / case.k_scale) for n in level] for level in counts]
        lists_v = [[values(n, heads_kv, d_vo, 1 / case.v_scale) for n in level] for level in counts]
    else:
        assert not format.composed and [[len(k) for k in data[1]]] == counts
        lists_k, lists_v = ([[reference.to_storage(x / np.float32(scale), kv_dtype) for x in lists]]
                            for lists, scale in zip(data[1:], (case.k_scale, case.v_scale)))
    keys = place_lists(format, lists_k, lists_v, heads_kv, d_qk, d_vo, kv_dtype, device, rng,
                       case.fill, case.wild, case.spare_pages)

    node_of = {i: n for n, m in enumerate(members) for i in m}
    request_keys = []
    for i in range(len(requests)):
        parts = [level[i] for level in (lists_k[-1], lists_v[-1])]
        if i in node_of:
            parts = [np.concatenate([shared[0][node_of[i]], own])
                     for shared, own in zip((lists_k, lists_v), parts)]
        request_keys.append([np.float64(scale) * reference.from_storage(x, kv_dtype)
                             for x, scale in zip(parts, (case.k_scale, case.v_scale))])

    index = np.dtype(format.index)
    qo_indptr = np.concatenate([[0], np.cumsum([n for n, _ in requests])]).astype(index)
    tokens = int(qo_indptr[-1])
    plan_args = {"qo_indptr": qo_indptr}
    if format.composed:
        node_indptr = np.concatenate([[0], np.cumsum([len(m) for m in members])]).astype(index)
        node_requests = np.array([i for m in members for i in m], index)
        plan_args["levels"] = [
            plait.Level(node_indptr=node_indptr, node_requests=node_requests, **keys.levels[0]),
            plait.Level(**keys.levels[1])]
    else:
        plan_args |= keys.levels[0]

    rows = tokens + case.padding
    pad = [(1, 2), (2, 1), (8, 8)] if case.strided else None
    q = Buffer((rows, heads_qo, d_qk), case.dtype, np.nan, pad=pad)
    q.host[:tokens] = (values(tokens, heads_qo, d_qk, case.scale_q, case.dtype) if data is None
                       else reference.to_storage(data[0], case.dtype))
    out = Buffer((rows, heads_qo, d_vo), case.dtype, SENTINEL, pad=pad)
    lse = Buffer((rows, heads_qo), "float32", SENTINEL, pad=[(1, 0), (0, 12)] if pad else None)
    for buffer in (q, out, lse, keys.k, keys.v):
        if buffer is not None:
            buffer.upload(device)

    variant = VARIANTS[case.variant] if isinstance(case.variant, str) else case.variant
    if variant.mask:
        masks, first = random_masks(requests, variant.mask, rng)
        plan_args |= mask_arguments(masks, first, index, device, rng)
        variant = dataclasses.replace(variant, functors=Masked(masks, variant.functors))
    dims = {"head_dim": d_qk} if d_qk == d_vo else {"head_dim_qk": d_qk, "head_dim_vo": d_vo}
    attention = plait.Attention(
        num_qo_heads=heads_qo, num_kv_heads=heads_kv, **dims, dtype=case.dtype,
        kv_dtype=case.kv_dtype, kv=kv_format(format), device=device.name, variant=variant.make(),
        bounds=plait.Bounds(requests=max(1, len(requests), case.max_requests),
                            query_tokens=max(1, rows, case.max_query_tokens),
                            keys=max([1, case.max_keys, *(kv for _, kv in requests)]),
                            total_pages=max(keys.total_pages, case.max_pages),
                            max_q_len=1 if case.decode_only else 0),
        scheduler=case.scheduler, kernel=kernel, max_ctas=case.max_ctas, workspace=workspace,
        invariant=case.invariant)
    args = {name: device.put(x) if isinstance(x, np.ndarray) else x
            for name, x in variant.arguments(heads_qo, d_qk).items()}
    return Built(case, device, attention, plan_args, q, keys, request_keys, variant, args, out, lse)


def execute(built):
    """Plans and runs; returns (plan, out, lse): stored out and float32 lse (None without
    softmax)."""
    case = built.case
    plan = built.attention.plan(**built.plan_args)
    more = {} if case.sm_scale is None else {"sm_scale": case.sm_scale}
    if case.kv_dtype:
        more |= {"k_scale": case.k_scale, "v_scale": case.v_scale}
    softmax = built.variant.functors.use_softmax
    if case.given_out:
        more["out"] = built.out.tensor
        if softmax:
            more["lse"] = built.lse.tensor
    out, lse = built.attention.run(built.q.tensor, built.kv, **more, **built.variant_args)
    built.device.synchronize()
    if case.given_out:
        return plan, built.out.download(), built.lse.download() if softmax else None
    return plan, built.device.get(out, case.dtype), (built.device.get(lse) if softmax else None)


def expected(built):
    """(out, lse, out of the plain computation, its lse) of each request; computed once."""
    if built.results:
        return built.results
    case, results, begin = built.case, built.results, 0
    q_host = reference.from_storage(built.q.host, case.dtype)
    for i, (q_len, _) in enumerate(case.requests):
        q = q_host[begin:begin + q_len]
        begin += q_len
        k, v = built.request_keys[i]
        options = dict(sm_scale=case.sm_scale, request=i, **built.variant.visibility)
        exact = reference.attention(q, k, v, functors=built.variant.functors, **options)
        plain = reference.attention(q, k, v, real=np.float32,
                                    functors=built.variant.functors,
                                    stored=lambda x: reference.rounded(x, case.dtype), **options)
        results.append((*exact, *plain))
    return results


def compare(name, got, want, tolerance, place=""):
    """Fails with the worst place and both values. NaN never passes."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{place}{name}: shape {got.shape}, not {want.shape}"
    if got.size == 0:
        return
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0, np.abs(got - want))  # equal infinities are equal
    excess = np.where(np.isnan(error), np.inf, error - tolerance)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    allowed = np.broadcast_to(tolerance, got.shape)[worst]
    assert excess[worst] <= 0, (
        f"{place}{name}[{', '.join(map(str, map(int, worst)))}] is {got[worst]!r}, "
        f"should be {want[worst]!r} within {allowed:.3g}; "
        f"{int((excess > 0).sum())} of {got.size} values are off")


def compare_with_reference(built, out, lse):
    case = built.case
    out = reference.from_storage(out, case.dtype)
    begin = 0
    for i, (want, want_lse, plain, plain_lse) in enumerate(expected(built)):
        end, place = begin + len(want), f"request {i}, "
        scale = np.abs(want).max(initial=0)
        error = np.abs(plain - want).max(initial=0)
        compare("out", out[begin:end], want,
                2 * error + EPSILON[case.dtype] * np.abs(want) + 4e-6 * scale, place)
        if lse is not None:
            seen = np.isfinite(want_lse)
            error = np.abs(plain_lse[seen] - want_lse[seen]).max(initial=0)
            magnitude = np.where(seen, np.abs(want_lse), 0)
            compare("lse", lse[begin:end], want_lse, 2 * error + 2e-5 + 1e-6 * magnitude, place)
        begin = end
    padding = f"padding from row {begin}, "
    compare("out", out[begin:], np.zeros_like(out[begin:]), 0, padding)
    if lse is not None:
        compare("lse", lse[begin:], np.full_like(lse[begin:], -np.inf), 0, padding)


def check(case, device="cpu", kernel="auto"):
    """Builds, runs and compares. Returns the built case for further questions."""
    built = build(case, device, kernel)
    inputs = [bits(b.memory).copy() for b in (built.q, built.keys.k, built.keys.v) if b is not None]
    plan, out, lse = execute(built)
    compare_with_reference(built, out, lse)
    after = [b for b in (built.q, built.keys.k, built.keys.v) if b is not None]
    for buffer, before in zip(after, inputs):
        now = bits(built.device.get(buffer.base, buffer.dtype))
        assert np.array_equal(now, before), "an input was changed by the run"
    if case.split:
        assert len(plan.merge_indptr) > 0, "the case is there for split rows, but is not split"
    built.plan = plan
    return built


def same_bits(a, b, name):
    a, b = bits(np.ascontiguousarray(a)), bits(np.ascontiguousarray(b))
    assert a.shape == b.shape, f"{name}: shapes {a.shape} and {b.shape}"
    if not np.array_equal(a, b):
        where = tuple(int(x) for x in np.argwhere(a != b)[0])
        raise AssertionError(f"{name}{list(where)}: bits {a[where]:#x} and {b[where]:#x}; "
                             f"{int((a != b).sum())} of {a.size} differ")


def attend(data, device="cpu", kernel="auto", **fields):
    """Runs a case over given data; returns (out float32, lse, built). See build() for `data`.

    Head counts, head dims and lengths are those of the data; q_lens, if given, the split of q.
    """
    q, k, v = data
    q_lens = fields.pop("q_lens", None) or [len(q)]
    case = Case(lengths=tuple((n, len(x)) for n, x in zip(q_lens, k, strict=True)),
                head_dim_qk=q.shape[-1], head_dim_vo=fields.pop("head_dim_vo", v[0].shape[-1]),
                num_kv_heads=k[0].shape[1], group_size=q.shape[1] // k[0].shape[1], **fields)
    built = build(case, device, kernel, data)
    built.plan, out, lse = execute(built)
    built.stored_out = out
    return reference.from_storage(out, case.dtype), lse, built
