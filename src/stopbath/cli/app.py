"""The commands, as typer sees them."""

from __future__ import annotations

from typing import Annotated

import typer

import stopbath
from stopbath.cli.doctor import doctor
from stopbath.cli.drill import drill
from stopbath.cli.ps import ps
from stopbath.cli.run import run
from stopbath.cli.serve import serve
from stopbath.cli.sweep import sweep

app = typer.Typer(
    name="stopbath",
    help="A diffusion server whose workers always stop.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: it fits 80 columns and imports nothing
    pretty_exceptions_enable=False,
)


@app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def _run(context: typer.Context) -> None:
    """Run any command so that nothing it starts outlives it."""
    run(context.args)  # as a rule parsed before typer is imported; here so that the help has it


for command in (serve, ps, sweep, doctor, drill):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"stopbath {stopbath.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """A diffusion server whose workers always stop."""
