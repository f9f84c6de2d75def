"""plait in odd environments, each in a process of its own: no compiler, no writable folder, no
HOME.

Cases C34 and C35 of public reports: what needs no compiler works without one; what does, says what
it looked for; a build that cannot be stored still runs.
"""

import os
import stat
import subprocess
import sys
import textwrap

import pytest

# Runs a built-in or a custom variant on K = 0, so that the output is the mean of V: 2.
PROGRAM = textwrap.dedent("""
    import sys
    import numpy as np
    import plait

    variant = plait.causal() | plait.soft_cap(30.0)
    if sys.argv[1] == "custom":
        variant = plait.custom("shift", "Shift", '''
    struct Shift {
      PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float logit) {
        return logit + p.bias;
      }
    };''', params={"bias": 1.0})
    attention = plait.Attention(num_qo_heads=2, num_kv_heads=1, head_dim=16, dtype="float32",
                                device="cpu", kv=plait.RaggedKv(), variant=variant,
                                bounds=plait.Bounds(requests=1, query_tokens=1, keys=8))
    attention.plan(qo_indptr=np.array([0, 1]), kv_indptr=np.array([0, 3]))
    k = np.zeros((3, 1, 16), np.float32)
    v = np.broadcast_to(np.float32([1, 2, 3]).reshape(3, 1, 1), k.shape).copy()
    out, lse = attention.run(np.ones((1, 2, 16), np.float32), (k, v))
    bias = 1.0 if sys.argv[1] == "custom" else 0.0
    assert np.allclose(out, 2) and np.allclose(lse, np.log(3) + bias), (out, lse)
    print("right")
""")
VARIABLES = ("PLAIT_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "PLAIT_CXX", "CXX", "PLAIT_NVRTC",
             "CUDA_HOME", "CUDA_PATH", "PLAIT_JIT_KEEP")


def run(kind, **variables):
    """The finished process of PROGRAM, with only these of VARIABLES set."""
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | variables
    environment.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    return subprocess.run([sys.executable, "-c", PROGRAM, kind], env=environment, timeout=300,
                          capture_output=True, text=True)


def check_right(done):
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr


def message(done):
    """The error that ended the process: from the exception's line on."""
    assert done.returncode == 1, done.stdout + done.stderr
    at = done.stderr.rindex("\nRuntimeError: ") + 1
    return done.stderr[at:]


@pytest.mark.parametrize("variables", [
    {"PATH": "/nonexistent"},
    {"PATH": "/nonexistent", "CUDA_HOME": ":/opt/cuda", "HOME": "/nonexistent"},
])
def test_without_a_compiler(variables):
    """C34 (a): only a new variant fails, and says what was looked for and what to set."""
    check_right(run("built-in", **variables))
    text = message(run("custom", **variables))
    for wanted in ("shift", "c++: No such file", "g++: No such file", "clang++: No such file", "PLAIT_CXX"):
        assert wanted in text
    assert len(text.splitlines()) <= 15


def test_a_compiler_that_is_not_there_is_quoted():
    """C34 (b)"""
    text = message(run("custom", PLAIT_CXX=":/folder/g++"))
    assert 'PLAIT_CXX=":/folder/g++"' in text


@pytest.mark.parametrize("variables", [
    {},
    {"HOME": __file__},
    {"HOME": "/proc/nobody"},
    {"XDG_CACHE_HOME": __file__},
    {"PLAIT_CACHE_DIR": "/proc/plait", "XDG_CACHE_HOME": "/proc/plait", "HOME": "/proc/plait"},
], ids=["HOME unset", "HOME a file", "HOME missing", "XDG_CACHE_HOME a file", "all three"])
def test_without_a_cache_folder(variables):
    """C35: built-in variants run, and a build that cannot be stored runs from memory."""
    check_right(run("built-in", **variables))
    check_right(run("custom", **variables))


def artefacts(folder):
    return [path for path in folder.rglob("*.so")] if folder.exists() else []


def test_the_first_variable_decides(tmp_path):
    """C35: own variable, then XDG_CACHE_HOME, then HOME."""
    own, xdg, home = (tmp_path / name for name in ("own", "xdg", "home"))
    check_right(run("custom", PLAIT_CACHE_DIR=str(own), XDG_CACHE_HOME=str(xdg), HOME=str(home)))
    assert len(artefacts(own)) == 1 and not artefacts(xdg) and not artefacts(home)
    check_right(run("custom", XDG_CACHE_HOME=str(xdg), HOME=str(home)))
    assert len(artefacts(xdg / "plait")) == 1 and not artefacts(home)
    check_right(run("custom", HOME=str(home)))
    assert len(artefacts(home / ".cache" / "plait")) == 1


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere; DiskCache.* tests this as nobody")
def test_folder_without_permission(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    check_right(run("custom", PLAIT_CACHE_DIR=str(tmp_path / "cache")))


def test_full_disk(tmp_path):
    """C35: a small tmpfs, where this process may mount one."""
    script = 'mount -t tmpfs -o size=4k none "$1" && shift && exec "$@"'
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environment["PLAIT_CACHE_DIR"] = str(tmp_path)
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(tmp_path)]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"no mount namespace: {probe.stderr.strip()}")
    done = subprocess.run([*command, sys.executable, "-c", PROGRAM, "custom"], env=environment,
                          capture_output=True, text=True, timeout=300)
    check_right(done)
