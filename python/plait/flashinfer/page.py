"""New tokens into a paged cache, and where they go."""

import torch

import plait
from plait.arguments import integer
from plait.flashinfer.refusals import in_callers_words, one_of, refuse, tensor
from plait.flashinfer.wrapper import LAYOUTS, paged_cache

# Arguments of plait.append_kv -> those of append_paged_kv_cache.
_APPENDED = {"k_new": "append_key", "v_new": "append_value", "append_kv": "append_paged_kv_cache",
             "kv_page_indptr": "kv_indptr", "kv_page_indices": "kv_indices"}


def get_seq_lens(kv_indptr, kv_last_page_len, page_size):
    """Lengths [batch] of requests with pages kv_indptr [batch + 1], so many tokens in the last."""
    pages = tensor("get_seq_lens", "kv_indptr", kv_indptr, 1).diff()
    last = tensor("get_seq_lens", "kv_last_page_len", kv_last_page_len, 1)
    return (pages - 1).clamp(min=0) * integer("get_seq_lens", "page_size", page_size, 1) + last


def get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices=None, positions=None):
    """Request and position of each of nnz appended tokens.

    append_indptr [batch + 1]: the tokens of each request; seq_lens [batch]: its length with them.
    Returns int32 (batch_indices, positions) [nnz], in the given tensors if any; (-1, 0) beyond
    append_indptr[-1]. Does not wait.
    """
    where = "get_batch_indices_positions"
    indptr = tensor(where, "append_indptr", append_indptr, 1)
    lengths = tensor(where, "seq_lens", seq_lens, 1)
    if len(lengths) != len(indptr) - 1:
        refuse(where, "seq_lens", seq_lens,
               f"{len(indptr) - 1} entries, one fewer than append_indptr")
    nnz = integer(where, "nnz", nnz, 0)
    token = torch.arange(nnz, device=indptr.device, dtype=indptr.dtype)
    request = torch.searchsorted(indptr, token, right=True) - 1
    used = request < len(lengths)
    if len(lengths) > 0:
        row = request.clamp(0, len(lengths) - 1)
        position = token + (lengths.to(indptr.dtype) - indptr[1:])[row]
    else:
        position = token
    out = []
    for name, given, result in (
        ("batch_indices", batch_indices, torch.where(used, request, -1)),
        ("positions", positions, torch.where(used, position, 0)),
    ):
        if given is None:
            given = torch.empty(nnz, dtype=torch.int32, device=indptr.device)
        elif tensor(where, name, given).shape != (nnz,) or given.dtype != torch.int32 \
                or given.device != indptr.device:
            refuse(where, name, given, f"int32 [{nnz}] on {indptr.device}")
        out.append(given.copy_(result))
    return tuple(out)


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
    kv_last_page_len, kv_layout="NHD",
) -> None:
    """Writes tokens into a paged cache, whose tables have room for them already.

    append_key, append_value [nnz, num_kv_heads, dim]; batch_indices (-1: skipped) and positions
    [nnz]; the cache as (k, v), 4-D by kv_layout, or one 5-D tensor. Index arrays are int32 or
    int64, all on the cpu, where they are checked, or all on the device.
    """
    where = "append_paged_kv_cache"
    one_of(where, "kv_layout", kv_layout, LAYOUTS)
    cache = paged_cache(where, paged_kv_cache, kv_layout)
    k = cache[0] if isinstance(cache, tuple) else cache[:, 0]
    page_size = k.shape[1 if kv_layout == "NHD" else 2]
    # It serves the check of positions alone, and those on a device are not checked.
    on_cpu = tensor(where, "positions", positions, 1).device.type == "cpu"
    with in_callers_words(_APPENDED):
        plait.append_kv(
            append_key, append_value, cache, kv=plait.PagedKv(page_size, kv_layout),
            batch_indices=batch_indices, positions=positions, kv_page_indptr=kv_indptr,
            kv_page_indices=kv_indices, kv_last_page_len=kv_last_page_len if on_cpu else None)
