"""`stopbath serve`: check what was asked for, then become the guardian."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from stopbath.cli.launch import become_guardian, ledger_command
from stopbath.config import BUNDLED, ExecutorKind, Mode, OnEngineDeath, Parallel, ServeConfig
from stopbath.errors import UsageError

__all__ = ["serve"]

_OUTER_S = 1.0  # what the guardian waits beyond the server's own time for a stop


def serve(
    model: Annotated[
        str, typer.Argument(help="A diffusers checkpoint on disk; by default the bundled model.")
    ] = BUNDLED,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    ranks: Annotated[int, typer.Option(help="Worker processes that serve one replica.")] = 1,
    replicas: Annotated[int, typer.Option(help="Copies of the model, each on its own ranks.")] = 1,
    parallel: Annotated[
        Parallel | None,
        typer.Option(
            help="Ranks share guidance's halves (cfg, default for 2) or tokens (ulysses)."
        ),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="One request at a time, or steps of several requests in batches.")
    ] = "request",
    max_batch: Annotated[int, typer.Option(help="Pictures in a batch of step mode.")] = 16,
    compile_: Annotated[
        bool,
        typer.Option("--compile", help="Compile the denoiser: seconds at the start, faster steps."),
    ] = False,
    zygote: Annotated[
        bool | None,
        typer.Option(
            help="Fork ranks off a process that has imported torch once; "
            "by default where there are several, or restarts."
        ),
    ] = None,
    executor: Annotated[
        ExecutorKind,
        typer.Option(help="Ranks as processes, or as threads of the server for debugging."),
    ] = "multiproc",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    drain: Annotated[float, typer.Option(help="Seconds to finish what was accepted.")] = 5.0,
    terminate: Annotated[float, typer.Option(help="Seconds between SIGTERM and SIGKILL.")] = 2.0,
    kill: Annotated[float, typer.Option(help="Seconds to wait after SIGKILL.")] = 2.0,
    start: Annotated[
        float, typer.Option(help="Seconds a starting rank may go without progress.")
    ] = 600.0,
    on_engine_death: Annotated[
        OnEngineDeath,
        typer.Option(help="Leave with 4, stay up and answer 503, or restart what was lost."),
    ] = "exit",
    max_restarts: Annotated[
        int, typer.Option(help="Restarts of a replica in a row, before it is given up.")
    ] = 3,
    restart_window: Annotated[
        float, typer.Option(help="Seconds of service after which that row begins anew.")
    ] = 60.0,
    retry_on_death: Annotated[
        bool,
        typer.Option(
            "--retry-on-death", help="Begin requests of a lost replica anew on another, once."
        ),
    ] = False,
    step_budget: Annotated[
        float, typer.Option(help="Seconds without a step after which a rank counts as stuck.")
    ] = 120.0,
    report: Annotated[Path | None, typer.Option(help="Where to write the stop's report.")] = None,
    api_key: Annotated[str, typer.Option(help="Ask clients for this bearer token.")] = "",
    served_name: Annotated[str, typer.Option(help="The model's name in /v1/models.")] = "",
    worker_extension: Annotated[
        str, typer.Option(help="MODULE:FUNCTION called in every rank before it is ready.")
    ] = "",
    ledger: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(help="Compare device memory before and after; auto: where there is any."),
    ] = "auto",
    queue_limit: Annotated[int, typer.Option(help="Requests that may wait.")] = 64,
) -> None:
    """Serve a diffusion model over the OpenAI images API."""
    for package in ("torch", "diffusers", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"serving needs {package}: pip install 'stopbath[serve]'")
    config = ServeConfig(
        model=_checked_model(model),
        served_name=served_name,
        host=host,
        port=port,
        ranks=ranks,
        replicas=replicas,
        parallel=parallel or ("cfg" if ranks == 2 else "none"),  # noqa: PLR2004
        mode=mode,
        max_batch=max_batch,
        compile=compile_,
        zygote=_forks(zygote, ranks * replicas, on_engine_death, executor),
        executor=executor,
        device=device,
        drain_s=drain,
        terminate_s=terminate,
        kill_s=kill,
        start_s=start,
        step_budget_s=step_budget,
        on_engine_death=on_engine_death,
        max_restarts=max_restarts,
        restart_window_s=restart_window,
        retry_on_death=retry_on_death,
        api_key=api_key,
        worker_extension=worker_extension,
        queue_limit=queue_limit,
    ).checked()
    become_guardian(
        {
            "kind": "serve",
            "name": "serve",
            "run_id": secrets.token_hex(8),
            "worker": "server",
            "target": "stopbath.server.main:main",
            "args": [msgspec.to_builtins(config)],
            "path": [entry or str(Path.cwd()) for entry in sys.path],
            "graces_s": [
                drain + terminate + kill + _OUTER_S,
                terminate + kill + _OUTER_S,
                kill,
            ],
            "ledger": None if device == "cpu" and ledger == "auto" else ledger_command(ledger),
            "report": None if report is None else str(report.absolute()),
        }
    )


def _forks(
    wanted: bool | None,
    ranks: int,
    on_engine_death: OnEngineDeath,
    executor: ExecutorKind,
) -> bool:
    """Whether ranks are to be forked: a zygote costs 40 MB, and one rank starts as fast without."""
    if executor != "multiproc":
        return False
    return (ranks > 1 or on_engine_death == "restart") if wanted is None else wanted


def _checked_model(model: str) -> str:
    """Give the path the ranks are to load, absolute; `UsageError` when nothing is there."""
    if model == BUNDLED:
        return model
    path = Path(model).expanduser()
    if not path.is_dir():
        raise UsageError(f"no model at {model}: give a folder with a model_index.json")
    if not (path / "model_index.json").is_file():
        raise UsageError(f"{model} is no diffusers checkpoint: it has no model_index.json")
    return str(path.resolve())
