"""packbits and segment_packbits: booleans into bits, as custom masks are packed."""

import torch

from plait.flashinfer.refusals import one_of, refuse, tensor


def packbits(x, bitorder="big"):
    """Bits of a 1-D tensor (what is not 0 is 1), eight a uint8; "big": the first is the highest.

    Returns [ceil(n / 8)]; the last byte is filled up with zeros.
    """
    one_of("packbits", "bitorder", bitorder, ("big", "little"))
    bits = torch.nn.functional.pad(tensor("packbits", "x", x, 1).bool(), (0, -len(x) % 8))
    weights = 2 ** torch.arange(8, device=x.device)
    if bitorder == "big":
        weights = weights.flip(0)
    return (bits.view(-1, 8) * weights).sum(-1).to(torch.uint8)


def segment_packbits(x, indptr, bitorder="big"):
    """packbits of each segment x[indptr[i]:indptr[i + 1]], which starts at a byte of its own.

    Returns (bytes, their indptr, int32). Waits for indptr where it is on a device.
    """
    x = tensor("segment_packbits", "x", x, 1)
    indptr = tensor("segment_packbits", "indptr", indptr, 1).to(x.device, torch.int64)
    lengths = indptr.diff()
    if len(indptr) < 1 or indptr[0] != 0 or (lengths < 0).any() or indptr[-1] != len(x):
        refuse("segment_packbits", "indptr", indptr,
               f"0, then not decreasing, up to the length of x, {len(x)}")
    packed = torch.zeros_like(indptr)
    packed[1:] = ((lengths + 7) // 8).cumsum(0)
    moved = (8 * packed - indptr)[:-1].repeat_interleave(lengths)
    bits = torch.zeros(8 * int(packed[-1]), dtype=torch.bool, device=x.device)
    bits[torch.arange(len(x), device=x.device) + moved] = x.bool()
    return packbits(bits, bitorder), packed.to(torch.int32)
