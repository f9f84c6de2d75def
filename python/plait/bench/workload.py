"""A Case with its data, planned and checked, as every measurement shares it.

K, V and q are rows of long pools that all cases share: element i of a pool is bank[i % _PERIOD], so
that the host knows every row of a cache of gigabytes without keeping a copy. Pages are shuffled.
"""

import numpy as np

from plait.attention import Attention, Bounds
from plait.bench.case_variants import CASE_VARIANTS
from plait.checking import RowCheck
from plait.compose import compose_radix
from plait.counting import attention_work
from plait.device_array import DeviceArray
from plait.formats import ComposedKv, PagedKv, RaggedKv
from plait.reference import to_storage

_PERIOD = 2039 * 4096  # no power of two: a wrong page holds other rows
_MAX_KEYS_CHECKED = 200_000


class Pools:
    """Standard normal values on a device, one long array for each of q, k and v and each dtype."""

    def __init__(self, device, workloads=()):
        self._device = device
        self._banks, self._arrays, self._elements = {}, {}, {}
        for workload in workloads:
            for key, shape in workload.shapes().items():
                self._elements[key] = max(self._elements.get(key, 0), int(np.prod(shape)))

    def take(self, key, shape):
        """The first elements of pool `key`, (which, dtype), in this shape."""
        count = int(np.prod(shape))
        if key not in self._arrays:
            self._arrays[key] = self._make(key, max(count, self._elements.get(key, 0)))
        array = self._arrays[key]
        if isinstance(array, np.ndarray):
            return array[:count].reshape(shape)
        return array.rows(0, count).reshape(*shape)

    def host_rows(self, key, rows, width):
        """Rows of `width` elements, by number, as stored."""
        at = np.asarray(rows)[:, None] * width + np.arange(width)
        return self._bank(key)[at % _PERIOD]

    def _bank(self, key):
        if key not in self._banks:
            which, dtype = key
            rng = np.random.default_rng("qkv".index(which))
            self._banks[key] = to_storage(rng.standard_normal(_PERIOD, np.float32), dtype)
        return self._banks[key]

    def _make(self, key, count):
        bank = self._bank(key)
        if self._device == "cpu":
            return np.resize(bank, count)
        dtype = "uint8" if key[1].startswith("float8") else key[1]  # its bits
        array = DeviceArray((count,), dtype, self._device)
        for begin in range(0, count, _PERIOD):
            part = min(_PERIOD, count - begin)
            array.rows(begin, begin + part).copy_from(bank[:part], None)
        return array


