"""Programs that no one here wrote, as they are started in the field, and how one sees them up."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from wrapped import Wrapped, free_port

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PROGRAMS", "Place", "Program"]

HERE = Path(__file__).parent
# Beside this interpreter first: the environment of `make`, wherever the shell is.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


class Place:
    """A folder and a port for one start."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.socket = folder / "socket"
        self._short: list[Path] = []

    def short(self) -> Path:
        """Give a folder with a short name: some programs put sockets deep below it."""
        self._short.append(Path(tempfile.mkdtemp(prefix="sb", dir="/tmp")))
        return self._short[-1]

    def clear(self) -> None:
        """Remove what is not below the test's own folder."""
        for path in self._short:
            shutil.rmtree(path, ignore_errors=True)

    def written(self, name: str, text: str) -> str:
        """Write a file of configuration."""
        path = self.folder / name
        path.write_text(text)
        return str(path)


def _answers(address: tuple[str, int] | str, family: int = socket.AF_INET) -> bool:
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.settimeout(1)
        probe.connect(address)
        return True
    return False


def _on_port(_: Wrapped, place: Place) -> bool:
    return _answers(("127.0.0.1", place.port))


def _on_socket(_: Wrapped, place: Place) -> bool:
    return _answers(str(place.socket), socket.AF_UNIX)


def _said(word: str, times: int = 1) -> Callable[[Wrapped, Place], bool]:
    def said(run: Wrapped, _: Place) -> bool:
        text = run.out.read_text(errors="replace") + run.err.read_text(errors="replace")
        return text.count(word) >= times

    return said


@dataclass(frozen=True)
class Program:
    """One program: what it needs, how it is started, when it is up, how many processes it is."""

    name: str
    needs: str
    package: str
    command: Callable[[Place], list[str]]
    up: Callable[[Wrapped, Place], bool]
    processes: int
    sockets: int = 0  # files of sockets that it binds, at least
    start_s: float = 30
    env: dict[str, str] = field(default_factory=dict)

    def missing(self) -> str:
        """Say what is not installed; empty when nothing is."""
        kind, _, name = self.needs.partition(":")
        there = shutil.which(name, path=PATH) if kind == "bin" else importlib.util.find_spec(name)
        return "" if there else f"{self.name}: {name} is not installed ({self.package})"

    def argv(self, place: Place) -> list[str]:
        """Give the command line, the program by its path."""
        first, *rest = self.command(place)
        return [shutil.which(first, path=PATH) or first, *rest]


def _gunicorn(place: Place) -> list[str]:
    bind = ["--bind", f"127.0.0.1:{place.port}", "--bind", f"unix:{place.socket}"]
    return ["gunicorn", "--chdir", str(HERE), *bind, "--workers", "2", "web:wsgi"]


def _uvicorn(place: Place) -> list[str]:
    where = ["--app-dir", str(HERE), "--port", str(place.port)]
    return ["uvicorn", *where, "--workers", "2", "web:asgi"]


def _torchrun(place: Place) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-port", str(place.port), str(HERE / "reduces.py")),
    ]


def _ray(place: Place) -> list[str]:
    return [
        *("ray", "start", "--head", "--block", "--include-dashboard=false", "--num-cpus=1"),
        *(f"--port={place.port}", f"--temp-dir={place.short()}", "--disable-usage-stats"),
        f"--object-store-memory={80 << 20}",
    ]


def _celery(place: Place) -> list[str]:
    for name in ("in", "out"):
        (place.folder / name).mkdir()
    place.written(
        "work.py",
        f"""
from celery import Celery
app = Celery("work", broker="filesystem://")
app.conf.broker_transport_options = {{
    "data_folder_in": "{place.folder}/in", "data_folder_out": "{place.folder}/in"}}
""",
    )
    where = ["--workdir", str(place.folder), "-A", "work"]
    return ["celery", *where, "worker", "--concurrency", "2", "--loglevel", "INFO"]


def _nginx(place: Place) -> list[str]:
    config = place.written(
        "nginx.conf",
        f"""
worker_processes 2;
{"user root;" if os.geteuid() == 0 else ""}
pid {place.folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {place.folder}/b; proxy_temp_path {place.folder}/p;
    fastcgi_temp_path {place.folder}/f; uwsgi_temp_path {place.folder}/u;
    scgi_temp_path {place.folder}/s;
    server {{ listen 127.0.0.1:{place.port}; listen unix:{place.socket}; return 204; }}
}}
""",
    )
    return ["nginx", "-p", str(place.folder), "-c", config, "-g", "daemon off;"]


def _redis(place: Place) -> list[str]:
    where = ["--port", str(place.port), "--unixsocket", str(place.socket)]
    return ["redis-server", *where, "--save", "", "--dir", str(place.folder)]


def _frames(_: Place) -> list[str]:
    return [sys.executable, "-u", str(HERE / "frames.py")]


def _pipeline(_: Place) -> list[str]:
    return [
        "bash",
        "-c",
        "while sleep 0.02; do date; done | tee >(cat >&2) | grep --line-buffered :",
    ]


PROGRAMS = (
    Program("gunicorn", "bin:gunicorn", "extra system", _gunicorn, _on_socket, 3, 1),
    Program("uvicorn", "bin:uvicorn", "extra serve", _uvicorn, _on_port, 3),
    Program(
        "torchrun", "module:torch", "extra serve", _torchrun, _said("reduced", 2), 3, start_s=90
    ),
    Program("ray", "bin:ray", "PyPI", _ray, _said("Ray runtime started"), 4, 2, start_s=90),
    Program("celery", "bin:celery", "extra system", _celery, _said(" ready."), 3),
    Program("nginx", "bin:nginx", "Debian: nginx-light", _nginx, _on_socket, 3, 1),
    Program("redis", "bin:redis-server", "Debian", _redis, _on_socket, 1, 1),
    Program("ffmpeg", "bin:ffmpeg", "Debian", _frames, _said("frames", 2), 3),
    Program("pipeline", "bin:bash", "Debian", _pipeline, _said(":"), 4),
)
