"""KV formats: how K and V lie in memory. The cache is taken as it is; nothing is copied."""

from collections.abc import Sequence

import numpy as np

from plait import _plait
from plait.arguments import instance, integer

KvFormat = _plait.KvFormat
TABLES = (
    "kv_len",
    "kv_indptr",
    "kv_begin",
    "kv_page_indptr",
    "kv_page_indices",
    "kv_last_page_len",
    "block_table",
    "request_map",
)


def RaggedKv() -> KvFormat:
    """K and V [kv tokens, num_kv_heads, dim]; each request is a run of rows, gaps allowed.

    plan() takes kv_indptr [n + 1], or kv_begin [n] and kv_len [n] (host; or with qo_indptr on the
    device).
    """
    return _plait.ragged_kv()


def PagedKv(page_size: int, layout: str = "NHD") -> KvFormat:
    """K and V in pages of `page_size` >= 1 tokens, [page, page_size, head, dim] (NHD) or
    [page, head, page_size, dim] (HND), as two 4-D tensors or one 5-D [page, 2, ...].

    plan() takes one of: kv_page_indptr and kv_page_indices (CSR), with kv_len or kv_last_page_len;
    block_table [rows, max blocks] and kv_len, with request_map [n] if row i is not request i.
    Raises ValueError for other layouts and for page_size < 1.
    """
    if layout not in ("NHD", "HND"):
        raise ValueError(f"layout is {layout!r}; taken are 'NHD' and 'HND'")
    return _plait.paged_kv(integer("PagedKv", "page_size", page_size), layout == "HND")


def ComposedKv(format: KvFormat, num_levels: int) -> KvFormat:
    """Several levels over one cache: plan(levels=[Level(...), ...]) lists the keys of each;
    compose_radix() makes the list. num_levels is 1 ... 8."""
    format = instance("ComposedKv", "format", format, KvFormat, "RaggedKv() or PagedKv(...)")
    return _plait.composed_kv(format, integer("ComposedKv", "num_levels", num_levels))


class Level:
    """One level of a composed format: nodes, each a list of keys read by the requests under it.

    node_indptr [nodes + 1] and node_requests say which requests are under each node; without them
    node i is request i. `tables` are those of plan() for the format, one list a node.
    """

    def __init__(self, node_indptr=None, node_requests=None, **tables):
        _refuse_unknown("Level", tables)
        self.node_indptr, self.node_requests, self.tables = node_indptr, node_requests, tables


class ComposedLevels(Sequence):
    """The levels that compose_radix() made: a sequence of Level, for plan(levels=...)."""

    def __init__(self, impl):
        self._impl = impl
        self._levels = None

    def _list(self):
        if self._levels is None:
            self._levels = [
                Level(_array(indptr), _array(requests), **given(**_arrays(tables)))
                for indptr, requests, tables in self._impl.levels
            ]
        return self._levels

    def __len__(self):
        return len(self._list())

    def __getitem__(self, index):
        return self._list()[index]


def _array(stored):
    """An index array of the extension: (bytes, bytes an entry), None: not given."""
    return stored and np.frombuffer(stored[0], np.dtype(f"i{stored[1]}"))


def _arrays(tables):
    return {name: _array(stored) for name, stored in tables.items()}


def _refuse_unknown(where, tables):
    for name in tables:
        if name not in TABLES:
            raise TypeError(f"{where}: {name} is no table; taken are {', '.join(TABLES)}")


def given(**arrays):
    """The arrays that are not None."""
    return {name: array for name, array in arrays.items() if array is not None}


def level_tuples(levels):
    """Levels as the extension takes them."""
    if levels is None:
        return []
    if isinstance(levels, ComposedLevels):
        return levels._impl
    try:
        levels = list(levels)
    except TypeError:
        raise TypeError(f"levels is {levels!r}; it must be a list of plait.Level") from None
    for i, level in enumerate(levels):
        if not isinstance(level, Level):
            raise TypeError(f"levels[{i}] must be a plait.Level, not {type(level).__name__}")
    return [(level.node_indptr, level.node_requests, given(**level.tables)) for level in levels]
