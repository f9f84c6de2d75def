"""What the documentation shows runs: examples/, the README's example, docstrings."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/sharing.md"])
def test_page(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})


def modules():
    return sorted(
        m.name
        for m in pkgutil.walk_packages(plait.__path__, "plait.")
        if m.name not in ("plait.__main__", "plait._plait")
        and not m.name.startswith(("plait.torch_ops", "plait.flashinfer"))  # need torch
    )


@pytest.mark.parametrize("name", modules())
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_exports():
    assert sorted(plait.__all__) == plait.__all__
    for name in plait.__all__:
        assert getattr(plait, name).__doc__, name
