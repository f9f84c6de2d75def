"""Plan: how a batch is cut into work items. Plain data: arrays, numbers, the candidates scored."""

import json

import numpy as np

from plait import _plait
from plait.arguments import SCHEDULERS, instance, integer, number
from plait.formats import (
    ComposedKv,
    ComposedLevels,
    KvFormat,
    RaggedKv,
    given,
    level_tuples,
)
from plait.variants import Variant, full

_WIDE = ("first_block", "keys_shared", "keys_not_read", "flat_ns", "shared_ns")


def _struct(fields, size):
    dtype = np.dtype([(name, np.int64 if name in _WIDE else np.int32) for name in fields])
    if dtype.itemsize != size:  # the C++ struct has changed
        raise ImportError(f"plan.py reads {dtype.itemsize} bytes of a struct of {size}")
    return dtype


ROW_BLOCK = _struct(
    ("first_block", "first_token", "num_tokens", "kv_len", "kv_pos_begin", "level", "padding"),
    _plait.row_block_bytes,
)
WORK_ITEM = _struct(
    (
        "row_block",
        "shape",
        "first_row",
        "num_rows",
        "kv_head_begin",
        "num_heads",
        "kv_begin",
        "kv_end",
        "partial_row",
        "min_position",
        "max_position",
        "mask_begin",
    ),
    _plait.work_item_bytes,
)
# ItemTime of include/plait/plan.h: what Plan.timeline() returns.
ITEM_TIME = np.dtype(
    [("cta", np.int32), ("begin_us", np.float64), ("end_us", np.float64)], align=True
)
if ITEM_TIME.itemsize != _plait.item_time_bytes:
    raise ImportError(f"plan.py reads {ITEM_TIME.itemsize} bytes of {_plait.item_time_bytes}")
NODE_CHOICE = _struct(
    (
        "node",
        "parent",
        "level",
        "num_requests",
        "num_rows",
        "num_tiles",
        "tile_q",
        "kv_len",
        "why",
        "padding",
        "keys_shared",
        "keys_not_read",
        "flat_ns",
        "shared_ns",
    ),
    _plait.node_choice_bytes,
)
_ARRAYS = {
    "row_blocks": ROW_BLOCK,
    "items": WORK_ITEM,
    "cta_item_indptr": np.dtype(np.int32),
    "token_request": np.dtype(np.int32),
    "token_position": np.dtype(np.int32),
    "row_map": np.dtype(np.int32),
    "merge_indptr": np.dtype(np.int32),
    "merge_sources": np.dtype(np.int32),
    "nodes": NODE_CHOICE,
}

# Modelled times are counted in 64-bit picoseconds: these stay well below, whatever the batch.
_MOST_US, _MOST_US_PER_KEY = 1e6, 1e3


