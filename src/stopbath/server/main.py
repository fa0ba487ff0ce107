"""The server process: from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import gc
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from stopbath.config import ServeConfig
from stopbath.engine.fleet import Fleet
from stopbath.errors import UsageError
from stopbath.server.exits import Ending, exit_code
from stopbath.server.life import MARGIN_S, Life
from stopbath.server.listener import CannotListen, listen
from stopbath.server.logs import StderrLines, configure
from stopbath.server.stops import Stops

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.executor.base import Executor
    from stopbath.lifecycle import Supervisor
    from stopbath.server.context import ServerContext

    Build = Callable[[ServerContext, ServeConfig], Executor]

__all__ = ["executors", "main", "multiproc", "run"]

_LAST_LINES_S = 0.5


def main(ctx: ServerContext, config_builtins: dict[str, Any]) -> NoReturn:
    """Serve until the end, then leave with the code that says what the end was."""
    raise SystemExit(run(ctx, config_builtins, executors()))


def run(ctx: ServerContext, config_builtins: dict[str, Any], build: Build) -> int:
    """Serve with the executors that `build` makes; give the exit code.

    It is called once for each replica, and again for each restart, with `replica` in its config.
    """
    lines = StderrLines()
    configure(lines)

    def say(text: str) -> None:
        lines.write(f"stopbath: {text}")

    try:
        return exit_code(_run(ctx, config_builtins, build, say))
    finally:
        lines.close(_LAST_LINES_S)


def _run(
    ctx: ServerContext,
    config_builtins: dict[str, Any],
    build: Build,
    say: Callable[[str], None],
) -> set[Ending]:
    try:
        config = msgspec.convert(config_builtins, ServeConfig).checked()
        # Before anything heavy: a taken port is known in milliseconds.
        listener = listen(config.host, config.port)
    except (UsageError, msgspec.ValidationError) as error:
        say(str(error))
        return {Ending.USAGE}
    except CannotListen as error:
        say(str(error))
        return {Ending.START_FAILED}
    if config.executor == "inproc":
        from stopbath.executor.inproc import WARNING

        say(WARNING)
    with listener:
        try:
            fleet = Fleet(lambda one: build(ctx, one), config, say)
        except Exception:  # noqa: BLE001  (nothing runs yet; all that is owed is the reason)
            say(f"start-up failed\n{traceback.format_exc()}")
            return {Ending.START_FAILED}
        stops = Stops(fleet.kill)
        stops.take_signals(config.terminate_s + config.kill_s)
        ctx.announce_stop_within(config.drain_s + config.terminate_s + config.kill_s + MARGIN_S)
        ctx.on_stop(stops.hear)
        # What is imported stays. A collection over it would hold the interpreter for tens of
        # milliseconds, and with it the notice of a rank's death; leaving is 0.1 s faster, too.
        gc.freeze()
        try:
            life = Life(ctx, config, listener=listener, fleet=fleet, stops=stops, say=say)
            return asyncio.run(life.run())
        except Exception:  # noqa: BLE001  (a bug of ours must not leave the ranks running)
            say(f"unexpected error\n{traceback.format_exc()}")
            fleet.kill()
            return {Ending.ERROR}


def executors(target: str | None = None) -> Build:
    """Give what makes the executors that the config asks for."""
    in_processes = multiproc(target)

    def build(ctx: ServerContext, config: ServeConfig) -> Executor:
        if config.executor == "multiproc":
            return in_processes(ctx, config)
        from stopbath.executor.inproc import InprocExecutor
        from stopbath.executor.multiproc import TARGET

        return InprocExecutor(config, f"replica{config.replica}", target=target or TARGET)

    return build


def multiproc(target: str | None = None) -> Build:
    """Give what makes the executors of a server, which share one supervisor.

    `target` is what a rank runs, "module:function"; by default a rank with its model.
    """
    shared: list[Supervisor] = []

    def build(ctx: ServerContext, config: ServeConfig) -> Executor:
        from stopbath.executor.multiproc import TARGET, MultiprocExecutor

        if not shared:
            supervisor = ctx.supervisor()
            supervisor.start_thread()
            shared.append(supervisor)
        name = f"replica{config.replica}"
        return MultiprocExecutor(config, name, supervisor=shared[0], target=target or TARGET)

    return build
