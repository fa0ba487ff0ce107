"""From a rank's silence to a verdict: ask for stacks, look again, name the one that is stuck."""

from __future__ import annotations

import enum
import math
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from stopbath.executor._silence import Silence

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StuckWatch"]

# What a rank whose interpreter runs needs to write its stacks; then the signal's time.
_ASKED_S: Final = 0.5
_SIGNALLED_S: Final = 0.5


class _Stage(enum.Enum):
    LISTENING = "listening"
    ASKED = "asked for stacks"
    SIGNALLED = "signalled for stacks"
    OVER = "over"


class StuckWatch:
    """Watches the ranks of one replica. Time is given; everything it does is a callback.

    Once a rank is over its budget all ranks are asked for their stacks over the data channel,
    those that do not answer by a signal. A rank that says anything else meanwhile is slow, not
    stuck, and the suspicion is dropped with the last such rank.

    Args:
        ask: Asks all ranks for their stacks; called once per suspicion.
        signal: Signals one rank for its stacks.
        fail: Told the rank that is stuck, and what is wrong with it.
    """

    def __init__(
        self,
        ranks: int,
        budget_s: float,
        *,
        ask: Callable[[], None],
        signal: Callable[[int], None],
        fail: Callable[[int, str], None],
    ) -> None:
        self.silence = Silence(ranks, budget_s)
        self._budget_s = budget_s
        self._lock = threading.Lock()  # what is heard and what is due may be on two threads
        self._heard_s = [0.0] * ranks
        self._ranks = ranks
        self._ask, self._signal, self._fail = ask, signal, fail
        self._stage = _Stage.LISTENING
        self._stage_s = math.inf
        self._suspects: set[int] = set()
        self._answered: set[int] = set()

    @property
    def due_s(self) -> float:
        """Give the monotonic second at which `act` has something to do."""
        if self._stage is _Stage.LISTENING:
            return self.silence.due_s
        return self._stage_s

    def heard(self, rank: int, now: float, answered: int | None = None) -> None:
        """Note a sign of life, and which call the rank answered if it did."""
        self._heard_s[rank] = now
        self.silence.heard(rank, answered)
        if self._stage is _Stage.LISTENING:
            return
        with self._lock:
            self._suspects.discard(rank)
            if not self._suspects and self._stage is not _Stage.OVER:
                self._enter(_Stage.LISTENING, math.inf)

    def dumped(self, rank: int, now: float) -> None:
        """Note that a rank has written its stacks, which is no sign of progress."""
        with self._lock:
            self._answered.add(rank)
            if self._stage is _Stage.ASKED and len(self._answered) == self._ranks:
                self._stage_s = now

    def act(self, now: float) -> None:
        """Do what is due; from one thread."""
        with self._lock:
            if now < self.due_s:
                return
            do = self._next(now)
        do()

    def _next(self, now: float) -> Callable[[], None]:
        """Enter the next stage; give what it begins with, to be done without the lock."""
        if self._stage is _Stage.LISTENING:
            late = self.silence.tick(now)
            if not late:
                return _nothing
            self._suspects, self._answered = set(late), set()
            self._enter(_Stage.ASKED, now + _ASKED_S)
            return self._ask
        if self._stage is _Stage.ASKED and len(self._answered) < self._ranks:
            self._enter(_Stage.SIGNALLED, now + _SIGNALLED_S)
            mute = sorted(set(range(self._ranks)) - self._answered)
            return partial(_each, self._signal, mute)
        self._enter(_Stage.OVER, math.inf)
        return partial(self._fail, *self._verdict())

    def _verdict(self) -> tuple[int, str]:
        """Name one: who does not even answer is what its peers wait for."""
        mute = self._suspects - self._answered
        rank = min(mute or self._suspects, key=lambda each: self._heard_s[each])
        answers = "does not answer" if mute else "its stack is in the log"
        return rank, f"made no progress for {self._budget_s:g} s and {answers}"

    def _enter(self, stage: _Stage, until_s: float) -> None:
        self._stage, self._stage_s = stage, until_s


def _nothing() -> None:
    pass


def _each(do: Callable[[int], None], ranks: list[int]) -> None:
    for rank in ranks:
        do(rank)