class Workload:
    """A Case on a device; kernel: forces one where the case itself does not; cost_model: of
    Attention."""

    def __init__(self, case, device="cpu", kernel="auto", cost_model=None):
        self.case, self.device, self.cost_model = case, device, cost_model
        self.kernel = kernel if case.kernel == "auto" else case.kernel
        self.variant = CASE_VARIANTS[case.variant]
        self.q_len = np.array(case.q_len, np.int32)
        self.kv_len = np.array(case.kv_len, np.int32)
        self.qo_indptr = np.concatenate([[0], np.cumsum(self.q_len)]).astype(np.int32)
        self.kv_indptr = np.concatenate([[0], np.cumsum(self.kv_len)]).astype(np.int32)
        self.attention = None

    def compile(self):
        """Makes the Attention. Raises ValueError for what plait does not take."""
        case = self.case
        kv = PagedKv(case.page_size) if case.page_size else RaggedKv()
        # As many as the batch has, where it alone says so; 0: as many as the other bounds need.
        exact = case.page_size and case.num_levels == 1 and not case.padding
        self.attention = Attention(
            num_qo_heads=case.num_qo_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim_qk=case.head_dim,
            head_dim_vo=case.head_dim_vo,
            dtype=case.dtype,
            kv_dtype=case.kv_dtype,
            kv=kv if case.num_levels == 1 else ComposedKv(kv, case.num_levels),
            device=self.device,
            kernel=self.kernel,
            invariant=case.invariant or False,
            scheduler=case.scheduler,
            cost_model=self.cost_model,
            variant=self.variant.build(),
            bounds=Bounds(
                requests=max(len(self.q_len), case.requests_bound),
                query_tokens=max(case.tokens + case.padding, case.query_bound),
                keys=int(self.kv_len.max()),
                total_pages=int(self.pages()[0].sum()) if exact else 0,
                max_q_len=max(int(self.q_len.max()), case.query_bound),
            ),
        )

    def pages(self):
        """(pages of each request, how many of them are those of all requests)."""
        return -(-self.kv_len // self.case.page_size), self.case.shared_len // self.case.page_size

    def _num_pages(self):
        pages, common = self.pages()
        return int((pages - common).sum()) + common

    def shapes(self):
        """Pool and shape of q, k and v."""
        case = self.case
        kv = (case.keys,) if not case.page_size else (self._num_pages(), case.page_size)
        kv += (case.num_kv_heads,)
        kv_dtype = case.kv_dtype or case.dtype
        return {
            ("q", case.dtype): (case.tokens + case.padding, case.num_qo_heads, case.head_dim),
            ("k", kv_dtype): (*kv, case.head_dim),
            ("v", kv_dtype): (*kv, case.head_dim_vo),
        }

    def lay_out(self, pools):
        """Tensors and page tables, of the same values whenever it is called; nothing runs."""
        case = self.case
        self._pools = pools
        self._keys = list(self.shapes())
        self.q, *cache = (pools.take(key, shape) for key, shape in self.shapes().items())
        self.cache = tuple(cache)
        if case.page_size:
            pages, common = self.pages()
            self.page_indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
            rng = np.random.default_rng(0)
            ids = rng.permutation(self._num_pages()).astype(np.int32)
            of_all, rest = np.split(ids, [common])
            own = np.split(rest, np.cumsum(pages - common)[:-1])
            self.page_indices = np.concatenate([x for ids in own for x in (of_all, ids)])
        self.run_args = {
            name: x if self.device == "cpu" else DeviceArray.from_numpy(x, self.device)
            for name, x in self.variant.run(case.num_qo_heads).items()
        }

    def _batch(self):
        """What plan() takes."""
        case = self.case
        if case.page_size:
            tables = dict(
                kv_page_indptr=self.page_indptr,
                kv_page_indices=self.page_indices,
                kv_len=self.kv_len,
            )
        else:
            tables = dict(kv_indptr=self.kv_indptr)
        if case.num_levels > 1:
            # Hashes of one block each: that of all requests, or, where they share none, their own.
            levels = compose_radix(
                self.attention,
                qo_indptr=self.qo_indptr,
                hash_ids=[[0 if case.shared_len else i] for i in range(len(self.q_len))],
                block_tokens=case.shared_len or int(self.kv_len.min()),
                **tables,
            )
            tables = dict(levels=levels)
        tables |= self.variant.plan(case.q_len, case.kv_len)
        return dict(qo_indptr=self.qo_indptr, **tables)

    def prepare(self):
        """Plans and runs once; check() then says whether the rows were right."""
        self._planned = self._batch()
        self.plan = self.attention.plan(**self._planned)
        self.out, self.lse = self.attention.run(self.q, self.cache, **self.run_args)
        self._sampled = self._sample()

    def run(self, stream=None):
        """What is timed: a run, with call "plan" after planning it."""
        if self.case.call == "plan":
            self.attention.plan(**self._planned, stream=stream)
        self.attention.run(
            self.q, self.cache, out=self.out, lse=self.lse, stream=stream, **self.run_args
        )

    def release(self):
        """Frees what lies on the device, but for the pools."""
        self.attention = self.out = self.lse = self.q = self.cache = self.run_args = None

    def slots(self, request):
        """Rows of K and V, counted over the whole cache, that hold the keys of a request."""
        position = np.arange(self.kv_len[request])
        size = self.case.page_size
        if not size:
            return self.kv_indptr[request] + position
        pages = self.page_indices[self.page_indptr[request] + position // size]
        return pages.astype(np.int64) * size + position % size

    def _sample(self):
        """(token, out, lse) of the first and the last token and some between."""
        rng = np.random.default_rng(1)
        tokens = {0, self.case.tokens - 1, *rng.integers(self.case.tokens, size=6).tolist()}
        read = _row_of(self.device)
        return [(t, read(self.out, t), read(self.lse, t)) for t in sorted(tokens)]

    def same_bits(self):
        """Whether the sampled rows are still what the first run left."""
        return all(
            (out == old_out).all() and (lse == old_lse).all()
            for (_, out, lse), (_, old_out, old_lse) in zip(self._sample(), self._sampled)
        )

    def check(self):
        """Sampled (token, kv head) against the float64 reference: "" or what is off."""
        case, seen = self.case, 0
        check = RowCheck(case.dtype, case.kv_dtype)
        rng = np.random.default_rng(2)
        group = case.num_qo_heads // case.num_kv_heads
        q_key, k_key, v_key = self._keys
        for token, out, lse in self._sampled:
            request = int(np.searchsorted(self.qo_indptr, token, side="right")) - 1
            seen += int(self.kv_len[request])
            if check.num_rows and seen > _MAX_KEYS_CHECKED:
                continue
            kv_head = int(rng.integers(case.num_kv_heads))
            heads = np.arange(kv_head * group, (kv_head + 1) * group)
            q = self._pools.host_rows(q_key, [token], case.num_qo_heads * case.head_dim)
            rows = self.slots(request) * case.num_kv_heads + kv_head
            k = self._pools.host_rows(k_key, rows, case.head_dim)[:, None]
            v = self._pools.host_rows(v_key, rows, case.head_dim_vo)[:, None]
            i = token - self.qo_indptr[request]
            check.add(
                q.reshape(case.num_qo_heads, case.head_dim)[heads],
                k,
                v,
                out[heads],
                lse[heads],
                **self.variant.visible,
                functors=self.variant.functors(heads, case.num_qo_heads),
                q_pos=np.array([i + self.kv_len[request] - self.q_len[request]]),
            )
        if check.worst > 1:
            return f"a sampled row is off: {check.describe()}"
        if case.padding:
            out, lse = (_row_of(self.device)(x, case.tokens) for x in (self.out, self.lse))
            if out.any() or (lse != -np.inf).any():
                return "a padding row is not (0, -inf)"
        return ""

    def work(self):
        """(flops, bytes) of a run."""
        case = self.case
        return attention_work(
            self.q_len,
            self.kv_len,
            num_qo_heads=case.num_qo_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim_qk=case.head_dim,
            head_dim_vo=case.head_dim_vo,
            dtype=case.dtype,
            kv_dtype=case.kv_dtype,
            shared_len=case.shared_len,
            **self.variant.visible,
        )


def _row_of(device):
    """Reads row t of an array there, (array, t)."""
    if device == "cpu":
        return lambda array, t: array[t].copy()
    return lambda array, t: array.rows(t, t + 1).to_numpy()[0]
