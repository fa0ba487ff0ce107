"""One stop in progress: its schedule, what has been applied, and how a later caller shortens it.

Pure: no clock, no process. The group's core asks what is due and does it.
"""

from __future__ import annotations

from stopbath.lifecycle._escalation import Action, Escalation, Schedule, plan

__all__ = ["SETTLE_S", "Stop"]

SETTLE_S = 0.05
"""What SIGKILL always gets to take effect, even past the deadline: half of the tenth of a second
that a stop may take longer. Without it a stop by a deadline that has passed names as survivors
what is dead a millisecond later."""


class Stop:
    """The decisions of one stop; times in monotonic seconds."""

    __slots__ = (
        "_applied_at",
        "_deadline",
        "_escalation",
        "_kill_extra_s",
        "_schedule",
        "applied",
        "asked_by",
        "began",
    )

    def __init__(
        self,
        escalation: Escalation,
        *,
        first: Action,
        now: float,
        deadline: float,
        asked_by: str,
        kill_extra_s: float,
    ) -> None:
        self._escalation, self._kill_extra_s = escalation, kill_extra_s
        self._deadline = deadline
        self.began, self.asked_by = now, asked_by
        self.applied: Action | None = None
        self._applied_at = now
        self._schedule = self._plan(first, now)

    def due(self, now: float) -> Action | None:
        """Give the step that is to be applied now, and note it as applied."""
        action = self._schedule.action_at(now)
        if self.applied is not None and action <= self.applied:
            return None
        self.applied, self._applied_at = action, now
        return action

    def over(self, now: float) -> bool:
        """Whether the last step has had its grace."""
        return now >= self._over_at

    def next_change(self, now: float) -> float:
        """Give the moment at which something is due next."""
        change = self._schedule.next_change(now)
        return self._over_at if change >= self._schedule.over_at else change

    @property
    def _over_at(self) -> float:
        over_at = self._schedule.over_at
        if self.applied is Action.SIGKILL:
            over_at = max(over_at, self._applied_at + SETTLE_S)
        return over_at

    def shorten(self, first: Action, deadline: float, now: float) -> None:
        """Take a later caller's wish: a harsher step now, an earlier end; never the contrary."""
        current = self.applied or Action.DRAIN
        first = max(first, current)
        self._deadline = min(self._deadline, deadline)
        if first > current or self._deadline < self._schedule.over_at:
            spent_s = now - self._applied_at if first is current else 0.0
            self._schedule = self._plan(first, now, spent_s).no_later_than(self._schedule)

    def wait_longer(self, drain_s: float) -> None:
        """One of the processes announced how long its own orderly stop takes: the drain waits."""
        if drain_s > self._escalation.steps[0].grace_s:
            self._escalation = self._escalation.with_drain(drain_s)
            first, begin = self._schedule.begins[0]
            if first is Action.DRAIN and self.applied in {None, Action.DRAIN}:
                self._schedule = self._plan(first, begin)

    def _plan(self, first: Action, now: float, spent_s: float = 0.0) -> Schedule:
        return plan(
            self._escalation,
            first=first,
            now=now,
            deadline=self._deadline,
            spent_s=spent_s,
            kill_extra_s=self._kill_extra_s,
        )