class Plan:
    """What every executor runs: include/plait/plan.h and plan_data.h say what each field means.

    Arrays (read-only NumPy): row_blocks, items (in CTA order, then those that CTAs draw) and nodes
    (of compose_radix) are structured; cta_item_indptr, token_request, token_position, row_map,
    merge_indptr and merge_sources are int32. Numbers: chosen, num_ctas, num_tokens, num_requests,
    num_levels, num_partial_rows, lists_per_head, total_keys, causal, window_left, sink_tokens,
    kv_bytes (of a key and its value, all heads; 0: unknown). cost_model: where the costs come from
    that it was planned by, text ("shipped, sm90 decode"). candidates: dicts of the cuts that
    were scored; balance: modelled time of the busiest CTA over the mean. `str(plan)` is a table;
    plans compare with ==.
    target: what it was planned for, a dict of PlanTarget's fields; None of a plan out of JSON.
    """

    def __init__(self, data, target=None):
        self._data = data
        self.target = target
        self._arrays = None
        self._numbers = None

    def __getattr__(self, name):  # only for names that are not set: the plan's own
        if name in _ARRAYS:
            if self._arrays is None:
                self._arrays = {
                    n: np.frombuffer(b, _ARRAYS[n]) for n, b in self._data.arrays.items()
                }
            return self._arrays[name]
        if name.startswith("_"):
            raise AttributeError(name)
        if self._numbers is None:
            self._numbers = self._data.numbers
        try:
            return self._numbers[name]
        except KeyError:
            raise AttributeError(f"Plan has no {name!r}") from None

    def __dir__(self):
        return [*super().__dir__(), *_ARRAYS, *self._data.numbers]

    @property
    def candidates(self) -> list:
        """The cuts that were scored: name, chunk, num_items, num_partial_rows, makespan_us, ..."""
        return self._data.candidates

    @property
    def balance(self) -> float:
        """Modelled time of the busiest CTA / mean, of the candidate chosen."""
        return self._data.balance

    def timeline(self) -> np.ndarray:
        """When each item runs, by the cost model: [len(items)] of (cta, begin_us, end_us).

        A CTA runs its items without a pause; one of the queue goes to the CTA that would be free
        first. The last ends at the makespan of the candidate chosen. Raises ValueError for a plan
        out of JSON, which has no cost model.
        """
        if self.target is None:
            raise ValueError(
                "timeline: this plan has no cost model, as one out of JSON; plan the batch anew"
            )
        return np.frombuffer(_plait.timeline(self._data, self.target), ITEM_TIME)

    def to_html(self) -> str:
        """A page that shows the plan: timeline, candidates, merge lists; `plait plan --html`.

        One file without script or network. Raises ValueError as timeline() does, RuntimeError
        without Jinja2.
        """
        from plait.html.plan import plan_page  # Jinja2 is an extra

        return plan_page(self)

    def __eq__(self, other):
        return self._data == other._data if isinstance(other, Plan) else NotImplemented

    __hash__ = None

    def __str__(self):
        return str(self._data)

    def __repr__(self):
        return (
            f"<plait.Plan {self.num_tokens} tokens, {len(self.items)} items on {self.num_ctas} "
            f"CTAs, balance {self.balance:.3f}>"
        )

    def explain(self) -> str:
        """What is shared between requests and why: a table, a line a node over two or more (not
        counted are those without queries, and with so many that they fill a tile).

        rows are packed, tiles what they take (number x rows of the first); "MB not read" is what
        the requests would read one by one beyond what is read once. shared us and flat us are
        modelled, of the node's keys and summed over all CTAs, the joins of sharing included.
        """
        return self._data.explain()

    def explain_json(self) -> str:
        """explain() as one JSON object: kv_bytes, bytes, bytes_not_read, nodes [{node, parent,
        shared, level, keys, requests, rows, tiles, tile_q, bytes_shared, bytes_not_read,
        shared_us, flat_us, why}]; why: pays, does_not_pay, too_deep, cannot_join, given,
        inside_chunk."""
        return self._data.explain_json()

    def to_dict(self) -> dict:
        """Plain lists and numbers; a structured array becomes {field: list}."""
        out = {"candidates": self.candidates, **self._data.numbers}
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            out[name] = (
                {f: array[f].tolist() for f in dtype.names} if dtype.names else array.tolist()
            )
        return out

    def to_json(self) -> str:
        """One JSON object; from_json gives an equal plan."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that to_json wrote. Raises ValueError for what is no such text."""
        fields = json.loads(text)
        arrays = {}
        try:
            for name, dtype in _ARRAYS.items():
                value = fields.pop(name)
                if type(value) is not (dict if dtype.names else list):
                    raise TypeError(f"{name} is {value!r}")
                if dtype.names:
                    array = np.zeros(len(value[dtype.names[0]]), dtype)
                    for field in dtype.names:
                        array[field] = _integers(
                            f"{name}.{field}", value[field], len(array), dtype[field]
                        )
                else:
                    array = np.array(_integers(name, value, len(value), dtype), dtype)
                arrays[name] = array.tobytes()
            candidates = fields.pop("candidates")
            if type(candidates) is not list:
                raise TypeError(f"candidates is {candidates!r}, no list")
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"not a plan: {error!r}") from None
        return cls(_plait.PlanData.from_parts(fields, candidates, arrays))


def _integers(name, values, length, dtype):
    """values of a plan's text, if they are a list of `length` integers that dtype holds."""
    limits = np.iinfo(dtype)
    if type(values) is not list or len(values) != length:
        raise TypeError(f"{name} is no list of {length} integers")
    for i, value in enumerate(values):
        if type(value) is not int or not limits.min <= value <= limits.max:
            raise TypeError(f"{name}[{i}] is {value!r}, no {dtype.name}")
    return values


