"""Setting a scene: a program with a group, a wrapped command, a server."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stopbath.lifecycle
from stopbath.drill.scene import Scene, SetupFailed
from stopbath.drill.terminal import on_terminal

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from stopbath.drill.scenario import Act

__all__ = [
    "act",
    "answer_of",
    "await_ready",
    "command",
    "get",
    "library",
    "needs_server",
    "post",
    "server",
    "start_server",
]

GRACES = (0.6, 0.3, 1.0)
_GUARDIAN = Path(stopbath.lifecycle.__file__).parent / "_guardian.py"
_READY = re.compile(r"stopbath: ready http://[^:]+:(\d+)")


def _habits(scene: Scene, names: str) -> list[str]:
    """Give the habits; those behind a `!` are the fault, which a control does without."""
    plain, _, fault = names.partition("!")
    found = [name.strip() for name in plain.split(",")]
    if not scene.control:
        found += [name.strip() for name in fault.split(",")]
    return [name for name in found if name and name != "obedient"]


def library(
    *workers: str,
    graces: tuple[float, ...] = GRACES,
    policy: str = "one_for_all",
    start_s: float = 60.0,
    start_cap_s: float = 120.0,
    wait: str = "up",
    wrapper: Sequence[str] = (),
    stderr: str = "",
) -> Act:
    """Set a program with one worker for each string of habits; wait until it tells `wait`."""

    def setup(scene: Scene) -> None:
        asked = {
            "act": "obey",
            "workers": [_habits(scene, names) for names in workers],
            "graces": graces,
            "policy": policy,
            "start_s": start_s,
            "start_cap_s": start_cap_s,
        }
        _program(scene, asked, wrapper, stderr)
        if wait:
            scene.hear(wait)
        if wait == "up":
            scene.ref("keeper")

    return setup


def act(name: str, *workers: str) -> Act:
    """Set a program that plays an act of `acts`; a control plays it without its odd part."""

    def setup(scene: Scene) -> None:
        asked = {
            "act": name,
            "harmless": scene.control,
            "workers": [_habits(scene, names) for names in workers or ("obedient", "obedient")],
            "graces": GRACES,
            "policy": "one_for_all",
            "start_s": 60.0,
            "start_cap_s": 120.0,
        }
        _program(scene, asked, (), "")

    return setup


def _program(scene: Scene, asked: dict[str, Any], wrapper: Sequence[str], stderr: str) -> None:
    argv = [*wrapper, sys.executable, "-m", "stopbath.drill.program", json.dumps(asked)]
    _start(scene, argv, stderr)


def command(
    habits: str,
    *,
    options: Sequence[str] = (),
    graces: tuple[float, ...] = GRACES,
    wrapper: Sequence[str] = (),
    stderr: str = "",
    argv: Sequence[str] = (),
    wait: bool = True,
    report: str = "",
) -> Act:
    """Set `stopbath run` over a command with these habits, or over `argv`."""

    def setup(scene: Scene) -> None:
        names = [name.replace("@", scene.place.cookie) for name in _habits(scene, habits)]
        inner = list(argv) or [sys.executable, "-m", "stopbath.drill.commands", *names]
        flags = zip(("--drain", "--terminate", "--kill"), map(str, graces), strict=True)
        _start(
            scene,
            [
                *wrapper,
                *(sys.executable, "-m", "stopbath", "run", "--name", "command"),
                *(word for flag in flags for word in flag),
                *("--report", report or str(scene.report_file), *options, "--", *inner),
            ],
            stderr,
        )
        if wait:
            scene.hear("up")

    return setup


def server(
    habits: str = "",
    *,
    ranks: int = 1,
    wrapper: Sequence[str] = (),
    stderr: str = "",
    wait: bool = True,
    report: str = "",
    named: bool = True,
    ledger: bool = False,
    **config: Any,
) -> Act:
    """Set the real server over ranks with these habits."""

    def setup(scene: Scene) -> None:
        start_server(
            scene,
            _habits(scene, habits),
            ranks=ranks,
            wrapper=wrapper,
            stderr=stderr,
            report=report,
            config=config,
            ledger=ledger,
        )
        if wait:
            await_ready(scene, named=named)

    return setup


def start_server(
    scene: Scene,
    habits: Sequence[str],
    *,
    ranks: int,
    wrapper: Sequence[str],
    stderr: str,
    report: str,
    config: dict[str, Any],
    ledger: bool = False,
) -> None:
    """Start guardian, keeper, server and ranks as `stopbath serve` does."""
    graces = dict(zip(("drain_s", "terminate_s", "kill_s"), GRACES, strict=True))
    told: dict[str, Any] = {
        **graces,
        "model": "drill",
        "port": 0,
        "ranks": ranks,
        "parallel": "cfg" if ranks > 1 else "none",
        "worker_extension": ",".join(habits),
        **config,
    }
    drain, terminate, kill = told["drain_s"], told["terminate_s"], told["kill_s"]
    job = {
        "kind": "serve",
        "name": "serve",
        "run_id": secrets.token_hex(8),
        "worker": "server",
        "target": "stopbath.drill.ranks:server",
        "args": [told],
        "path": [entry or str(Path.cwd()) for entry in sys.path],
        "graces_s": [drain + terminate + kill + 1.0, terminate + kill + 1.0, kill],
        "report": report or str(scene.report_file),
        "ledger": [sys.executable, "-P", "-m", "stopbath.devices.look"] if ledger else None,
    }
    fd = os.memfd_create("stopbath-job", 0)
    try:
        os.write(fd, json.dumps(job).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        argv = [*wrapper, sys.executable, "-I", "-S", str(_GUARDIAN), str(fd)]
        _start(scene, argv, stderr, pass_fds=[fd], stdin=-3)
    finally:
        os.close(fd)


def await_ready(scene: Scene, *, named: bool = True) -> None:
    """Wait until the server says so; learn its port and, unless in a namespace, who is who."""

    def said() -> re.Match[str] | None:
        return _READY.search(scene.stderr())

    scene.until(lambda: said() or scene.exit_code() is not None, 30)
    found = said()
    if found is None:
        raise SetupFailed(f"the server did not become ready: {scene.stderr()[-600:]}")
    scene.notes["port"] = int(found[1])
    for name in ("keeper", "server", "rank0") if named else ():
        scene.ref(name)


def needs_server() -> str:
    """Say why no server can be started here."""
    for package in ("fastapi", "uvicorn", "structlog", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            return f"needs the serve extra ({package} is missing)"
    return ""


def _start(
    scene: Scene, argv: Sequence[str], stderr: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Start it; `stderr` may be "closed" (nobody reads it) or "terminal"."""
    if stderr == "closed" and not scene.control:
        read_end, write_end = os.pipe()
        os.close(read_end)
        try:
            return scene.start(argv, stderr=write_end, **options)
        finally:
            os.close(write_end)
    if stderr == "terminal":
        return on_terminal(scene, argv, **options)
    return scene.start(argv, **options)


# -- the server's clients


def get(scene: Scene, path: str) -> tuple[int, dict[str, Any]]:
    """Ask the server; (0, {}) when nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", scene.notes["port"], timeout=5)
    try:
        connection.request("GET", path)
        return answer_of(connection)
    except OSError:
        return 0, {}
    finally:
        connection.close()


def post(scene: Scene, prompt: str = "a seven", steps: int = 4) -> http.client.HTTPConnection:
    """Send a request and do not wait; `answer_of` does."""
    connection = http.client.HTTPConnection("127.0.0.1", scene.notes["port"], timeout=15)
    body = json.dumps({"prompt": prompt, "num_inference_steps": steps})
    connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
    scene.deferred.callback(connection.close)
    return connection


def answer_of(connection: http.client.HTTPConnection) -> tuple[int, dict[str, Any]]:
    """Read an answer; (0, {}) when the connection ended without one."""
    try:
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    except (OSError, ValueError, http.client.HTTPException):
        return 0, {}
