"""compose_radix: the levels of a composed format from what requests have in common."""

import numpy as np

from plait import _plait
from plait.arguments import instance, integer
from plait.attention import Attention
from plait.formats import TABLES, ComposedLevels, given

_WHERE = "compose_radix"


def compose_radix(
    attention,
    *,
    qo_indptr,
    node_parent=None,
    request_node=None,
    hash_ids=None,
    block_tokens=None,
    hashed_len=None,
    max_levels=None,
    **tables,
) -> ComposedLevels:
    """Levels for attention.plan(levels=...), in which requests share the keys they have in common.

    attention: of a ComposedKv format. Its cost model weighs every node: are its keys read once for
    all requests under it, at the price of joining states, or by each? plan(...).explain() says what
    came of it. qo_indptr [n + 1], tables and all else lie on the host. The requests come from
    either
    - a radix tree: node_parent [nodes] (another node, -1 at the root, in any order), request_node
      [n] (the node that a request ends with; -1: it has no keys), and the tables of the nodes: a
      list of keys each (kv_page_indptr, kv_page_indices and kv_len, ...: those of plan()); or
    - block hashes: hash_ids, a list of integers for each request, one a block of block_tokens keys
      from the first on; requests with equal first ids have equal keys there. hashed_len [n]: how
      many keys the ids stand for, where their last block is not full (default: all). tables are
      those of the requests, with all their keys; the pages of equal keys may be the same or not.
    What nobody shares is in the last level, and so is everything of requests that fill row tiles by
    themselves (prefill). max_levels (default and most: the num_levels of the format, at least 2):
    levels that are used; of deeper trees those nodes are shared that save most. Raises ValueError
    naming array, place and value.
    Source: FlashInfer (arXiv:2501.01005), composable formats; SGLang (arXiv:2312.07104), the tree.

    >>> import numpy as np, plait
    >>> attn = plait.Attention(num_qo_heads=2, num_kv_heads=1, head_dim=64, dtype="float32",
    ...                        kv=plait.ComposedKv(plait.PagedKv(16), num_levels=2),
    ...                        bounds=plait.Bounds(requests=64, query_tokens=64, keys=8192))
    >>> qo_indptr = np.arange(65)                        # 64 decodes: 4096 keys in common
    >>> levels = plait.compose_radix(
    ...     attn, qo_indptr=qo_indptr, hash_ids=[[7, 8, 9, 10]] * 64, block_tokens=1024,
    ...     kv_len=np.full(64, 4100), block_table=np.arange(64 * 257).reshape(64, 257))
    >>> plan = attn.plan(qo_indptr=qo_indptr, levels=levels)
    >>> plan.nodes[["kv_len", "num_requests", "level"]].tolist()
    [(4096, 64, 0)]
    """
    instance(_WHERE, "attention", attention, Attention, "a plait.Attention of a ComposedKv")
    max_levels = 0 if max_levels is None else integer(_WHERE, "max_levels", max_levels, 1)
    for name in tables:
        if name not in TABLES:
            raise TypeError(f"{_WHERE}: {name} is no table; taken are {', '.join(TABLES)}")
    tables = given(**tables)
    tree = given(node_parent=node_parent, request_node=request_node)
    hashes = given(hash_ids=hash_ids, block_tokens=block_tokens, hashed_len=hashed_len)
    if bool(tree) == bool(hashes):
        raise ValueError(
            f"{_WHERE}: {', '.join([*tree, *hashes]) or 'neither'} given; taken are node_parent "
            f"and request_node, or hash_ids and block_tokens"
        )
    if tree:
        impl = _plait.compose_tree(
            attention._impl, qo_indptr, node_parent, request_node, tables, max_levels
        )
    else:
        if hash_ids is None or block_tokens is None:
            missing = "hash_ids" if hash_ids is None else "block_tokens"
            raise ValueError(f"{_WHERE}: {missing} is missing beside {', '.join(hashes)}")
        block_tokens = integer(_WHERE, "block_tokens", block_tokens)
        indptr, ids = _flattened(hash_ids)
        impl = _plait.compose_hashes(
            attention._impl, qo_indptr, indptr, ids, hashed_len, block_tokens, tables, max_levels
        )
    return ComposedLevels(impl)


def _flattened(hash_ids):
    """Lists of ids as (indptr, ids)."""
    rows = []
    for i, row in enumerate(hash_ids):
        try:
            row = np.asarray(row) if len(row) else np.empty(0, np.int64)
            if row.ndim != 1 or row.dtype.kind not in "iu" or row.dtype == np.uint64:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{_WHERE}: hash_ids[{i}] is no list of 64-bit signed integers"
            ) from None
        rows.append(row)
    indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=indptr[1:])
    return indptr, np.concatenate([np.empty(0, np.int64), *rows])
