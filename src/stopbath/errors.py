"""Errors of the serving layers, each with the code that HTTP clients see."""

from __future__ import annotations

from typing import ClassVar, Literal

from stopbath.usage import UsageError

__all__ = [
    "DeadlinePassed",
    "Draining",
    "EngineError",
    "Overloaded",
    "RequestAborted",
    "RequestDuplicate",
    "RequestInvalid",
    "RequestStuck",
    "Restarting",
    "Starting",
    "UsageError",
    "WorkerLost",
]

Code = Literal["worker_died", "stuck", "draining", "overloaded", "deadline", "starting", "internal"]


class EngineError(Exception):
    """A request ended without a picture for a reason that is not its own."""

    code: ClassVar[Code] = "internal"
    status: ClassVar[int] = 500
    retry_after_s: ClassVar[int | None] = None


class WorkerLost(EngineError):
    """The replica lost a rank; the message names worker and signal."""

    code: ClassVar[Code] = "worker_died"
    status = 503


class RequestStuck(WorkerLost):
    """A rank lived and made no progress within its budget, so the replica was ended."""

    code: ClassVar[Code] = "stuck"


class Restarting(WorkerLost):
    """No replica lives, and one is being restarted."""

    retry_after_s = 5


class Starting(EngineError):
    """The ranks are not ready yet."""

    code = "starting"
    status = 503
    retry_after_s = 5


class Draining(EngineError):
    """The server is stopping and accepts nothing new."""

    code = "draining"
    status = 503
    retry_after_s = 5


class Overloaded(EngineError):
    """The queue is full."""

    code = "overloaded"
    status = 503
    retry_after_s = 1


class DeadlinePassed(EngineError):
    """The request's own deadline, or the drain's, came first."""

    code = "deadline"
    status = 503


class RequestAborted(Exception):
    """The client left or deleted the request; there is nobody to answer."""


class RequestInvalid(ValueError):
    """The request asks for something the model cannot do; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestDuplicate(Exception):
    """A request with this id is being worked on: two answers for one id would be ambiguous."""
