"""A batch with data, as the measurements share it: laid out ragged or in shuffled pages, and
checked on sampled rows before anything is timed."""

from dataclasses import dataclass

import numpy as np

from plait.attention import Attention, Bounds
from plait.checking import RowCheck
from plait.counting import attention_work
from plait.device_array import DeviceArray
from plait.formats import PagedKv, RaggedKv
from plait.reference import to_storage
from plait.variants import causal, full

_BANK = 8191  # rows drawn; a token takes one of them


@dataclass
class Workload:
    """`batch` requests of q_len queries over kv_len keys. page_size 0: ragged."""

    batch: int
    q_len: int
    kv_len: int
    dtype: str = "bfloat16"
    page_size: int = 0
    causal: bool = True
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    device: str = "cpu"
    kernel: str = "auto"

    def prepare(self):
        """Draws, lays out, plans; the attention is ready to run."""
        rng = np.random.default_rng(0)

        def bank(heads, scale):
            values = rng.standard_normal((_BANK, heads, self.head_dim), np.float32)
            return to_storage(values * np.float32(scale), self.dtype)

        tokens, keys = self.batch * self.q_len, self.batch * self.kv_len
        self.q = bank(self.num_qo_heads, 2)[rng.integers(_BANK, size=tokens)]
        self._bank_k, self._bank_v = bank(self.num_kv_heads, 1), bank(self.num_kv_heads, 1)
        self._content = rng.integers(_BANK, size=keys)  # of each key, request after request
        qo_indptr = np.arange(self.batch + 1, dtype=np.int32) * self.q_len
        kv_len = np.full(self.batch, self.kv_len, np.int32)
        if self.page_size:
            pages = -(-self.kv_len // self.page_size)
            table = rng.permutation(self.batch * pages).astype(np.int32).reshape(self.batch, pages)
            position = np.arange(self.kv_len)
            slots = (
                table[:, position // self.page_size] * self.page_size + position % self.page_size
            )
            tables = dict(kv_len=kv_len, block_table=table)
            kv, num_slots = PagedKv(self.page_size), self.batch * pages * self.page_size
        else:
            slots, kv, num_slots = np.arange(keys), RaggedKv(), keys
            tables = dict(kv_indptr=np.arange(self.batch + 1, dtype=np.int64) * self.kv_len)
        cached = []
        for source in (self._bank_k, self._bank_v):
            array = np.zeros((num_slots, *source.shape[1:]), source.dtype)
            array[slots.ravel()] = source[self._content]
            cached.append(
                array.reshape(-1, self.page_size, *array.shape[1:]) if self.page_size else array
            )
        self.cache = tuple(cached)
        if self.device != "cpu":
            self.q_host = self.q
            self.q = DeviceArray.from_numpy(self.q, self.device, self.dtype)
            self.cache = tuple(
                DeviceArray.from_numpy(x, self.device, self.dtype) for x in self.cache
            )
        else:
            self.q_host = self.q
        self._kv, self._tables, self._rng = kv, dict(qo_indptr=qo_indptr, **tables), rng
        return self.use_kernel(self.kernel)

    def use_kernel(self, kernel):
        """Plans for `kernel` and checks it, on the same data."""
        self.kernel = kernel
        self.attention = Attention(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            kv=self._kv,
            device=self.device,
            kernel=self.kernel,
            variant=causal() if self.causal else full(),
            bounds=Bounds(
                requests=self.batch,
                query_tokens=self.batch * self.q_len,
                keys=self.kv_len,
                max_q_len=self.q_len,
            ),
        )
        self.plan = self.attention.plan(**self._tables)
        self.out, self.lse = self.attention.run(self.q, self.cache)
        self._check(self._rng)
        return self

    def run(self, stream=None):
        self.attention.run(self.q, self.cache, out=self.out, lse=self.lse, stream=stream)

    def keys_values(self, request):
        content = self._content[request * self.kv_len : (request + 1) * self.kv_len]
        return self._bank_k[content], self._bank_v[content]

    def _check(self, rng, num_rows=6):
        """Raises RuntimeError if a sampled row is off: nothing is timed that is wrong."""
        out, lse = (x if isinstance(x, np.ndarray) else x.to_numpy() for x in (self.out, self.lse))
        check = RowCheck(self.dtype)
        for at in rng.choice(len(out), min(num_rows, len(out)), replace=False):
            request, i = divmod(int(at), self.q_len)
            k, v = self.keys_values(request)
            check.add(
                self.q_host[at],
                k,
                v,
                out[at],
                lse[at],
                causal=self.causal,
                q_pos=np.array([i + self.kv_len - self.q_len]),
            )
        if not check.worst <= 1:
            raise RuntimeError(f"{self.name}: a sampled row is off: {check.describe()}")

    @property
    def name(self):
        layout = f"page {self.page_size}" if self.page_size else "ragged"
        kind = (
            f"decode {self.batch} x {self.kv_len}"
            if self.q_len == 1
            else (f"prefill {'causal' if self.causal else 'full'} {self.batch} x {self.q_len}")
        )
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} heads, d {self.head_dim}"
        return f"{kind}, {layout}, {self.dtype}, {heads}"

    def work(self):
        """(flops, bytes) of a run."""
        lengths = np.full(self.batch, self.q_len), np.full(self.batch, self.kv_len)
        return attention_work(
            *lengths,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_vo=self.head_dim,
            dtype=self.dtype,
            causal=self.causal,
        )
