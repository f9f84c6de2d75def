"""The matrix of test_attention.py on CUDA, by kernel: plain takes everything, sm80 all of 16
bits, sm90a its own shapes. And every tile of sm80, which the bounds of the matrix may not choose.
"""

import pytest
import torch

import matrix
from harness import Case, check

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)
CASES = [("plain", name, case) for name, case in matrix.cases(matrix.EVERY_CUDA)]
CASES += [("sm80", name, case) for name, case in matrix.cases(matrix.SM80)]
CASES += [("sm90a", name, case) for name, case in matrix.cases(matrix.SM90A)]


@pytest.mark.parametrize("kernel,case", [pytest.param(kernel, case, id=f"{kernel}-{name}-{case}")
                                         for kernel, name, case in CASES])
def test_attention_on_cuda(kernel, case):
    if kernel == "sm80" and torch.cuda.get_device_capability(0) < (8, 0):
        pytest.skip("sm80 kernels need compute capability 8.0")
    if kernel == "sm90a" and not IS_HOPPER:
        pytest.skip("sm90a kernels need compute capability 9.0")
    built = check(case, "cuda:0", kernel)
    assert built.attention.kernel_name.startswith({"sm90a": "sm90 "}.get(kernel, kernel))


TILES = [f"{q}x{kv}x{stages}" for q in (1, 16, 32, 64, 128)
         for kv, stages in ((32, 1), (32, 3), (64, 2), (128, 1))]


@pytest.mark.parametrize("dims", ((128, 0), (64, 0), (72, 40)), ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_every_sm80_tile(tile, dims):
    if torch.cuda.get_device_capability(0) < (8, 0):
        pytest.skip("sm80 kernels need compute capability 8.0")
    group = 1 if tile.startswith("1x") else 4
    lengths = ((1, 700), (33, 129), (0, 64), (130, 257), (2, 0), (5, 3))
    for format, variant in (("csr_p16", "causal"), ("ragged", "window_sinks")):
        built = check(Case(format, variant, lengths, "bfloat16", *dims, 2, group, padding=2,
                           max_ctas=12), "cuda:0", f"sm80 {tile}")
        assert f" {tile} " in built.attention.kernel_name


SM90_TILES = ("128x48x2", "128x80x3", "128x112x2", "128x144x2", "128x176x2", "64x32x4", "64x80x2",
              "64x176x2", "16x64x2", "32x96x3", "192x80x2", "192x80x3")


@pytest.mark.skipif(not IS_HOPPER, reason="sm90a kernels need compute capability 9.0")
@pytest.mark.parametrize("tile", SM90_TILES)
def test_sm90_tiles_by_name(tile):
    """Tiles that no bounds choose, with keys that are no power of two."""
    tile_q, tile_kv, _ = (int(n) for n in tile.split("x"))
    keys = (tile_kv - 1, tile_kv, tile_kv + 1, 2 * tile_kv + 17)
    lengths = ((1, 700), *((33, n) for n in keys), (0, 64), (130, 257), (2, 0), (5, 3))
    for format, variant in (("csr_p16", "causal"), ("ragged", "window_sinks"), ("csr_p1", "causal")):
        built = check(Case(format, variant, lengths, "bfloat16", 128, 0, 2, 4, padding=2,
                           max_ctas=12), "cuda:0", f"sm90 {tile}")
        assert f"{tile_q}x{tile_kv}" in built.attention.kernel_name
