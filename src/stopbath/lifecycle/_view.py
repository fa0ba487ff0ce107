"""A worker as users of a group see it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stopbath.lifecycle._errors import Exit
    from stopbath.lifecycle._member import Member
    from stopbath.lifecycle._state import WorkerState

__all__ = ["WorkerView"]


class WorkerView:
    """A worker as others see it; reads state, asks nobody."""

    __slots__ = ("_member",)

    def __init__(self, member: Member) -> None:
        self._member = member

    @property
    def name(self) -> str:
        """The worker's name."""
        return self._member.name

    @property
    def rank(self) -> int:
        """Its position in the group."""
        return self._member.rank

    @property
    def pid(self) -> int | None:
        """Its pid once it was spawned; for people to read, not to signal."""
        return self._member.pid

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""
        return self._member.state

    @property
    def exit(self) -> Exit | None:
        """How it ended, once it has."""
        return self._member.exit

    @property
    def info(self) -> Any:
        """What it said with its `ready`."""
        return self._member.info

    @property
    def phase(self) -> str:
        """What it said last that it is doing."""
        return self._member.phase

    @property
    def last_progress_s(self) -> float | None:
        """Seconds since it last said something; None before it was asked for."""
        heard = self._member.heard_at
        return time.monotonic() - heard if heard else None

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The JSON objects it handed on with `ctx.send_report`."""
        return list(self._member.reports)

    def __repr__(self) -> str:
        return f"<worker {self.name} pid {self.pid} {self.state.value}>"
