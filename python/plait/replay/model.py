"""Stands for the model: draws queries, keys and values from a seed.

Keys and values depend on the content of a token alone, so that requests that share a prefix agree
on it, and so that a check can draw them again without reading the cache.
"""

import numpy as np

from plait.reference import to_storage

_BANK = 4099  # rows drawn once; a token takes one of them (a prime, so that positions do not alias)


class Model:
    def __init__(self, *, num_qo_heads, num_kv_heads, head_dim, dtype, seed=0):
        rng = np.random.default_rng(seed)

        def bank(num_heads, scale):
            values = rng.standard_normal((_BANK, num_heads, head_dim), np.float32) * np.float32(
                scale
            )
            return to_storage(values, dtype)

        self._q, self._k, self._v = (
            bank(num_qo_heads, 2),
            bank(num_kv_heads, 1),
            bank(num_kv_heads, 1),
        )

    def query(self, running, positions):
        """[tokens, num_qo_heads, head_dim] of a request's queries at `positions`."""
        return self._q[_rows(_mix(running.index, positions) ^ np.uint64(0x51))]

    def keys_values(self, running, positions):
        """[tokens, num_kv_heads, head_dim] each, of the tokens of a request at `positions`."""
        rows = _rows(_content(running, positions))
        return self._k[rows], self._v[rows]


def _content(running, positions):
    """What a token is: its block's id and its position for known blocks, else its request's own."""
    request = running.request
    own = _mix(running.index + (1 << 32), positions)
    if not request.block_tokens:
        return own
    ids = np.asarray(request.hash_ids, np.int64)
    block = np.minimum(positions // request.block_tokens, len(ids) - 1)
    return np.where(positions < request.input_len, _mix(ids[block], positions), own)


def _mix(a, b):
    """A 64-bit hash of two integers (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        z = np.asarray(a).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.asarray(b).astype(
            np.uint64
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _rows(hashes):
    return (hashes % np.uint64(_BANK)).astype(np.int64)
