"""What a rank has been told and has not done yet; filled by the line, emptied by the loop."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from stopbath.lifecycle import Deadline
from stopbath.messages import Call, Cancel, Hold, Resume

if TYPE_CHECKING:
    from stopbath.messages import ToRank

__all__ = ["Inbox"]


class Inbox:
    """Calls in the order they came, and what is known of them. Safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._open: dict[int, Deadline] = {}  # queued or running
        self._cancelled: set[int] = set()  # a subset of those
        self._held: set[int] = set()  # too
        self._news = False  # of a call that is open, since the last `take`
        self._stopping = False
        self.ended: str | None = None
        """Why nothing more can come, once it cannot."""

    def put(self, message: ToRank) -> None:
        """Take in one message. The cancel of an unknown or finished call is dropped."""
        with self._changed:
            if isinstance(message, Call):
                left = (
                    Deadline.never() if message.left_s is None else Deadline.after(message.left_s)
                )
                self._calls.append(message)
                self._open[message.id] = left
            elif isinstance(message, Cancel | Hold | Resume) and message.id in self._open:
                if isinstance(message, Cancel):
                    self._cancelled.add(message.id)
                elif isinstance(message, Hold):
                    self._held.add(message.id)
                else:
                    self._held.discard(message.id)
                self._news = True

    def end(self, why: str) -> None:
        """Note that the server is gone or not understood; the first reason stays."""
        with self._changed:
            self.ended = self.ended or why
            self._changed.notify_all()

    def stop(self) -> None:
        """Note that the rank is asked to leave once it has finished what it accepted."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def has_work(self, *, news: bool) -> bool:
        """Whether the loop has something to do: a call, a stop, the end.

        With `news` also when a call that is open is cancelled, put on hold or taken up.
        """
        there = bool(self._calls) or self._stopping or self.ended is not None
        return there or (news and self._news)

    def next(self) -> Call | None:
        """Give the next call, if there is one and somebody to answer it to."""
        with self._changed:
            return self._calls.popleft() if self._calls and self.ended is None else None

    def take(self) -> list[Call]:
        """Give every call that has come, if there is somebody to answer them to."""
        with self._changed:
            self._news = False
            calls = [] if self.ended else list(self._calls)
            self._calls.clear()
            return calls

    def wait_over(self, by: Deadline) -> bool:
        """Wait until a stop or the channel's end; whether it came by `by`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping or bool(self.ended), by.left_s())

    @property
    def leaving(self) -> bool:
        """Whether no call should come any more."""
        return self._stopping or self.ended is not None

    @property
    def held(self) -> frozenset[int]:
        """The calls on hold."""
        with self._changed:
            return frozenset(self._held)

    def given_up(self, call_id: int) -> bool:
        """Whether nobody wants the call any more: cancelled, too late, or no server."""
        deadline = self._open.get(call_id)
        return (
            self.ended is not None
            or call_id in self._cancelled
            or (deadline is not None and deadline.passed)
        )

    def done(self, call_id: int) -> None:
        """Forget a call."""
        with self._changed:
            self._open.pop(call_id, None)
            self._cancelled.discard(call_id)
            self._held.discard(call_id)
