"""`plait tune`: the costs of the planner's model, measured on the GPU at hand.

For each kind of kernel a few dozen batches are planned by forced schedulers and timed as
`plait bench` times them; cost_fit.py finds the costs. Then batches of `plait bench` are planned by
the shipped costs and by these, and timed: whether it was worth it.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plait import _plait
from plait.bench import cost_fit
from plait.bench.case import Case, draw
from plait.bench.cases import CASES
from plait.bench.timing import time_plait
from plait.bench.workload import Pools, Workload
from plait.cost_model import SHAPES, write_cost_model
from plait.nvrtc import use_wheels
from plait.tensors import parse_device


@dataclass
class Kernel:
    """One kernel that is measured: `decode` and `prefill` say whether batches of one query a
    request and of long prompts are; they are planned by the same costs."""

    kind: str  # of cost_model.py
    base: Case
    decode: bool
    prefill: bool
    compared: tuple  # of CASES, beside the shipped costs


def _kernels(arch):
    decode = Case("", "tune", (1,), (64,), page_size=16)
    few = ("d128_zipf4k", "d16_zipf1k", "d8_8k", "d17_4k")
    if arch == "90a":
        # The bounds choose: below and above what kernel_choice.cc takes for many tiles.
        yield Kernel("sm90 decode", decode, True, False, few)
        yield Kernel("sm90 mixed", replace(decode, query_bound=4096), True, True,
                     ("a8_512_8k_page16",))  # fmt: skip
        yield Kernel("sm90 wide", replace(decode, query_bound=16384), True, True,
                     ("mixed_2k_63x4k", "p16_zipf1k"))  # fmt: skip
    sm80 = replace(decode, kernel="sm80")
    yield Kernel("sm80", sm80, True, False, few)
    yield Kernel("sm80", replace(sm80, query_bound=4096), False, True, ("p16_zipf1k",))


def decode_batches(num_ctas, num_kv_heads):
    """(scheduler, kv_len of each request): unsplit with 1, 2 and 4 heads a CTA, split, and of
    unequal lengths, whose CTAs have several short parts."""
    for heads, lengths in ((1, (256, 1024, 4096)), (2, (256, 1024, 4096)), (4, (512, 2048))):
        for keys in lengths:
            yield "unsplit", (keys,) * max(num_ctas * heads // num_kv_heads, 1)
    for scheduler in ("prefix_sum", "lpt"):
        for requests, keys in ((1, 32768), (1, 131072), (4, 16384), (8, 8192), (16, 4096),
                               (20, 4096), (48, 2048), (64, 4096)):  # fmt: skip
            yield scheduler, (keys,) * requests
    unequal = (draw("uniform", 16), draw("zipf", 16), draw("zipf", 16, seed=1),
               draw("zipf", 64, 2048), draw("zipf", 128, 4096))  # fmt: skip
    for scheduler in ("unsplit", "prefix_sum", "lpt"):
        for kv_len in unequal:
            yield scheduler, kv_len


def prefill_batches(num_ctas, num_kv_heads, tokens_a_tile, most_tokens):
    """(query tokens, keys) of one request each, unsplit: 1 to 8 tiles of one head a CTA."""
    for tiles in (1, 2, 4, 8):
        tokens = max(num_ctas * tiles // num_kv_heads, 1) * tokens_a_tile
        if tokens <= most_tokens:
            for keys in (max(tokens, 1024), max(tokens, 1024) + 1024, max(tokens, 1024) + 4096):
                yield tokens, keys


def cases_of(kernel, num_ctas, most_rows):
    """What is measured of a kernel with so many CTAs, whose tiles have at most so many rows."""
    base, heads = kernel.base, kernel.base.num_kv_heads
    if kernel.decode:
        for scheduler, kv_len in decode_batches(num_ctas, heads):
            lengths = " to ".join(map(str, sorted({min(kv_len), max(kv_len)})))
            name = f"{scheduler}, {len(kv_len)} x {lengths}"
            yield replace(base, name=name, q_len=(1,) * len(kv_len), kv_len=kv_len,
                          scheduler=scheduler)  # fmt: skip
    if kernel.prefill:
        tokens_a_tile = most_rows // (base.num_qo_heads // heads)
        for tokens, keys in prefill_batches(num_ctas, heads, tokens_a_tile, base.query_bound):
            yield replace(base, name=f"unsplit, {tokens} queries over {keys}", q_len=(tokens,),
                          kv_len=(keys,), variant="full", scheduler="unsplit")  # fmt: skip


def timed(case, device, pools, seconds, cost_model=None):
    """(plan, us) of a case, its results checked. Raises RuntimeError where they are wrong."""
    workload = Workload(case, device, cost_model=cost_model)
    workload.compile()
    workload.lay_out(pools)
    workload.prepare()
    wrong = workload.check()
    if wrong:
        raise RuntimeError(f"{case.name}: {wrong}")
    us = time_plait(device, workload.run, seconds).median_us
    plan = workload.plan
    workload.release()
    return plan, us


@dataclass
class Measured:
    """Of one kernel: its points, the costs in use and those found, in the order of cost_fit.py."""

    kernel: Kernel
    kernel_name: str
    tile_q: list
    points: list
    in_use: np.ndarray
    launch_in_use: float
    fit: cost_fit.Fit


def measure_kernel(kernel, device, seconds, progress):
    """Measured of a kernel. Raises RuntimeError where the bounds chose another kind."""
    probe = Workload(replace(kernel.base, name=kernel.kind), device)
    probe.compile()
    attention = probe.attention
    target = attention._target
    if not target["cost_model"].endswith(", " + kernel.kind):
        raise RuntimeError(f"{kernel.kind}: these bounds have {target['cost_model']!r}")
    tile_q = [shape[0] for shape in target["shapes"]]
    cases = list(cases_of(kernel, attention.num_ctas, tile_q[0]))
    pools, points = Pools(device, [Workload(case, device) for case in cases]), []
    for case in cases:
        progress(f"{kernel.kind}: {case.name}")
        plan, us = timed(case, device, pools, seconds)
        if [shape[0] for shape in plan.target["shapes"]] != tile_q:
            raise RuntimeError(f"{kernel.kind}, {case.name}: the bounds chose another kernel")
        points.append(cost_fit.point(case.name, plan, us))
    in_use = cost_fit.costs_of(target)
    return Measured(
        kernel,
        attention.kernel_name,
        tile_q,
        points,
        in_use,
        cost_fit.launch_of(points, in_use),
        cost_fit.fit(points, in_use),
    )


def unit_costs():
    """Costs as a file has them whose target tells what is made of each: fixed_us is the place of a
    shape in the file plus 1, us_per_key what that in the file is multiplied with."""
    return {
        kind: dict(fixed_us=[1.0, 2.0][:n], us_per_key=[1.0] * n, merge_us=1.0)
        for kind, n in SHAPES.items()
    }


def to_file(costs, unit_target, shipped):
    """The entry of a file, of costs of one kernel in the order of cost_fit.py. unit_target: of the
    kernel by unit_costs(). What was not measured (NaN) is taken from `shipped`, another entry."""
    entry = json.loads(json.dumps(shipped))
    shapes = unit_target["shapes"]
    for i, (_, _, place, factor) in enumerate(shapes):
        place = round(place) - 1
        for name, value in (
            ("fixed_us", costs[i]),
            ("us_per_key", costs[len(shapes) + i] / factor),
        ):
            if not np.isnan(value):
                entry[name][place] = _rounded(value)
    if not np.isnan(costs[-1]):
        entry["merge_us"] = _rounded(costs[-1])
    return entry


def _rounded(value):
    return float(f"{value:.4g}")


def tune(device, seconds, kinds, progress, found):
    """Measures kinds of kernels (names, or none for all of the GPU); found(Measured) is called with
    each. Returns (gpu, arch, {kind: entry of a file})."""
    use_wheels()
    gpu = _plait.describe_gpu(parse_device(device))
    arch = _plait.driver_info().gpus[parse_device(device)[1]].arch
    kernels = [k for k in _kernels(arch) if not kinds or k.kind in kinds]
    entries = {}
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "unit.json"
        write_cost_model(unit, gpu=gpu, arch=arch, kernels=unit_costs(), how="")
        for kernel in kernels:
            measured = measure_kernel(kernel, device, seconds, progress)
            probe = Workload(replace(kernel.base, name=kernel.kind), device, cost_model=unit)
            probe.compile()
            target = probe.attention._target
            start = entries.get(kernel.kind, unit_costs()[kernel.kind])
            entries[kernel.kind] = to_file(measured.fit.costs, target, start)
            found(measured)
    return gpu, arch, entries


def compare(device, seconds, kinds, arch, path, progress):
    """Of batches of `plait bench`: (case, cost model, us by the shipped costs, us by those of the
    file, whether the cuts are the same)."""
    kernels = [k for k in _kernels(arch) if not kinds or k.kind in kinds]
    pools = Pools(device, [Workload(CASES[n], device) for k in kernels for n in k.compared])
    for kernel in kernels:
        for name in kernel.compared:
            case = replace(CASES[name], kernel=kernel.base.kernel)
            progress(f"{kernel.kind}: {name}")
            shipped_plan, shipped = timed(case, device, pools, seconds)
            plan, tuned = timed(case, device, pools, seconds, path)
            same = plan.items.tobytes() == shipped_plan.items.tobytes()
            yield name, plan.cost_model, shipped, tuned, same
