"""`plait bench` from the command line to figures: small runs of cases, beside cuDNN."""

import json
import subprocess
import sys

import numpy as np
import pytest

import plait


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


def test_shared_prefixes_and_ways_to_launch():
    found = bench("shared", "graph", "--case", "s16_8k_256,d16_zipf1k_composed,d1_4k_of256,d16_1k_plan")
    assert found["s16_8k_256", "FLOP/s beside s16_8k_256_flat"] > 0.5
    assert found["d16_zipf1k_composed", "FLOP/s beside d16_zipf1k"] > 0.5
    assert -5 < found["d1_4k_of256", "more than d1_4k_eager"] < 50
    assert 0 < found["d16_1k_plan", "more than d16_1k_eager"] < 50
    assert 0 < found["s16_8k_256_flat", "workspace"] < 64


def test_figures_of_the_paper(tmp_path):
    pytest.importorskip("jinja2")
    page = tmp_path / "page.html"
    found = bench("paper", "--case", "d16_zipf1k,d16_zipf1k_unsplit,d16_zipf1k_lpt", "--html", str(page))
    assert found["d16_zipf1k", "scheduler: FLOP/s beside d16_zipf1k_unsplit"] > 0.5
    assert page.read_text().count("<svg") == 2  # of the scheduler and of unequal lengths


def test_costs_are_measured_and_plans_made_by_them(tmp_path):
    path = tmp_path / "costs.json"
    command = [sys.executable, "-m", "plait", "tune", "--kernel", "sm80", "--seconds", "0.02", "-o", str(path)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    measured = {row["metric"]: row["value"] for row in rows if row["metric"].endswith(", measured")}
    assert len(measured) == 5 and max(measured.values()) > 0
    costs = json.loads(path.read_text())
    config = dict(num_qo_heads=8, num_kv_heads=2, head_dim=64, device="cuda:0", kernel="sm80",
                  bounds=plait.Bounds(requests=4, query_tokens=4, keys=5000, max_q_len=1))  # fmt: skip
    batch = dict(qo_indptr=np.arange(5), kv_indptr=np.array([0, 5000, 5001, 9000, 9300]))
    shipped = plait.Attention(**config).plan(**batch)
    tuned = plait.Attention(**config, cost_model=path).plan(**batch)
    assert shipped.cost_model == "shipped, sm80" and tuned != shipped
    assert tuned.cost_model.startswith("tuned ") and tuned.cost_model.endswith(", sm80")
    again = tmp_path / "again.json"
    again.write_text(path.read_text())
    assert plait.Attention(**config, cost_model=again).plan(**batch) == tuned
    path.write_text(json.dumps(costs | {"kernels": {}}))
    assert plait.Attention(**config, cost_model=path).plan(**batch) == shipped
    path.write_text(json.dumps(costs | {"arch": "75"}))
    with pytest.raises(ValueError, match="cost_model is of sm_75, but cuda:0 is sm_"):
        plait.Attention(**config, cost_model=path)


def test_the_planner_on_the_device_is_timed():
    command = [sys.executable, "-m", "plait", "bench", "plan", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    times = {row["case"]: row["value"] for row in json.loads(done.stdout)
             if row["metric"] == "plan on the device, warm L2, median"}  # fmt: skip
    assert [int(case.split()[1].rstrip(",")) for case in times] == [16, 256, 4096]
    assert all(0.5 < us < 1000 for us in times.values())
