"""The index arrays of one step, from the published arguments to those of plait.Attention.plan.

Lengths are taken to the host, where plans are better and the published planners have them too:
arrays on the device are copied, which waits for the stream. Give them on the cpu and nothing waits.
Page indices stay where they are.
"""

from dataclasses import dataclass, field

import numpy as np

from plait.arguments import integer
from plait.flashinfer.pool import Needs
from plait.flashinfer.refusals import in_callers_words, refuse, tensor, text


@dataclass
class Batch:
    qo_indptr: np.ndarray
    tables: dict   # of Attention.plan
    needs: Needs
    names: dict    # argument of Attention.plan -> the caller's name of it
    kv_lens: np.ndarray
    mask: dict = field(default_factory=dict)  # custom_mask or packed_custom_mask, if any

    def plan(self, attention):
        with in_callers_words(self.names):
            attention._plan(self.qo_indptr, self.tables, [], None, self.mask)

    def check(self, plan):
        """seq_lens, seq_lens_q and the two maxima of a prefill plan(), which repeat the lengths."""
        q_lens = np.diff(self.qo_indptr)
        for name, lens in (("seq_lens", self.kv_lens), ("seq_lens_q", q_lens)):
            check_same(name, getattr(plan, name), lens, "what the index arrays say")
        for name, lens in (("max_sequence_kv", self.kv_lens), ("max_token_per_sequence", q_lens)):
            value, longest = getattr(plan, name), lens.max(initial=0)
            if value is not None and integer("plan", name, value) < longest:
                refuse("plan", name, value, f"None, or at least the longest length, {longest}")


def check_same(name, array, wanted, what):
    """Refuses an array that repeats what another says, where it does not."""
    if array is None:
        return
    given = tensor("plan", name, array).detach().cpu().numpy().reshape(-1)
    if not np.array_equal(given, wanted):
        raise ValueError(f"plan: {name} is {text(given)}; taken is None, or the same as {what}, "
                         f"{text(wanted)}")


def mask(where, custom_mask, packed_custom_mask):
    """The masks of a plan; bytes of packed ones as segment_packbits makes them ("little")."""
    masks = {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask}
    return {name: tensor(where, name, x) for name, x in masks.items() if x is not None}


def host(where, name, array):
    """A 1-D index array as NumPy."""
    return tensor(where, name, array, 1).detach().cpu().numpy()


def _lengths(where, name, indptr):
    if len(indptr) < 1:
        refuse(where, name, indptr, "an array of one entry more than there are requests")
    return indptr[1:] - indptr[:-1]


def _needs(q_lens, kv_lens, total_pages):
    longest_q = int(q_lens.max(initial=0))
    tokens = max(int(q_lens.sum()), longest_q)  # of malformed arrays too, which plan() refuses
    return Needs(len(q_lens), tokens, int(kv_lens.max(initial=0)), total_pages, longest_q)


def paged(where, names, qo_indptr, indptr, indices, *, page_size, last_page_len=None, kv_len=None):
    """A paged batch, by last_page_len or by kv_len; names: of indptr, indices and that one."""
    q_lens = _lengths(where, "qo_indptr", qo_indptr)
    given = host(where, names[0], indptr)
    pages = _lengths(where, names[0], given)
    last = host(where, names[2], kv_len if last_page_len is None else last_page_len)
    if not len(q_lens) == len(pages) == len(last):
        raise ValueError(
            f"{where}: {names[2]} has {len(last)} entries and {names[0]} {len(given)}; for "
            f"{len(q_lens)} requests they must have {len(q_lens)} and {len(q_lens) + 1}"
        )
    names = dict(zip(("kv_page_indptr", "kv_page_indices", "kv_last_page_len"), names))
    tables = {"kv_page_indptr": given, "kv_page_indices": tensor(where, names["kv_page_indices"],
                                                                  indices, 1)}
    if last_page_len is None:
        names["kv_len"] = names.pop("kv_last_page_len")
        tables["kv_len"] = kv_lens = last
    else:
        kv_lens = (pages - 1) * page_size + last
        if not pages.all():
            # Without pages there is no last one: published kernels do not read its length, and
            # callers compute page_size as often as 0.
            last = np.where((pages == 0) & (last == page_size), 0, last)
            kv_lens = np.where(pages == 0, last, kv_lens)
        tables["kv_last_page_len"] = last
    return Batch(qo_indptr, tables, _needs(q_lens, kv_lens, max(1, indices.numel())), names,
                 kv_lens)


def ragged(where, qo_indptr, kv_indptr):
    q_lens = _lengths(where, "qo_indptr", qo_indptr)
    kv_lens = _lengths(where, "kv_indptr", kv_indptr)
    return Batch(qo_indptr, {"kv_indptr": kv_indptr}, _needs(q_lens, kv_lens, 0),
                 {"kv_indptr": "kv_indptr"}, kv_lens)
