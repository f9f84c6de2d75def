"""The command line, as a user starts it: output, exit codes, one line for what is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plait

DATA = Path(__file__).parent.parent / "data"


def run(*args, ok=0, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "plait", *map(str, args)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=300,
    )
    assert done.returncode == ok, done.stdout + done.stderr
    return done.stdout if ok == 0 else done.stderr


@pytest.mark.parametrize("trace", ["mooncake_conversation_400.jsonl", "azure_conv_2000.csv"])
def test_replay(trace):
    out = json.loads(run("replay", DATA / trace, "--requests", 6, "--check", 1, "--json"))
    assert out["requests finished"] == 6 and out["steps checked"] == out["steps"] > 0
    table = run("replay", DATA / trace, "--requests", 2, "--scale", "1/64", "--page-size", 4)
    for wanted in (
        "steps",
        "tokens",
        "plan us",
        "run us",
        "balance",
        "largest error",
        "FLOP/s",
        "B/s",
    ):
        assert wanted in table


def test_shared_replay():
    trace = DATA / "mooncake_conversation_400.jsonl"
    args = ("replay", trace, "--requests", 8, "--scale", "1/4", "--chunk", 2048, "--step-ms", 20000,
            "--max-batch", 8, "--steps", 12, "--num-qo-heads", 2, "--check", 4, "--share", "--json")  # fmt: skip
    out = json.loads(run(*args))
    assert out["steps checked"] == 3 and "compose us" in out and "nodes shared" in out
    assert 0 < out["bytes not read"] < out["bytes without sharing"]


@pytest.mark.parametrize(
    "args, message",
    [
        (("--dtype", "float8"), "float8"),
        (("--scale", "1/1000"), "whole number of tokens"),
        (("--head-dim", "12"), "12"),
        (("--num-qo-heads", "3"), "3"),
        (("--device", "tpu"), "taken are 'cpu', 'cuda'"),
        (("--pages", "1"), "the cache has 1"),
        (("--kernel", "fast"), "fast"),
        (("--share",), "the trace has no hash_ids"),
        (("--scheduler", "best"), "taken are 'auto', 'lpt', 'unsplit' and 'prefix_sum'"),
    ],
)
def test_replay_refuses_in_one_line(args, message):
    error = run("replay", DATA / "azure_conv_2000.csv", "--requests", 3, *args, ok=2)
    assert error.startswith("plait: ") and message in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "args",
    [("--step-ms", "nan"), ("--step-ms", "0"), ("--requests", "0"), ("--steps", "-1"),
     ("--check", "-1"), ("--check-rows", "0"), ("--seed", "-1")],
)  # fmt: skip
def test_replay_refuses_numbers_out_of_range(args):
    error = run("replay", DATA / "azure_conv_2000.csv", *args, ok=2)
    assert args[0] in error and "Traceback" not in error, error


def test_a_failed_check_is_exit_code_1():
    code = (
        "import sys, plait.replay.session as s; s.append_kv = lambda *a, **k: None\n"
        "sys.argv = ['plait', *sys.argv[1:]]\nfrom plait.cli import main; main()"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "replay",
            str(DATA / "azure_conv_2000.csv"),
            "--requests",
            "3",
            "--check",
            "1",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "check failed: step 0" in done.stdout, done.stdout + done.stderr


def test_plan_prints_a_table_and_json():
    assert "makespan" in run("plan", "--kv-len", "4096,17,0,300")
    plan = plait.Plan.from_json(run("plan", "--kv-len", "4096,17,0,300", "--json"))
    assert plan.num_requests == 4 and plan.total_keys == 4096 + 17 + 300
    step = plait.Plan.from_json(
        run(
            "plan",
            "--trace",
            DATA / "mooncake_conversation_400.jsonl",
            "--scale",
            "1/32",
            "--step",
            3,
            "--chunk",
            128,
            "--json",
        )
    )
    assert step.num_tokens == 128
    assert "negative" in run("plan", "--kv-len", "5,-1", ok=2)
    assert "either --kv-len or --trace" in run("plan", ok=2)
    assert "1 lengths in --q-len, 2 in --kv-len" in run(
        "plan", "--kv-len", "5,6", "--q-len", "1", ok=2
    )


def test_plan_writes_a_page(tmp_path):
    page = tmp_path / "plan.html"
    assert "makespan" in run("plan", "--kv-len", "4096,17", "--html", page)
    assert "2 requests, 2 query tokens, 4,113 keys" in page.read_text(encoding="utf-8")
    missing = tmp_path / "nowhere" / "plan.html"
    assert "nowhere/plan.html" in run("plan", "--kv-len", "5", "--html", missing, ok=2)


def test_pictures_of_the_docs_are_of_such_plans():
    """docs/scheduler.md: each command still makes the plan that its picture and its text are of."""
    text = (DATA.parent / "docs/scheduler.md").read_text()
    commands = re.findall(r"^plait (plan .*) --html plan\.html$", text, re.M)
    chosen = [re.search(r"\* (\w+)", run(*command.split())).group(1) for command in commands]
    assert chosen == ["equal_shares", "large_then_fill", "with_queue"]


@pytest.mark.parametrize(
    "option, value", [("--step", 0), ("--scale", 3), ("--max-batch", 64), ("--chunk", 9)]
)
def test_plan_refuses_options_of_a_trace_without_one(option, value):
    error = re.sub(r"[\s│]+", " ", run("plan", "--kv-len", "5", option, value, ok=2))
    assert f"{option} goes with --trace" in error


def test_trace_without_requests_is_refused(tmp_path):
    trace = tmp_path / "empty.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert "empty.csv: the trace has no requests" in run("plan", "--trace", trace, ok=2)


def test_doctor():
    out = json.loads(run("doctor", "--json", PLAIT_CXX="/no/compiler"))
    rows = {row["what"]: row for row in out["findings"]}
    assert {"CPU", "CUDA driver", "NVRTC", "host compiler", "cache"} <= rows.keys()
    assert not rows["host compiler"]["found"] and "PLAIT_CXX" in rows["host compiler"]["advice"]
    for row in rows.values():
        assert row["found"] or (row["detail"] and row["advice"]), row
    assert "PLAIT_CACHE_DIR" in {v["name"] for v in out["environment"]}
    assert "to do" in run("doctor")


def test_cache(tmp_path):
    assert run("cache", "path", PLAIT_CACHE_DIR=str(tmp_path)).strip() == str(tmp_path)
    (tmp_path / "mine.txt").write_text("not plait's")
    assert run("cache", "clear", PLAIT_CACHE_DIR=str(tmp_path)).startswith("removed 0 ")
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("which", ["plan", "balance", "overhead"])
def test_bench_rows(which):
    rows = json.loads(run("bench", which, "--json"))
    assert rows and all(set(row) == {"case", "metric", "value", "unit"} for row in rows)
    assert all(row["value"] >= 0 for row in rows)


@pytest.mark.parametrize("arguments, says", [
    (["plan", "--kernel", "plain"], "--kernel goes with prefill,"),
    (["cpu", "--peers", "cudnn"], "--peers goes with prefill,"),
    (["plan", "--case", "p4_4k"], "--case goes with prefill,"),
    (["decode", "--arch", "80"], "--arch goes with compile, tiles, not with decode"),
    (["prefill", "--head-dim", "64"], "--head-dim goes with tiles, not with prefill"),
    (["tiles", "--arch", "80", "--kernel", "plain"], "--kernel goes with prefill,"),
    (["tiles", "--arch", "80", "--device", "cuda"], "one of --arch and --device"),
    (["prefill", "--list", "--seconds", "2"], "--list measures nothing"),
    (["prefill", "--seconds", "0"], "--seconds is 0.0; it must be > 0"),
])
def test_bench_refuses_options_that_do_nothing(arguments, says):
    assert says in re.sub(r"[\s│]+", " ", run("bench", *arguments, ok=2))


def test_bench_refuses_unknown_cases_and_peers():
    assert "'p4_4' is no case of decode" in run("bench", "decode", "--case", "p4_4", "--list", ok=2)
    error = run("bench", "decode", "--peers", "fa4", ok=2)
    assert "'fa4' is no peer" in error and "flashinfer-fa3" in error


def test_bench_lists_its_cases():
    rows = json.loads(run("bench", "gpu", "--list", "--json"))
    assert {row["case"] for row in rows} > {"p4_4k", "d64_4k_page16", "spec32_8_4k_mask"}
    rows = json.loads(run("bench", "variants", "--case", "d64_4k_rope", "--list", "--json"))
    assert [row["case"] for row in rows] == ["d64_4k_page16", "d64_4k_rope"]  # with its yardstick


def test_bench_tiles_refuses_what_has_no_tiles():
    pytest.importorskip("nvidia")
    assert "the sm80 template is for 80, 86" in run("bench", "tiles", "--arch", "75", ok=2)
    assert "head_dim is 12" in run("bench", "tiles", "--arch", "80", "--head-dim", "12", ok=2)


def test_compile_refuses_unknown_architectures():
    pytest.importorskip("nvidia")
    error = run("compile", "--arch", "sm_1", ok=2)
    assert "90a" in error and error.startswith("plait: ")
