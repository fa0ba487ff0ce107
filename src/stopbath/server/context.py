"""What the server process needs of the worker context it is given; `WorkerContext` has it all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.lifecycle import StopNotice, Supervisor

__all__ = ["ServerContext"]


class ServerContext(Protocol):
    """The server's line to the guardian. Methods are safe from any thread."""

    @property
    def guardian_pid(self) -> int | None:
        """The outermost process."""
        ...

    @property
    def keeper_pid(self) -> int:
        """The parent of all workers."""
        ...

    def supervisor(self) -> Supervisor:
        """Give a supervisor whose workers the keeper starts."""
        ...

    def ready(self, info: Any = None) -> None:
        """Report that requests can be served; once."""
        ...

    def on_stop(self, callback: Callable[[StopNotice], None]) -> None:
        """Hear of every stage of a stop, on the control thread."""
        ...

    def announce_stop_within(self, seconds: float) -> None:
        """Say how long an orderly stop can take."""
        ...

    def send_report(self, report: dict[str, Any]) -> None:
        """Hand the account of the stop to the guardian."""
        ...
