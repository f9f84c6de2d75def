"""plait.flashinfer has the published signatures, and its documentation the table of what it
refuses."""

import functools
import inspect
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402
from plait.flashinfer import refusals  # noqa: E402

HERE = Path(__file__).parent
PUBLISHED = [line for line in (HERE / "flashinfer_signatures.txt").read_text().splitlines()
             if not line.startswith("#")]


def found(name):
    """What plait.flashinfer has under a published name, and that name, written as in the table."""
    owner, _, member = name.rpartition(".")
    value = inspect.getattr_static(getattr(flashinfer, owner), member) if owner else getattr(
        flashinfer, name, None)
    return value


def written(function):
    parts, keyword_only = [], False
    for p in inspect.signature(function).parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            if not any(x.startswith("*") for x in parts):
                parts.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        keyword_only |= star == "*"
        parts.append(f"{star}{p.name}" + ("" if p.default is p.empty else f"={p.default!r}"))
    return f"({', '.join(parts)})"


@pytest.mark.parametrize("line", PUBLISHED, ids=lambda line: line.split("(")[0])
def test_signature(line):
    name, equals, same_as = line.partition(" = ")
    if equals and "(" not in name:  # an alias of another member
        owner, _, _ = name.rpartition(".")
        alias, target = found(name), same_as.removeprefix("functools.partialmethod(").split(",")[0]
        if isinstance(alias, functools.partialmethod):
            assert alias.func is found(f"{owner}.{target}") and alias.keywords == {"return_lse": True}
            assert same_as == f"functools.partialmethod({target}, return_lse=True)"
        else:
            assert alias is found(f"{owner}.{same_as}")
    elif "(" not in line:
        assert isinstance(inspect.getattr_static(getattr(flashinfer, name.split(".")[0]),
                                                 name.split(".")[1]), property)
    else:
        name = line.split("(")[0]
        assert written(found_anywhere(name)) == line[len(name):]


def found_anywhere(name):
    owner, _, member = name.rpartition(".")
    return getattr(getattr(flashinfer, owner), member) if owner else getattr(flashinfer, name)


def test_every_name_is_in_the_table():
    names = {line.split("(")[0].split(".")[0] for line in PUBLISHED}
    names.add("single_prefill_with_kv_cache_return_lse")  # a partial of the one beside it
    assert names == set(flashinfer.__all__)


def test_partial_returns_lse():
    partial = flashinfer.single_prefill_with_kv_cache_return_lse
    assert partial.func is flashinfer.single_prefill_with_kv_cache
    assert partial.keywords == {"return_lse": True}


def test_every_refused_argument_is_documented():
    text = (HERE.parent / "docs/flashinfer.md").read_text()
    for name, (taken, why) in refusals.REFUSED.items():
        assert f"| `{name}` | `{taken}` | {why} |" in text, name
    listed = {line.split("`")[1] for line in text.splitlines()
              if line.startswith("| `") and line.count("|") == 4}
    assert listed == set(refusals.REFUSED)


def test_every_refused_argument_is_published():
    published = "\n".join(PUBLISHED)
    for name in refusals.REFUSED:
        assert f" {name}=" in published or f"({name}=" in published, name


def test_documented_example():
    text = (HERE.parent / "docs/flashinfer.md").read_text()
    block = text.split("```python\n")[2].split("```")[0]
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(block, "flashinfer.md", "exec"), scope)
    assert scope["out"].shape == (2, 8, 64) and scope["lse"].shape == (2, 8)
