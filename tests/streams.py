"""The fixed number streams and recipes of the public-report cases (test_reports_*.py)."""

import numpy as np

from plait.reference import rounded


def uniform(seed, shape):
    """U(seed): splitmix64 in [-1, 1), float64, row-major in `shape`."""
    i = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + i * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1).reshape(shape)


def std(seed, lengths, num_qo_heads, num_kv_heads, head_dim, dtype):
    """STD: q = 3 U(s), k = U(s + 1), v = U(s + 2) over all tokens, rounded; k, v as lists a
    request."""
    tokens, keys = (sum(x) for x in zip(*lengths))
    q = rounded(3 * uniform(seed, (tokens, num_qo_heads, head_dim)), dtype)
    ends = np.cumsum([kv for _, kv in lengths])[:-1]
    k, v = (np.split(rounded(uniform(seed + n, (keys, num_kv_heads, head_dim)), dtype), ends)
            for n in (1, 2))
    return q, k, v


def one_hot(lengths, num_qo_heads, num_kv_heads, head_dim):
    """OH: q = 0, K = 0, V[j, c] = 1 where c = j mod d: out[c] is the weight of keys of residue
    c."""
    q = np.zeros((sum(n for n, _ in lengths), num_qo_heads, head_dim))
    k = [np.zeros((kv, num_kv_heads, head_dim)) for _, kv in lengths]
    v = [np.zeros_like(x) for x in k]
    for x in v:
        x[np.arange(len(x)), :, np.arange(len(x)) % head_dim] = 1
    return q, k, v


def residue_weights(first, last, head_dim):
    """Right out of OH for a row that sees keys first ... last: the share of each residue."""
    counts = np.bincount(np.arange(first, last + 1) % head_dim, minlength=head_dim)
    return counts / max(counts.sum(), 1)
