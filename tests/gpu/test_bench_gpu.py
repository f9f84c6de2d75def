"""`plait bench` from the command line to figures: small runs of cases, beside cuDNN."""

import json
import subprocess
import sys

import pytest


def bench(*args):
    done = subprocess.run(
        [sys.executable, "-m", "plait", "bench", *args, "--seconds", "0.03", "--json"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    return {(row["case"], row["metric"]): row["value"] for row in rows}


@pytest.mark.parametrize("kernel", ["auto", "sm80", "plain"])
def test_a_case_is_checked_and_timed(kernel):
    found = bench("decode", "--case", "d16_uniform", "--kernel", kernel)
    assert found["d16_uniform", "time"] > 1 and found["d16_uniform", "of ceiling"] > 0


def test_a_case_stands_beside_its_yardstick_and_a_peer():
    found = bench("spec", "--peers", "cudnn")
    assert found["spec32_8_4k_mask", "FLOP/s beside spec32_8_4k"] > 0.1
    found = bench("prefill", "--case", "p16_const1k", "--peers", "cudnn")
    assert found["p16_const1k", "cudnn / ours"] > 0.05, found


def test_the_planner_on_the_device_is_timed():
    command = [sys.executable, "-m", "plait", "bench", "plan", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    times = {row["case"]: row["value"] for row in json.loads(done.stdout)
             if row["metric"] == "plan on the device, warm L2, median"}  # fmt: skip
    assert [int(case.split()[1].rstrip(",")) for case in times] == [16, 256, 4096]
    assert all(0.5 < us < 1000 for us in times.values())
