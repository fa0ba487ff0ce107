"""What a rank made of a request, as one answer."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import msgspec

from stopbath.errors import EngineError, RequestAborted, RequestInvalid, WorkerLost
from stopbath.messages import CANCELLED, PEER_LOST, REQUEST_INVALID, GenerationResult

if TYPE_CHECKING:
    from concurrent.futures import Future

    from stopbath.executor.base import RankOutcome

__all__ = ["Answer", "read_outcome"]

Answer = GenerationResult | EngineError | RequestInvalid | RequestAborted


def read_outcome(future: Future[list[RankOutcome]]) -> Answer:
    """Read a call that is over; whatever it holds becomes an answer, nothing is raised."""
    try:
        outcome = future.result(timeout=0)[0]
    except EngineError as error:
        return error
    except (CancelledError, RequestAborted):
        return RequestAborted("the call was given up")
    except Exception as error:  # noqa: BLE001  (a broken executor must still give an answer)
        return EngineError(f"the call failed: {type(error).__name__}: {error}")
    return _read_value(outcome) if outcome.ok else _read_error(outcome)


def _read_value(outcome: RankOutcome) -> Answer:
    try:
        return msgspec.convert(outcome.value, GenerationResult)
    except msgspec.ValidationError as error:
        return EngineError(f"rank {outcome.rank} gave an answer that is not pictures: {error}")


def _read_error(outcome: RankOutcome) -> Answer:
    """Give back the class that the rank raised where its name says whose fault it was."""
    kind, message = outcome.error_kind, outcome.error_message
    if kind == REQUEST_INVALID:
        return RequestInvalid(message)
    if kind == CANCELLED:
        return RequestAborted(message or "the call was given up")
    if kind == PEER_LOST:
        return WorkerLost(message)
    return EngineError(f"rank {outcome.rank}: {kind}: {message}")
