"""The tree keeps to its own rules: includes follow the arrows of the layers, the texts embedded in
the library are the files, and nothing is left to do in a comment.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parent.parent
SOURCE = (".h", ".cc", ".cuh")
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)


def tracked():
    """Files of the project: what git knows, else (a source archive) what lies there."""
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
                         text=True)
    if out.returncode:
        return [p for p in ROOT.rglob("*") if p.is_file() and "build" not in p.parts
                and ".venv" not in p.parts]
    return [ROOT / name for name in out.stdout.split() if (ROOT / name).is_file()]


FILES = tracked()


def includes(folder):
    """(file, its quoted includes, its <> includes) of every source file under folder."""
    for path in FILES:
        if path.suffix in SOURCE and (ROOT / folder) in path.parents:
            found = INCLUDE.findall(path.read_text())
            yield (path.relative_to(ROOT), [n for mark, n in found if mark == '"'],
                   [n for mark, n in found if mark == "<"])


def check_arrows(folder, allowed, none_of=(), system=True):
    """Every quoted include under folder starts with one of `allowed`."""
    seen = 0
    for path, quoted, angled in includes(folder):
        seen += 1
        for name in quoted:
            assert name.startswith(tuple(allowed)), f"{path} includes {name}"
            assert not name.startswith(tuple(none_of) or ("\0",)), f"{path} includes {name}"
        assert system or not angled, f"{path} includes <{angled[0]}>"
    assert seen > 0, f"no sources under {folder}"


def test_public_headers_include_only_each_other():
    check_arrows("include/plait", ["plait/"])


def test_host_device_stands_alone():
    check_arrows("kernels/host_device", ["host_device/", "plait/plan_data.h"], system=False)


def test_kernels_include_only_kernels():
    """NVRTC has no standard headers, and matches names exactly, from kernels/."""
    names = {str(p.relative_to(ROOT / "kernels")) for p in FILES if (ROOT / "kernels") in p.parents}
    for path, quoted, angled in includes("kernels"):
        if "cpu" in path.parts:
            continue  # compiled by the host compiler alone
        assert not angled, f"{path} includes <{angled[0]}>"
        for name in quoted:
            assert name in names or name == "plait/plan_data.h", f"{path} includes {name}"


def test_deciding_knows_nothing_of_executing():
    check_arrows("src/scheduler", ["scheduler/", "host_device/", "plait/", "base/", "formats/"],
                 none_of=["plait/cuda", "plait/jit"])
    check_arrows("src/bench", ["bench/", "cuda/cost_model.h", "formats/", "host_device/", "plait/"])
    check_arrows("src/formats", ["formats/", "host_device/", "plait/", "base/", "tensor_checks.h"],
                 none_of=["plait/cuda", "plait/jit"])
    check_arrows("src/variants", ["variants/", "host_device/", "plait/", "base/", "jit/"],
                 none_of=["plait/cuda"])


def test_only_executors_use_jit():
    for path, quoted, _ in includes("src"):
        uses = [n for n in quoted if n.startswith("jit/")]
        layer = path.parts[1]
        assert not uses or layer in ("jit", "cuda", "cpu", "variants"), f"{path} includes {uses[0]}"


def test_backends_do_not_know_each_other():
    for folder, other in (("src/cuda", "cpu/"), ("src/cpu", "cuda/")):
        for path, quoted, _ in includes(folder):
            assert not [n for n in quoted if n.startswith(other)], f"{path} includes {other}"


def test_no_cuda_toolkit_header_in_the_library():
    for path, quoted, angled in [*includes("src"), *includes("include"), *includes("python")]:
        for name in [*quoted, *angled]:
            assert not re.match(r"(cuda|cuda_\w+|nvrtc|cublas\w*)\.h$", name), f"{path} includes {name}"


def test_every_file_says_what_it_holds():
    for path in FILES:
        if path.suffix == ".cc" and path.with_suffix(".h").exists():
            continue  # the header says it
        if path.suffix in SOURCE:
            assert path.read_text().startswith(("//", "/*")), f"{path} has no header comment"
        if path.suffix == ".py" and path.name != "__init__.py" and path.stat().st_size:
            head = path.read_text().lstrip()
            assert head.startswith(('"""', "#")), f"{path} has no docstring"


def test_nothing_left_to_do():
    words = re.compile("|".join(("TO" + "DO", "FIX" + "ME", r"\bX" + r"XX\b", "HA" + "CK")))
    for path in FILES:
        if path.suffix in (*SOURCE, ".py", ".md", ".txt", ".toml", ".cmake"):
            found = words.search(path.read_text(errors="replace"))
            assert not found, f"{path} has {found.group()}"


def test_lines_are_short():
    for path in FILES:
        if path.suffix in SOURCE:
            for n, line in enumerate(path.read_text().splitlines(), 1):
                assert len(line) <= 100, f"{path}:{n} has {len(line)} characters"


def test_embedded_texts_are_the_files():
    """Every kernel source is in the extension module, byte for byte."""
    library = Path(plait._plait.__file__).read_bytes()
    kernels = [p for p in FILES if (ROOT / "kernels") in p.parents and p.suffix in (".cuh", ".h")]
    assert len(kernels) > 20
    for path in [*kernels, ROOT / "include/plait/plan_data.h"]:
        assert path.read_bytes() in library, f"{path} is not embedded as it is; build anew"


@pytest.mark.parametrize("case", ["C33", "C34", "C35"])
def test_cache_cases_are_tested(case):
    """The cases of building kernels at run time are with the tests of jit: test functions that say
    so, in the comment before a TEST in C++ or at the head of the docstring in Python.
    """
    cpp = re.compile(rf"^// {case}\b.*\n(?://.*\n)*TEST(?:_F|_P)?\(", re.M)
    python = re.compile(rf'^def test_\w+\(.*\):\n    """{case}\b', re.M)
    tests = [match for p in FILES if (ROOT / "tests/jit") in p.parents and p.suffix in (".py", ".cc")
             for match in (python if p.suffix == ".py" else cpp).findall(p.read_text())]
    assert tests, f"no test of {case}"


def test_gpu_tests_can_be_collected():
    """Where there is no GPU too: what only fails there is found late."""
    pytest.importorskip("torch", reason="GPU tests make their tensors with torch")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider",
               "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
