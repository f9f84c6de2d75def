"""Merging attention states; s is their LSE in base 2."""

import torch

from plait.flashinfer.refusals import in_callers_words, refuse, tensor
from plait.operations import merge_state as _merge_state
from plait.operations import merge_states as _merge_states


def _float32(where, name, s):
    return tensor(where, name, s).to(torch.float32)


def merge_state(v_a, s_a, v_b, s_b):
    """The state of two disjoint key sets' union: v [n, num_heads, dim], s [n, num_heads].

    Returns (v, s). A state with s -inf is empty: the other comes out bit for bit.
    """
    s_a, s_b = _float32("merge_state", "s_a", s_a), _float32("merge_state", "s_b", s_b)
    return _merge_state(v_a, s_a, v_b, s_b, lse_base2=True)


def merge_state_in_place(v, s, v_other, s_other, mask=None) -> None:
    """merge_state into (v, s), float32 s; mask [n]: the rows that are merged."""
    where = "merge_state_in_place"
    if tensor(where, "s", s).dtype != torch.float32:
        refuse(where, "s", s, "float32, which is written in place")
    s_other = _float32(where, "s_other", s_other)
    if mask is not None:
        if tensor(where, "mask", mask).shape != s.shape[:1]:
            refuse(where, "mask", mask, f"one entry a row, [{len(s)}]")
        s_other = torch.where(mask.bool()[:, None], s_other, float("-inf"))  # the identity
    with in_callers_words({"v_a": "v", "lse_a": "s", "v_b": "v_other", "lse_b": "s_other"}):
        _merge_state(v, s, v_other, s_other, out=v, out_lse=s, lse_base2=True)


def merge_states(v, s):
    """The union of n states a row: v [rows, n, num_heads, dim], s [rows, n, num_heads].

    Returns (v [rows, num_heads, dim], s [rows, num_heads]).
    """
    return _merge_states(v, _float32("merge_states", "s", s), lse_base2=True)
