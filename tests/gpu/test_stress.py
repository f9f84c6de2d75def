"""Random shapes, many seeds: PLAIT_STRESS_SEEDS of them (40) for each kernel."""

import os
import random

import pytest

import matrix
from harness import Case, check
from variants import VARIANTS

SEEDS = range(int(os.environ.get("PLAIT_STRESS_SEEDS", "40")))


def random_case(seed, limits):
    rng = random.Random(seed)
    builtin = [n for n, v in VARIANTS.items() if not v.custom]
    decode = rng.random() < 0.3
    lengths, tokens, keys = [], 0, 0
    for _ in range(rng.choice([1, 2, 5, 17, 40])):
        q_len = 1 if decode else rng.choice([0, 1, 1, 1, rng.randint(2, 40), rng.randint(41, 300)])
        kv_len = rng.choice([0, rng.randint(1, 64), rng.randint(1, 700), rng.randint(1, 4000)])
        if tokens + q_len > 700 or keys + kv_len > 12000:
            continue
        lengths.append((q_len, kv_len))
        tokens, keys = tokens + q_len, keys + kv_len
    dims = rng.choice(limits.dims)
    format = rng.choice(sorted(limits.formats))
    if limits.formats[format].joint:
        dims = (dims[1], dims[1])
    return Case(format, rng.choice(builtin), tuple(lengths), rng.choice(limits.dtypes), dims[0],
                0 if dims[0] == dims[1] else dims[1], rng.choice([1, 2, 4, 8]),
                rng.choice([1, 2, 3, 4, 5, 7, 8, 16]) if tokens < 100 else rng.choice([1, 2, 3, 4]),
                padding=rng.choice([0, 0, 5]), strided=rng.random() < 0.3, decode_only=decode,
                scheduler=rng.choice(["auto", "auto", "lpt"]), max_ctas=rng.choice([0, 0, 0, 3, 29]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name,limits", [("plain", matrix.EVERY_CUDA), ("sm80", matrix.SM80),
                                         ("sm90a", matrix.SM90A)], ids=["plain", "sm80", "sm90a"])
def test_random_case(name, limits, seed):
    from test_attention_gpu import IS_HOPPER
    if name == "sm90a" and not IS_HOPPER:
        pytest.skip("sm90a kernels need compute capability 9.0")
    check(random_case(seed, limits), "cuda:0", name)