def make_plan(
    qo_indptr,
    kv_len=None,
    *,
    group_size,
    num_kv_heads,
    num_ctas=132,
    tile_kv=64,
    tile_q=(64,),
    key_split=None,
    fixed_us=None,
    us_per_key=None,
    merge_us=None,
    max_partial_rows=None,
    min_split_keys=None,
    cache_keys=None,
    num_sms=None,
    queue_percent=None,
    min_queued_keys=None,
    min_keys_for_queue=None,
    variant=None,
    scheduler="auto",
    kv=None,
    levels=None,
    **tables,
) -> Plan:
    """Plans on the host alone: no device, no kernel, equal input gives an equal plan.

    qo_indptr [n + 1] and kv_len [n] (any integer sequence), or the tables of a format `kv`
    (RaggedKv; with levels= a ComposedKv of it). The target: num_ctas CTAs, keys cut at multiples of
    tile_kv, one shape for each tile_q (descending; packed rows), with the modelled cost of a tile
    fixed_us + us_per_key * keys (defaults: those shipped for sm90), room for max_partial_rows
    (default: 2 * num_ctas * tile_q), a last cache that holds cache_keys keys of one kv head
    (0: all there are). CTA c shares a multiprocessor with c + num_sms (0: with none). Where CTAs
    have min_keys_for_queue (keys times heads) each, they draw the last queue_percent of the keys of
    few rows, in pieces of at least min_queued_keys, as they are through (defaults: those shipped
    for sm90). Raises ValueError as Attention.plan does.
    """
    qo_indptr = np.asarray(qo_indptr)
    if qo_indptr.ndim != 1 or not len(qo_indptr) or qo_indptr.dtype.kind not in "iu":
        raise ValueError(
            f"qo_indptr is {qo_indptr.dtype}{list(qo_indptr.shape)}; taken is a list of integers, "
            f"one more than there are requests"
        )
    qo_indptr = np.ascontiguousarray(qo_indptr, np.int64)
    if not 0 <= qo_indptr[-1] < 2**31:
        raise ValueError(
            f"qo_indptr[{len(qo_indptr) - 1}] is {qo_indptr[-1]}; it must be 0 ... 2^31 - 1"
        )
    arrays = {name: np.asarray(array) for name, array in given(kv_len=kv_len, **tables).items()}
    levels = [] if levels is None else levels
    levels = levels if isinstance(levels, ComposedLevels) else list(levels)
    if kv is None:
        kv = ComposedKv(RaggedKv(), len(levels)) if len(levels) > 1 else RaggedKv()
    instance("make_plan", "kv", kv, KvFormat, "RaggedKv() or ComposedKv(...)")
    if (
        kv.kind == "ragged"
        and not levels
        and "kv_indptr" not in arrays
        and "kv_begin" not in arrays
    ):
        arrays["kv_begin"] = np.zeros(
            len(qo_indptr) - 1, np.int64
        )  # where keys lie is of no matter
    where = "make_plan"
    variant = full() if variant is None else variant
    instance(where, "variant", variant, Variant, "a plait.Variant, as causal()")
    tiles = [integer(where, "tile_q", t) for t in _listed(tile_q)]
    target = _plait.default_target(
        tiles,
        integer(where, "num_ctas", num_ctas),
        integer(where, "tile_kv", tile_kv),
        integer(where, "group_size", group_size),
        integer(where, "num_kv_heads", num_kv_heads),
    )
    if merge_us is not None:
        target["merge_us"] = number(where, "merge_us", merge_us, 0, _MOST_US)
    for name, value in dict(
        max_partial_rows=max_partial_rows,
        min_split_keys=min_split_keys,
        cache_keys=cache_keys,
        num_sms=num_sms,
        queue_percent=queue_percent,
        min_queued_keys=min_queued_keys,
        min_keys_for_queue=min_keys_for_queue,
    ).items():
        if value is not None:
            target[name] = integer(where, name, value, 0)
    if any(costs is not None for costs in (fixed_us, us_per_key, merge_us)):
        target["cost_model"] = "given"
    for i, (name, values, checked) in enumerate(
        (
            ("key_split", key_split, lambda *at: integer(*at, 1, 3)),
            ("fixed_us", fixed_us, lambda *at: number(*at, 0, _MOST_US)),
            ("us_per_key", us_per_key, lambda *at: number(*at, 0, _MOST_US_PER_KEY)),
        ),
        1,
    ):
        if values is None:
            continue
        values = _listed(values)
        if len(values) != len(tiles):
            raise ValueError(
                f"make_plan: {name} has {len(values)} values for {len(tiles)} shapes (tile_q); "
                f"taken is one each"
            )
        values = [checked(where, f"{name}[{j}]", value) for j, value in enumerate(values)]
        target["shapes"] = [(*s[:i], v, *s[i + 1 :]) for s, v in zip(target["shapes"], values)]
    return Plan(
        _plait.make_plan(
            kv,
            _bounds_of(qo_indptr),
            qo_indptr,
            arrays,
            level_tuples(levels),
            variant,
            target,
            instance(where, "scheduler", scheduler, str, SCHEDULERS),
        ),
        target,
    )


def _listed(values):
    """One value or several, as a list."""
    return list(values) if np.iterable(values) and not isinstance(values, str) else [values]


def _bounds_of(qo_indptr):
    """Bounds that the batch itself meets: a plan of make_plan is for no Attention."""
    huge = 2**31 - 1
    return _plait.Bounds(
        requests=max(len(qo_indptr) - 1, 1),
        query_tokens=max(int(qo_indptr[-1]), 1),
        keys=huge,
        total_pages=huge,
    )
