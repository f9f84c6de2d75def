"""The operations beside attention: merging states and writing new tokens into a cache."""

from plait import _plait
from plait.arguments import instance, needed, number
from plait.formats import KvFormat, _refuse_unknown, given
from plait.tensors import empty_like

__all__ = ["append_kv", "merge_state", "merge_states"]


def _shape(name, tensor):
    try:
        return tensor.shape
    except AttributeError:
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}") from None


def merge_states(v, lse, *, out=None, out_lse=None, stream=None, lse_base2=False):
    """Joins attention states of disjoint key sets.

    v [rows, n, num_heads, dim] and float32 lse [rows, n, num_heads] (natural log, or base 2 with
    lse_base2) hold n >= 1 states a row. Returns (out [rows, num_heads, dim], out_lse [rows,
    num_heads]). A state with lse -inf is the identity. Raises ValueError for other shapes and
    dtypes.
    """
    needed("merge_states", v=v, lse=lse)
    if out is None:
        shape = _shape("v", v)
        out = empty_like(v, (*shape[:1], *shape[2:]))
    if out_lse is None:
        shape = _shape("lse", lse)
        out_lse = empty_like(lse, (*shape[:1], *shape[2:]))
    _plait.merge_states(v, lse, out, out_lse, stream, bool(lse_base2))
    return out, out_lse


def merge_state(v_a, lse_a, v_b, lse_b, *, out=None, out_lse=None, stream=None, lse_base2=False):
    """Joins two attention states, v [rows, num_heads, dim] and float32 lse [rows, num_heads].

    `out` may be either v, in place. Returns (out, out_lse). Raises as merge_states.
    """
    needed("merge_state", v_a=v_a, lse_a=lse_a, v_b=v_b, lse_b=lse_b)
    if out is None:
        out = empty_like(v_a, _shape("v_a", v_a))
    if out_lse is None:
        out_lse = empty_like(lse_a, _shape("lse_a", lse_a))
    _plait.merge_state(v_a, lse_a, v_b, lse_b, out, out_lse, stream, bool(lse_base2))
    return out, out_lse


def append_kv(
    k_new,
    v_new,
    kv_cache,
    *,
    kv: KvFormat,
    slot_mapping=None,
    batch_indices=None,
    positions=None,
    kv_dtype=None,
    k_scale=1.0,
    v_scale=1.0,
    stream=None,
    **tables,
):
    """Writes new tokens into a cache.

    k_new, v_new [tokens, num_kv_heads, dim]; kv_cache as in Attention.run. Where they go: either
    slot_mapping [tokens], page * page_size + offset, or batch_indices and positions [tokens]
    through the tables of plan(). -1 skips a token. Index arrays lie on host or device.

    k_new and v_new have the cache's dtype. Of a cache in "float8_e4m3fn" or "float8_e5m2" (kv_dtype
    says which, where the tensors are its bits as uint8) they may also be float32, bfloat16 or
    float16: then stored number = value / k_scale (v_scale), rounded to nearest even, the largest
    finite number for what is beyond it. Give Attention.run() the same scales.
    Raises ValueError naming array, place and value before anything is written.
    """
    _refuse_unknown("append_kv", tables)
    instance("append_kv", "kv", kv, KvFormat, "RaggedKv() or PagedKv(...)")
    needed("append_kv", k_new=k_new, v_new=v_new, kv_cache=kv_cache)
    if type(kv_cache) in (tuple, list):
        if len(kv_cache) != 2 or any(cache is None for cache in kv_cache):
            raise ValueError(
                f"append_kv: kv_cache has {sum(x is not None for x in kv_cache)} tensors; taken "
                f"are (k, v) or one 5-D tensor"
            )
        k, v = kv_cache
    else:
        k, v = kv_cache, None
    _plait.append_kv(
        kv,
        k_new,
        v_new,
        k,
        v,
        slot_mapping,
        batch_indices,
        positions,
        given(**tables),
        None if kv_dtype is None else str(kv_dtype).removeprefix("torch."),
        number("append_kv", "k_scale", k_scale),
        number("append_kv", "v_scale", v_scale),
        stream,
    )
