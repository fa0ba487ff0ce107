"""`stopbath serve` with the bundled model on two ranks: a picture, then every kind of end.

The second regression that this project began with: whatever ends the server, nothing of the run
is alive two seconds later, and the port can be bound at once.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from PIL import Image

from observing import alive, wait_until
from served import Serve
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(90)]

READY_S, GONE_S = 60.0, 2.0


class Running:
    """One `stopbath serve`: its processes, its address, what it said."""

    def __init__(self, folder: Path, *, terminal: bool = False) -> None:
        self._report = folder / "report.json"
        self.master, follower = pty.openpty() if terminal else (-1, subprocess.DEVNULL)
        options = ["--ranks=2", "--port=0", f"--report={self._report}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stopbath", "serve", *options],
            stdin=follower,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # A terminal's signals go to the session that has it for its own.
            preexec_fn=_take_terminal if terminal else None,  # noqa: PLW1509  (two system calls)
        )
        if terminal:
            os.close(follower)
        self.said: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(READY_S), self.said
        self.url = next(line for line in self.said if "ready http" in line).split()[-1]
        self.status: dict[str, Any] = httpx.get(f"{self.url}/v1/status").json()
        ranks = self.status["replicas"][0]["ranks"]
        self.pids = {f"rank{i}": int(rank["pid"]) for i, rank in enumerate(ranks)}
        self.pids |= {who: self.status[f"{who}_pid"] for who in ("guardian", "keeper", "server")}

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.said.append(line.rstrip())
            if "ready http" in line:
                self._ready.set()
        self._ready.set()

    def gone(self) -> int:
        """Wait until nothing is alive and the port is free; gives the exit code."""
        by = Deadline.after(GONE_S)
        wait_until(lambda: not any(map(alive, self.pids.values())), by, f"gone: {self.pids}")
        address = httpx.URL(self.url)
        with socket.create_server((address.host, address.port or 0)):
            pass
        code = self.process.wait(5)
        self._reader.join(5)
        return code

    def report(self) -> dict[str, Any]:
        """Give the account of the stop."""
        told: dict[str, Any] = json.loads(self._report.read_text())
        return told

    def close(self) -> None:
        """Leave nothing, whatever the test found."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(5)
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()
        if self.master >= 0:
            os.close(self.master)


def _take_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def start(**options: bool) -> Running:
        made.append(Running(tmp_path, **options))
        return made[-1]

    yield start
    for running in made:
        running.close()


def test_a_picture_and_ctrl_c_on_a_terminal(serving: Callable[..., Running]) -> None:
    """The official client gets a real PNG; one Ctrl-C drains, counts once, and no rank sees it."""
    running = serving(terminal=True)
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    answer = client.images.generate(
        model="bundled", prompt="a red seven on blue", response_format="b64_json"
    )
    assert answer.data is not None
    picture = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or "")))
    assert (picture.format, picture.size) == ("PNG", (32, 32))
    assert len(picture.getcolors(1024) or ()) > 10, "a picture, not a plain square"
    client.close()
    os.write(running.master, b"\x03")
    assert running.gone() == 0
    report = running.report()
    assert report["clean"]
    assert report["asked_by"] == "SIGINT"
    assert [worker["outcome"] for worker in report["workers"]] == ["drained"] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_for_a_clean_stop(
    serving: Callable[..., Running], number: signal.Signals
) -> None:
    running = serving()
    running.process.send_signal(number)
    assert running.gone() == 0
    assert running.report()["clean"]
    assert running.report()["asked_by"] == number.name


@pytest.mark.parametrize("who", ["server", "rank0", "rank1", "keeper"])
def test_kill_9_of_one_leaves_nothing(serving: Callable[..., Running], who: str) -> None:
    """Exit code 4, and the cause is named."""
    running = serving()
    os.kill(running.pids[who], signal.SIGKILL)
    assert running.gone() == 4
    report = running.report()
    assert not report["clean"]
    told = {"server": "server", "keeper": "keeper"}.get(who, f"replica0/{who}")
    assert told in report["cause"]["message"]
    assert {worker["pid"] for worker in report["workers"]} == {
        running.pids[name] for name in ("server", "rank0", "rank1")
    }


def test_kill_9_of_the_guardian_leaves_nothing(serving: Callable[..., Running]) -> None:
    running = serving()
    os.kill(running.pids["guardian"], signal.SIGKILL)
    assert running.gone() == -signal.SIGKILL
    assert running.report()["cause"]["worker"] == "guardian"


def test_an_exception_in_the_http_layer_stops_everything(tmp_path: Path) -> None:
    """Exit code 1: an unexpected error, and the ranks are stopped in order all the same."""
    served = Serve(tmp_path, target="breaking_http:server", ranks=2, parallel="cfg")
    served.client.get("/health/ready").raise_for_status()
    status = served.status()
    pids = [rank["pid"] for rank in status["replicas"][0]["ranks"]]
    pids += [status[f"{who}_pid"] for who in ("guardian", "keeper", "server")]
    os.kill(status["server_pid"], signal.SIGUSR1)
    wait_until(lambda: not any(map(alive, pids)), Deadline.after(GONE_S), f"gone: {pids}")
    assert served.end() == 1
    assert any("the listener is gone" in line for line in served.lines)
    served.client.close()
    assert served.process.stderr is not None
    served.process.stderr.close()
