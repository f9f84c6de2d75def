"""The command line `plait`: replay, doctor, plan, compile, cache, bench, tune. A file a command."""

import sys

import typer

from plait.cli import bench, cache, compile_kernels, doctor, plan, replay, tune

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention for LLM serving: replays, plans, kernels, measurements.",
)
app.command("replay")(replay.replay_command)
app.command("doctor")(doctor.doctor_command)
app.command("plan")(plan.plan_command)
app.command("compile")(compile_kernels.compile_command)
app.add_typer(cache.app, name="cache")
app.command("bench")(bench.bench_command)
app.command("tune")(tune.tune_command)


def main():
    """Entry point. A mistake of the caller, or a lack of the machine: one line, exit code 2."""
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"plait: {error}", file=sys.stderr)
        sys.exit(2)
