"""Costs of the planner's model from measured times of plans: least squares over the terms of each
plan's busiest CTA. No GPU here; tune.py measures.

Of a plan the model says: time = launch + most over CTAs of sum over items of heads * (fixed_us +
keys * us_per_key + (partial ? merge_us : 0)), fixed_us and us_per_key by shape; where two CTAs
share a multiprocessor, most over the pairs, and one more join at the end. launch is no constant of
the planner: what a run takes that no cut changes. Which CTA is the busiest depends on the costs, so
it is found anew until it stays.
"""

from dataclasses import dataclass

import numpy as np

from plait import _plait

_ROUNDS = 20


@dataclass
class Point:
    """A plan and what it took. terms: [CTAs, 2 * shapes + 1]; num_sms: as of PlanTarget."""

    name: str
    terms: np.ndarray
    num_sms: int
    joins: bool
    us: float


@dataclass
class Fit:
    """costs: in the order of terms; NaN where no point has the term. errors: one standard deviation
    of each, from the residuals. modelled: us of each point."""

    costs: np.ndarray
    launch_us: float
    errors: np.ndarray
    modelled: np.ndarray


def point(name, plan, us):
    """The Point of a plan (with a target, without a queue) that took `us`."""
    if len(plan.items) > plan.cta_item_indptr[-1]:
        raise ValueError(f"{name}: the plan has a queue, whose items are of no CTA")
    shapes = len(plan.target["shapes"])
    items = plan.items
    cta = np.repeat(np.arange(plan.num_ctas), np.diff(plan.cta_item_indptr))
    terms = np.zeros((plan.num_ctas, 2 * shapes + 1))
    np.add.at(terms, (cta, items["shape"]), items["num_heads"])
    keys = items["num_heads"] * (items["kv_end"] - items["kv_begin"]).astype(float)
    np.add.at(terms, (cta, shapes + items["shape"]), keys)
    np.add.at(terms, (cta, 2 * shapes), items["num_heads"] * (items["partial_row"] >= 0))
    return Point(name, terms, plan.target["num_sms"], plan.num_partial_rows > 0, us)


def costs_of(target):
    """The costs of a plan's target, in the order of terms."""
    shapes = target["shapes"]
    return np.array([*(s[2] for s in shapes), *(s[3] for s in shapes), target["merge_us"]])


def _busiest(p, costs):
    """Terms whose product with the costs is the makespan."""
    load = p.terms @ costs
    if not p.num_sms:
        return p.terms[load.argmax()]
    most, row = -1.0, None
    for cta in range(p.num_sms):
        pair = [c for c in (cta, cta + p.num_sms) if c < len(load)]
        longer = max(pair, key=lambda c: load[c])
        shared = p.terms[min(pair, key=lambda c: load[c])] if len(pair) > 1 else 0 * p.terms[cta]
        terms = shared + (p.terms[longer] - shared) / _plait.speed_alone
        if terms @ costs > most:
            most, row = terms @ costs, terms
    return row


def _last_join(p):
    return _plait.last_join_us if p.num_sms and p.joins else 0.0


def modelled(points, costs, launch_us):
    """us of each point."""
    return np.array([launch_us + _last_join(p) + _busiest(p, costs) @ costs for p in points])


def launch_of(points, costs):
    """What is left of the times on average, in parts of them."""
    us = np.array([p.us for p in points])
    rest = us - modelled(points, costs, 0.0)
    return float((rest / us**2).sum() / (1 / us**2).sum())


def fit(points, start) -> Fit:
    """The costs, none negative, whose modelled times are nearest to the measured ones, in parts of
    these. start: costs to begin with. Raises ValueError with fewer points than costs."""
    us = np.array([p.us for p in points])
    known = np.array([p.terms.any(axis=0) for p in points]).any(axis=0)
    if len(points) <= known.sum() + 1:
        raise ValueError(f"{len(points)} points for {known.sum() + 1} unknowns; it takes more")
    costs = np.where(known, start, 0.0)
    rest = us - np.array([_last_join(p) for p in points])
    last = None
    for _ in range(_ROUNDS):
        rows = np.array([np.append(_busiest(p, costs)[known], 1.0) for p in points])
        if last is not None and np.array_equal(rows, last):
            break
        last = rows
        found = _least_squares(rows / us[:, None], rest / us)
        costs[known] = found[:-1]
    left = (rows @ found - rest) / us
    scale = (left @ left) / (len(points) - len(found))
    spread = np.sqrt(scale * np.diag(np.linalg.pinv((rows / us[:, None]).T @ (rows / us[:, None]))))
    out = [np.where(known, 0.0, np.nan) for _ in range(2)]
    out[0][known], out[1][known] = found[:-1], spread[:-1]
    return Fit(out[0], float(found[-1]), out[1], rows @ found + us - rest)


def _least_squares(a, y):
    """Least squares without negative numbers: what comes out most negative is 0, and again."""
    scale = np.linalg.norm(a, axis=0)  # us and us a key differ by a thousand
    free = np.ones(a.shape[1], bool)
    while True:
        x = np.zeros(a.shape[1])
        x[free] = np.linalg.lstsq(a[:, free] / scale[free], y, rcond=None)[0] / scale[free]
        if (x >= 0).all():
            return x
        free[(x * scale).argmin()] = False
