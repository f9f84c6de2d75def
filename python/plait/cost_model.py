"""Files of costs that `plait tune` measured on one GPU: plait.Attention(cost_model="h200.json")."""

import hashlib
import json
import os
from pathlib import Path

from plait.arguments import number, shown

FORMAT = "plait cost model 1"
# Shapes of each kind of kernel that costs are kept of; docs/scheduler.md says what they are.
SHAPES = {"sm90 mixed": 2, "sm90 wide": 2, "sm90 decode": 1, "sm80": 2}
_MOST_US, _MOST_US_PER_KEY = 1e6, 1e3


def write_cost_model(path, *, gpu, arch, kernels, how):
    """kernels: {kind: {"fixed_us": [us a shape], "us_per_key": [us a shape], "merge_us": us}}, of
    head dims 128 and 16 bits; gpu and how: in words, for people."""
    content = dict(format=FORMAT, gpu=gpu, arch=arch, how=how, kernels=kernels)
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_cost_model(where, path):
    """(name, arch, {kind: (fixed_us, us_per_key, merge_us)}) of a file, as the extension takes it.

    The name is that of the costs, not of the file: equal costs have equal names. Raises TypeError
    for what is no path, ValueError for a file that is none or says something wrong."""
    try:
        path = os.fspath(path)
    except TypeError:
        raise TypeError(
            f"{where}: cost_model is {shown(path)} ({type(path).__name__}); taken is the path of a "
            f"file that `plait tune -o` wrote"
        ) from None

    def wrong(what):
        return ValueError(f"{where}: cost_model {str(path)!r} {what}")

    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise wrong(f"is no JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise wrong(f"is no file of `plait tune -o`: it wants a format of {FORMAT!r}")
    arch, kernels = content.get("arch"), content.get("kernels")
    if not isinstance(arch, str) or not isinstance(kernels, dict):
        raise wrong("has no arch (text) or no kernels (an object)")
    found = {}
    for kind, costs in kernels.items():
        if kind not in SHAPES:
            raise wrong(f"has a kernel {shown(kind)}; known are {', '.join(SHAPES)}")
        found[kind] = _costs(kind, costs, wrong)
    canonical = json.dumps([arch, found], sort_keys=True)
    name = "tuned " + hashlib.sha256(canonical.encode()).hexdigest()[:8]
    return name, arch, found


def _costs(kind, costs, wrong):
    names = {"fixed_us", "us_per_key", "merge_us"}
    if not isinstance(costs, dict) or set(costs) != names:
        given = ", ".join(map(str, costs)) if isinstance(costs, dict) else shown(costs)
        raise wrong(f"has of {kind!r} {given or 'nothing'}; taken are {', '.join(sorted(names))}")

    def us(name, value, most):
        try:
            return number("", name, value, 0, most)
        except (TypeError, ValueError):
            raise wrong(
                f"has of {kind!r} {name} {shown(value)}; taken is a number from 0 to {most:g}"
            ) from None

    shapes = []
    for name, most in (("fixed_us", _MOST_US), ("us_per_key", _MOST_US_PER_KEY)):
        values = costs[name]
        if not isinstance(values, list) or len(values) != SHAPES[kind]:
            raise wrong(
                f"has of {kind!r} {name} {shown(values)}; taken is a list of {SHAPES[kind]}"
            )
        shapes.append([us(f"{name}[{i}]", value, most) for i, value in enumerate(values)])
    return *shapes, us("merge_us", costs["merge_us"], _MOST_US)
