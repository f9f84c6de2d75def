"""plait.flashinfer: appending to a cache, index helpers, packed bits.

tests/gpu runs the same functions on CUDA.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, DIM, HEADS, KV_HEADS, check, decode_wrapper, indptr, numpy64, paged, plan_decode, refused,
    values,
)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joint", [False, True])
def test_append(device, layout, joint):
    """Tokens appended through the helpers are read back by a decode."""
    before, new, page_size = [10, 0, 31, 5], [7, 3, 2, 0], 16
    lens = [a + b for a, b in zip(before, new)]
    cache = paged(lens, page_size, device, layout, joint)
    for i, n in enumerate(before):
        cache.k[i][n:], cache.v[i][n:] = np.nan, np.nan
    keys = values((sum(new), KV_HEADS, DIM), BF16, device, 5)
    vals = values((sum(new), KV_HEADS, DIM), BF16, device, 6)
    given, indices, last = cache.tables(device)
    seq_lens = flashinfer.get_seq_lens(given, last, page_size)
    assert seq_lens.tolist() == lens
    rows, positions = flashinfer.get_batch_indices_positions(indptr(new, device), seq_lens, sum(new))
    flashinfer.append_paged_kv_cache(keys, vals, rows, positions, cache.cache, indices, given, last,
                                     layout)
    at = 0
    for i, n in enumerate(new):
        cache.k[i][before[i]:] = numpy64(keys[at:at + n])
        cache.v[i][before[i]:] = numpy64(vals[at:at + n])
        at += n
    q = values((4, HEADS, DIM), BF16, device, 7)
    wrapper = decode_wrapper(device, layout)
    plan_decode(wrapper, cache, page_size)
    check(wrapper.run(q, cache.cache), q, [1] * 4, cache.k, cache.v)


def test_batch_indices_and_positions(device):
    new, lens = torch.tensor([0, 1, 1, 3, 6, 10], device=device), torch.tensor(
        [5, 5, 5, 5, 5], device=device)
    rows, positions = flashinfer.get_batch_indices_positions(new, lens, 12)
    assert rows.dtype == positions.dtype == torch.int32
    assert rows.tolist() == [0, 2, 2, 3, 3, 3, 4, 4, 4, 4, -1, -1]
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4, 0, 0]
    mine = [torch.full((12,), 9, dtype=torch.int32, device=device) for _ in range(2)]
    got = flashinfer.get_batch_indices_positions(new, lens, 12, *mine)
    assert all(a is b for a, b in zip(got, mine))
    assert torch.equal(mine[0], rows) and torch.equal(mine[1], positions)
    nothing = flashinfer.get_batch_indices_positions(new[:1], lens[:0], 2)
    assert nothing[0].tolist() == [-1, -1] and nothing[1].tolist() == [0, 0]
    refused(lambda: flashinfer.get_batch_indices_positions(new, lens, 12, mine[0].long()),
            "batch_indices", "int32 [12]")
    refused(lambda: flashinfer.get_batch_indices_positions(new, lens[:3], 12), "seq_lens", "5 entries")


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 100])
def test_packbits(device, n, bitorder):
    x = np.random.default_rng(n).integers(0, 2, n)
    want = np.packbits(x, bitorder=bitorder)
    for dtype in (torch.bool, torch.int32):
        got = flashinfer.packbits(torch.from_numpy(x).to(device, dtype), bitorder)
        assert got.dtype == torch.uint8 and np.array_equal(got.cpu().numpy(), want)
    segments = [0, 0, n // 3, n // 3, n]
    got, offsets = flashinfer.segment_packbits(torch.from_numpy(x).to(device),
                                               torch.tensor(segments, device=device), bitorder)
    parts = [np.packbits(x[a:b], bitorder=bitorder) for a, b in zip(segments, segments[1:])]
    assert np.array_equal(got.cpu().numpy(), np.concatenate(parts))
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, *np.cumsum([len(p) for p in parts])]


def test_c11_packed_bytes(device):
    """C11: each request's bits start at a byte of their own."""
    mask = [[(i + 2 * j + r) % 3 != 0 for i in range(q) for j in range(kv)]
            for r, (q, kv) in enumerate([(3, 5), (1, 7), (2, 9)])]
    flat = torch.tensor(sum(mask, []), device=device)
    packed, offsets = flashinfer.segment_packbits(flat, indptr([len(m) for m in mask], device), "little")
    assert bytes(packed.tolist()).hex(" ") == "b6 6d 6d db 6c 03"
    assert offsets.tolist() == [0, 2, 3, 6]
    for bad in ([0, 15, 22], [0, 15, 14, 40], [1, 15, 22, 40]):
        refused(lambda: flashinfer.segment_packbits(flat, torch.tensor(bad)), "indptr",  # noqa: B023
                str(len(flat)))
    refused(lambda: flashinfer.packbits(flat, "bit"), "bitorder is 'bit'", "'little'")
    refused(lambda: flashinfer.packbits(flat[None]), "x", "1 dim")
