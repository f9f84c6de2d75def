"""`plait cache path|clear`: the folder of compiled kernels."""

import typer

from plait import _plait

app = typer.Typer(no_args_is_help=True, help="The folder where compiled kernels are kept.")


@app.command("path")
def path_command():
    """Print the folder; exit 1 and say why if none can be written."""
    folder = _plait.cache_dir()
    if not folder:
        typer.echo(f"no cache folder: {_plait.cache_dir_reason()}", err=True)
        raise typer.Exit(1)
    print(folder)


@app.command("clear")
def clear_command():
    """Remove the artefacts that plait keeps there."""
    print(f"removed {_plait.clear_cache()} artefacts from {_plait.cache_dir() or '(no folder)'}")
