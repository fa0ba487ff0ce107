"""The server process on a thread of the test, over replicas without processes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from fake_server import PATIENCE_S
from stopbath.config import ServeConfig
from stopbath.lifecycle import Action, StopNotice
from stopbath.server import main as server_main

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_executor import FakeExecutor

PATH = "/v1/images/generations"


@dataclass
class FakeContext:
    """The guardian's side of the control channel."""

    guardian_pid: int | None = 11
    keeper_pid: int = 12
    url: str = ""
    is_ready: threading.Event = field(default_factory=threading.Event)
    reports: list[dict[str, Any]] = field(default_factory=list)
    budget_s: float = 0.0
    callbacks: list[Callable[[StopNotice], None]] = field(default_factory=list)
    listening: threading.Event = field(default_factory=threading.Event)

    def supervisor(self) -> Any:
        """Never asked here: the executor is given."""
        raise AssertionError

    def ready(self, info: Any = None) -> None:
        """Note it."""
        self.url = info["url"]
        self.is_ready.set()

    def on_stop(self, callback: Callable[[StopNotice], None]) -> None:
        """Note whom to call."""
        self.callbacks.append(callback)
        self.listening.set()

    def announce_stop_within(self, seconds: float) -> None:
        """Note it."""
        self.budget_s = seconds

    def send_report(self, report: dict[str, Any]) -> None:
        """Note it."""
        self.reports.append(report)

    def stop(self, action: Action, within_s: float = 30.0) -> None:
        """Send a stage, as the control thread does."""
        assert self.listening.wait(PATIENCE_S)
        for callback in self.callbacks:
            callback(StopNotice(action, within_s))


class Running:
    """`run` on a thread, with its exit code at the end."""

    def __init__(self, *executors: FakeExecutor, **config: Any) -> None:
        self.ctx, self.executor = FakeContext(), executors[0]
        self.code: int | None = None
        builtins = msgspec.to_builtins(ServeConfig(**{"port": 0, **config}))
        left = {
            name: [e for e in executors if e.name == name] for name in {e.name for e in executors}
        }

        def build(_ctx: object, config: ServeConfig) -> Any:
            """Give the next incarnation of a replica."""
            return left[f"replica{config.replica}"].pop(0)

        def work() -> None:
            self.code = server_main.run(self.ctx, builtins, build)

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def wait_ready(self) -> httpx.Client:
        """Let the ranks be ready; give a client."""
        self.executor.loaded.set()
        assert self.ctx.is_ready.wait(PATIENCE_S), "never ready"
        return httpx.Client(base_url=self.ctx.url, timeout=PATIENCE_S)

    def wait_end(self) -> int | None:
        """Give the exit code."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the server does not end"
        return self.code


def in_background(work: Callable[[], httpx.Response]) -> Callable[[], httpx.Response]:
    """Run a request on a thread; give what waits for its answer."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()

    def wait() -> httpx.Response:
        thread.join(PATIENCE_S)
        return answers[0]

    return wait
