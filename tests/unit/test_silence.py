"""Silence and suspicion, without processes and without a clock."""

from __future__ import annotations

import math

from stopbath.executor._silence import Silence
from stopbath.executor._stuck import StuckWatch

BUDGET_S = 8.0  # a tick of one second


def test_a_rank_is_late_after_its_budget_and_not_before() -> None:
    silence = Silence(2, BUDGET_S)
    silence.owe(1, 100.0)
    late_at = [s for s in range(101, 112) if silence.tick(float(s))]
    assert late_at[0] == 109


def test_a_tick_that_took_long_counts_once() -> None:
    """The server was stopped, or the whole machine: that is no silence of the rank's."""
    silence = Silence(1, BUDGET_S)
    silence.owe(1, 0.0)
    for second in range(1, 8):
        assert silence.tick(float(second)) == []
    assert silence.tick(5000.0) == []
    silence.heard(0)
    assert silence.tick(5001.0) == []


def test_a_sign_of_life_begins_the_budget_anew_for_that_rank() -> None:
    silence = Silence(2, BUDGET_S)
    silence.owe(1, 0.0)
    late: list[int] = []
    for second in range(1, 10):
        silence.heard(0)
        late = silence.tick(float(second))
    assert late == [1]


def test_nothing_ticks_while_nobody_owes_anything() -> None:
    """No wake-up when idle, and old silence is forgotten with the debt."""
    silence = Silence(1, BUDGET_S)
    assert silence.due_s == math.inf
    silence.owe(1, 0.0)
    assert silence.due_s == 1.0
    for second in range(1, 8):
        silence.tick(float(second))
    silence.heard(0, 1)
    assert silence.due_s == math.inf
    assert silence.tick(1000.0) == []
    silence.owe(2, 1000.0)
    assert silence.due_s == 1001.0
    assert not any(silence.tick(1000.0 + second) for second in range(1, 9))
    assert silence.tick(1009.0) == [0]


class Watched:
    """A watch over two ranks that owe a call since 0, and what it did."""

    def __init__(self) -> None:
        self.did: list[object] = []
        self.watch = StuckWatch(
            2,
            BUDGET_S,
            ask=lambda: self.did.append("ask"),
            signal=lambda rank: self.did.append(("signal", rank)),
            fail=lambda rank, what: self.did.append((rank, what)),
        )
        self.watch.silence.owe(1, 0.0)

    def until_asked(self) -> float:
        """Let time pass until stacks are asked for; rank 1 was heard later than rank 0."""
        self.watch.heard(0, 0.1)
        self.watch.heard(1, 0.2)
        while not self.did:
            self.watch.act(self.watch.due_s)
        return self.watch.due_s


def test_the_rank_that_does_not_answer_is_named() -> None:
    """Its peers only wait for it, however long they have been silent."""
    it = Watched()
    it.until_asked()
    it.watch.dumped(0, 9.1)
    it.watch.act(it.watch.due_s)
    assert it.did == ["ask", ("signal", 1)]
    it.watch.act(it.watch.due_s)
    assert it.did[2:] == [(1, "made no progress for 8 s and does not answer")]
    assert it.watch.due_s == math.inf


def test_when_all_answer_the_longest_silence_is_named_at_once() -> None:
    it = Watched()
    asked = it.until_asked()
    it.watch.dumped(0, 9.1)
    it.watch.dumped(1, 9.2)
    assert it.watch.due_s == 9.2 < asked
    it.watch.act(9.2)
    assert it.did == ["ask", (0, "made no progress for 8 s and its stack is in the log")]


def test_progress_after_all_drops_the_suspicion() -> None:
    """It was slow. The next suspicion begins from nothing."""
    it = Watched()
    it.until_asked()
    it.watch.dumped(0, 9.1)
    it.watch.heard(0, 9.2)
    assert it.watch.due_s < math.inf
    it.watch.heard(1, 9.3)
    for second in range(10, 18):
        it.watch.act(float(second))
    assert it.did == ["ask"]
    it.watch.act(19.0)
    assert it.did == ["ask", "ask"]
