"""`plait tune` without a GPU: costs are found again in times made of known ones, and files of costs
say what is wrong with them."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import plait
from plait import _plait
from plait.bench import cost_fit, tune
from plait.bench.case import Case
from plait.cli import app
from plait.cli import tune as command
from plait.cost_model import SHAPES, read_cost_model, write_cost_model

# us: fixed by shape, a key by shape, merge; and a launch.
TWO_SHAPES = np.array([7.1, 1.9, 0.0151, 0.0182, 2.3])
ONE_SHAPE = np.array([6.2, 0.0240, 4.1])
LAUNCH_US = 5.5


def plans(costs, kernel, num_ctas, tile_q, num_sms=0):
    """(name, plan) of all that `plait tune` measures of a kernel, planned by other costs."""
    for case in tune.cases_of(kernel, num_ctas, tile_q[0]):
        plan = plait.make_plan(
            np.concatenate([[0], np.cumsum(case.q_len)]), np.array(case.kv_len), group_size=4,
            num_kv_heads=8, num_ctas=num_ctas, tile_kv=64, tile_q=tile_q, num_sms=num_sms,
            scheduler=case.scheduler,
            variant=plait.full() if case.variant == "full" else plait.causal(),
        )  # fmt: skip
        yield case.name, plan


def kernels(arch="90a"):
    return {(k.kind, k.prefill): k for k in tune._kernels(arch)}


@pytest.mark.parametrize(
    "kind, costs, num_ctas, tile_q, num_sms",
    [
        ("sm90 decode", ONE_SHAPE, 264, (16,), 132),
        ("sm90 wide", TWO_SHAPES, 132, (192, 64), 0),
        ("sm90 mixed", TWO_SHAPES, 108, (128, 64), 0),
    ],
)
def test_costs_are_found_in_noisy_times_made_of_them(kind, costs, num_ctas, tile_q, num_sms):
    kernel = kernels()[kind, len(tile_q) == 2]
    rng = np.random.default_rng(3)
    points = []
    for name, plan in plans(costs, kernel, num_ctas, tile_q, num_sms):
        # The time of the plan's own timeline, with these costs in place of those it was made by.
        shapes = len(tile_q)
        target = plan.target | dict(
            shapes=[(*s[:2], *costs[[i, shapes + i]].tolist())
                    for i, s in enumerate(plan.target["shapes"])],
            merge_us=float(costs[-1]))  # fmt: skip
        times = np.frombuffer(_plait.timeline(plan._data, target), plait.plan.ITEM_TIME)
        ends = np.zeros(plan.num_ctas)
        np.maximum.at(ends, times["cta"], times["end_us"])
        us = ends.max()
        if num_sms:  # the longer of two is faster alone; a join at the end
            pair = np.sort(ends.reshape(2, num_sms), axis=0)
            us = (pair[0] + (pair[1] - pair[0]) / _plait.speed_alone).max()
            us += _plait.last_join_us * (plan.num_partial_rows > 0)
        us = (us + LAUNCH_US) * (1 + 0.01 * rng.standard_normal())
        points.append(cost_fit.point(name, plan, us))
    start = cost_fit.costs_of(plan.target)
    assert abs(start / costs - 1).max() > 0.3  # it did not begin with them
    found = cost_fit.fit(points, start)
    keys = slice(len(tile_q), -1)
    assert found.costs[keys] == pytest.approx(costs[keys], rel=0.02)
    assert np.all(abs(found.costs - costs) <= 4 * found.errors + 1e-6), (found.costs, found.errors)
    assert found.costs == pytest.approx(costs, rel=0.35) and found.launch_us < 9
    measured = np.array([p.us for p in points])
    assert abs(found.modelled / measured - 1).max() < 0.05
    assert found.modelled == pytest.approx(
        cost_fit.modelled(points, found.costs, found.launch_us), rel=1e-9)  # fmt: skip
    before = cost_fit.modelled(points, start, cost_fit.launch_of(points, start))
    assert abs(before / measured - 1).max() > 0.05


def test_what_no_point_has_is_not_found():
    kernel = kernels("80")["sm80", True]
    points = [cost_fit.point(name, plan, plan.candidates[plan.chosen]["makespan_us"] + 4)
              for name, plan in plans(TWO_SHAPES, kernel, 216, (128, 16))]  # fmt: skip
    found = cost_fit.fit(points, TWO_SHAPES)
    assert np.isnan(found.costs).tolist() == [False, True, False, True, True]
    # float32 in the target
    assert found.costs[[0, 2]] == pytest.approx([6.7, 0.0138], rel=1e-3)
    with pytest.raises(ValueError, match="2 points for 3 unknowns"):
        cost_fit.fit(points[:2], TWO_SHAPES)


def test_least_squares_has_no_negative_costs():
    a = np.array([[1.0, 0], [1, 1], [1, 2]])
    assert cost_fit._least_squares(a, np.array([3.0, 2, 1])) == pytest.approx([2, 0])


def test_a_plan_with_a_queue_is_refused():
    plan = plait.make_plan(np.arange(13), np.arange(12) * 997 % 8000 + 500, group_size=4,
                           num_kv_heads=8, num_ctas=5, min_keys_for_queue=1000)  # fmt: skip
    with pytest.raises(ValueError, match="x: the plan has a queue"):
        cost_fit.point("x", plan, 1.0)


def test_measured_costs_become_those_of_a_file():
    """Of a wide kernel whose three warpgroups split the keys, and of the two kernels of sm80."""
    shipped = tune.unit_costs()["sm90 wide"]
    target = dict(shapes=[(192, 1, 1.0, 1.0), (64, 3, 2.0, 0.73)])
    costs = np.array([4.0, 1.5, 0.02, 0.0146, 2.0])
    entry = tune.to_file(costs, target, shipped)
    assert entry == dict(fixed_us=[4.0, 1.5], us_per_key=[0.02, 0.02], merge_us=2.0)
    few = tune.to_file(np.array([2.0, 0.06, 3.0]), dict(shapes=[(16, 4, 2.0, 3.0)]),
                       tune.unit_costs()["sm80"])  # fmt: skip
    assert few == dict(fixed_us=[1.0, 2.0], us_per_key=[1.0, 0.02], merge_us=3.0)
    many = tune.to_file(np.array([5.0, np.nan, 0.02, np.nan, np.nan]),
                        dict(shapes=[(64, 1, 1.0, 0.5), (16, 4, 2.0, 3.0)]), few)  # fmt: skip
    assert many == dict(fixed_us=[5.0, 2.0], us_per_key=[0.04, 0.02], merge_us=3.0)


def test_a_kernel_is_measured_and_reported(monkeypatch, tmp_path):
    """The flow on the CPU, whose times are made up, to what the command prints and writes."""
    base = Case("", "tune", (1,), (64,), 16, num_qo_heads=2, num_kv_heads=2, head_dim=8,
                dtype="float32")  # fmt: skip
    kernel = tune.Kernel("cpu", base, True, False, ())
    runs = []

    def time_plait(device, work, seconds):
        work()
        runs.append(work)
        return SimpleNamespace(median_us=100.0 + len(runs))

    monkeypatch.setattr(tune, "time_plait", time_plait)
    said = []
    measured = tune.measure_kernel(kernel, "cpu", 0.1, said.append)
    assert len(measured.points) == len(runs) == len(said) == 39
    assert [p.us for p in measured.points] == [101.0 + i for i in range(39)]
    wrong = dataclasses.replace(kernel, kind="sm80")
    with pytest.raises(RuntimeError, match="sm80: these bounds have 'shipped, cpu'"):
        tune.measure_kernel(wrong, "cpu", 0.1, said.append)

    def fake_tune(device, seconds, kinds, progress, found):
        found(measured)
        return "a GPU", "90a", GOOD

    compared = [("d8_8k", "tuned 12345678, sm80", 10.0, 9.5, False)]
    monkeypatch.setattr(tune, "tune", fake_tune)
    monkeypatch.setattr(tune, "compare", lambda *a: compared)
    monkeypatch.setattr(
        command, "_plait", SimpleNamespace(describe_gpu=lambda device: "a GPU")
    )
    path = tmp_path / "costs.json"
    done = CliRunner().invoke(app, ["tune", "-o", str(path), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    value = {(r["case"], r["metric"]): r["value"] for r in rows}
    assert value["d8_8k, sm80", "time, tuned costs"] == 9.5
    first = measured.points[0].name
    assert value[f"{measured.kernel_name}, {first}", "time"] == 101
    in_use = [v for (_, metric), v in value.items() if metric.endswith("rows, in use")]
    assert in_use[:2] == pytest.approx(1e3 * measured.in_use[:2], rel=1e-3)
    assert read_cost_model("x", path)[2]["sm80"] == ([5.0, 2.0], [0.1, 0.2], 0.0)
    text = CliRunner().invoke(app, ["tune"]).stdout
    assert "Batches planned by either" in text and first in text
    for wrong in (["--kernel", "sm70"], ["--seconds", "0"]):
        assert CliRunner().invoke(app, ["tune", *wrong]).exit_code == 2


# --- files ----------------------------------------------------------------------------------------

GOOD = {
    "sm90 decode": dict(fixed_us=[3.0], us_per_key=[0.03], merge_us=2),
    "sm80": dict(fixed_us=[5, 2], us_per_key=[0.1, 0.2], merge_us=0),
}


def written(folder, kernels=GOOD, name="costs.json", **more):
    path = folder / name
    write_cost_model(path, gpu="a GPU", arch="90a", kernels=kernels, how="by hand")
    if more:
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return path


def test_a_file_is_read_as_it_was_written_and_named_by_its_costs(tmp_path):
    name, arch, found = read_cost_model("x", written(tmp_path))
    assert arch == "90a" and found == {
        "sm90 decode": ([3.0], [0.03], 2.0), "sm80": ([5.0, 2.0], [0.1, 0.2], 0.0)}  # fmt: skip
    assert name.startswith("tuned ") and len(name) == 14
    same = read_cost_model("x", str(written(tmp_path, name="other.json", gpu="another", how="")))
    assert same[0] == name
    changed = json.loads(json.dumps(GOOD))
    changed["sm80"]["merge_us"] = 1e-3
    assert read_cost_model("x", written(tmp_path, changed))[0] != name
    assert read_cost_model("x", written(tmp_path, arch="80"))[0] != name


@pytest.mark.parametrize("more, says", [
    (dict(format="plait cost model 2"), "is no file of `plait tune -o`: it wants a format of 'plait cost model 1'"),
    (dict(arch=90), r"has no arch \(text\) or no kernels"),
    (dict(kernels=[]), r"has no arch \(text\) or no kernels"),
    (dict(kernels={"sm70": {}}), "has a kernel 'sm70'; known are sm90 mixed, sm90 wide, "),
    (dict(kernels={"sm80": {}}), "has of 'sm80' nothing; taken are fixed_us, merge_us, us_per_key"),
    (dict(kernels={"sm80": GOOD["sm90 decode"]}), r"has of 'sm80' fixed_us \[3.0\]; taken is a list of 2"),
    (dict(kernels={"sm90 decode": GOOD["sm90 decode"] | dict(us_per_key=[-1])}),
     r"has of 'sm90 decode' us_per_key\[0\] -1; taken is a number from 0 to 1000"),
    (dict(kernels={"sm90 decode": GOOD["sm90 decode"] | dict(merge_us=float("nan"))}),
     "has of 'sm90 decode' merge_us nan; taken is a number from 0 to 1e"),
])  # fmt: skip
def test_a_wrong_file_is_refused_in_one_error(tmp_path, more, says):
    with pytest.raises(ValueError, match="x: cost_model .*costs.json' " + says):
        read_cost_model("x", written(tmp_path, **more))


def test_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cost_model .*none.json' cannot be read: No such file"):
        read_cost_model("x", tmp_path / "none.json")
    (tmp_path / "text").write_text("{")
    with pytest.raises(ValueError, match="cost_model .*text' is no JSON: "):
        read_cost_model("x", tmp_path / "text")
    with pytest.raises(TypeError, match=r"x: cost_model is 3 \(int\); taken is the path of a file"):
        read_cost_model("x", 3)


def test_costs_are_for_gpus(tmp_path):
    config = dict(num_qo_heads=2, num_kv_heads=1, head_dim=64, dtype="float32",
                  bounds=plait.Bounds(requests=1, query_tokens=1, keys=64))  # fmt: skip
    with pytest.raises(ValueError, match="cost_model is of a GPU, but the device is cpu"):
        plait.Attention(**config, cost_model=written(tmp_path))
    with pytest.raises(ValueError, match="cost_model is of a GPU, but the device is cpu"):
        plait.workspace_bytes(**config, cost_model=written(tmp_path))


def test_plans_say_where_their_costs_are_from():
    indptr, kv_len = np.arange(4), np.array([100, 2000, 50])
    config = dict(num_qo_heads=2, num_kv_heads=1, head_dim=64, dtype="float32",
                  bounds=plait.Bounds(requests=3, query_tokens=3, keys=2000))  # fmt: skip
    plan = plait.Attention(**config).plan(
        qo_indptr=indptr, kv_indptr=np.concatenate([[0], np.cumsum(kv_len)]))  # fmt: skip
    assert plan.cost_model == "shipped, cpu" and "costs shipped, cpu" in str(plan)
    assert json.loads(plan.explain_json())["cost_model"] == "shipped, cpu"
    assert "costs shipped, cpu" in plan.explain()
    model = dict(group_size=2, num_kv_heads=1, num_ctas=4)
    shipped = plait.make_plan(indptr, kv_len, **model)
    assert shipped.cost_model == "shipped, sm90 decode"
    given = plait.make_plan(indptr, kv_len, **model, merge_us=2.5)  # what is shipped, too
    assert given.cost_model == "given" and given != shipped
    again = plait.Plan.from_json(given.to_json())
    assert again == given and again.cost_model == "given"
    broken = json.loads(given.to_json()) | dict(cost_model='a "b"')
    with pytest.raises(ValueError, match="cost_model is missing, or no plain text"):
        plait.Plan.from_json(json.dumps(broken))


def test_every_kernel_of_the_files_is_measured():
    assert {kind for kind, _ in kernels()} == set(SHAPES)
    assert {kind for kind, _ in kernels("89")} == {"sm80"}
    for kernel in tune._kernels("90a"):
        for case in tune.cases_of(kernel, 132, 128):
            assert isinstance(case, Case) and case.scheduler != "auto" and case.call == "graph"
            assert max(case.q_len) <= max(kernel.base.query_bound, 1)
