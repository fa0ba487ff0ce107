"""What a scenario is: data, and a few small functions that play it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.drill.scene import Scene

    Act = Callable[[Scene], None]
    Check = Callable[[Scene], str]
    """Gives what is wrong, in words; empty when all is well."""
    Need = Callable[[], str]
    """Gives why a scenario cannot be played on this host; empty when it can."""

__all__ = ["FACES", "Absent", "Face", "Result", "Scenario", "State"]

Face = Literal["library", "run", "serve"]
FACES: tuple[Face, ...] = ("library", "run", "serve")

State = Literal["ok", "late", "left", "unverified", "wrong", "broken", "absent"]


def _real() -> str:
    """Nothing is simulated."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One fault on one face.

    `bound_s` is how long after the fault (or after the stop that `then` asks for) everything must
    be as it was before. `injection` names the way the fault is made: there is one control for
    each on each face. `expect` is what must be true beyond that, checked at the end. `survivor`
    may be alive at the bound: it is unkillable until the scene lets it go. `swept` says that both
    holders of the run's record are killed: the record (a file, perhaps an empty cgroup) is then
    for the next start to remove, and that is played too. `simulated` says why a simulated device
    stands in for a real one, if it does.
    """

    id: str
    face: Face
    title: str
    injection: str
    bound_s: float
    setup: Act
    inject: Act
    verify: Check
    then: Act | None = None
    expect: tuple[Check, ...] = ()
    needs: tuple[Need, ...] = ()
    simulated: Need = _real
    survivor: str = ""
    swept: bool = False

    @property
    def kind(self) -> str:
        """The row of the fault matrix: F01 to F38."""
        return self.id[:3]

    def why_not(self) -> str:
        """Say why it cannot be played here; empty when it can."""
        return next((why for need in self.needs if (why := need())), "")


class Absent(NamedTuple):
    """A kind of fault that a face does not have, and why."""

    kind: str
    face: Face
    reason: str


class Result(NamedTuple):
    """What came of one scenario. `left` names what is there and was not before, by column.

    `simulated` says why no real device was used, where a simulated one stood in for it.
    """

    id: str
    face: str
    title: str
    bound_s: float
    control: bool
    state: State
    took_s: float | None = None
    left: dict[str, list[str]] = {}  # noqa: RUF012  (never written to)
    problems: tuple[str, ...] = ()
    simulated: str = ""

    @property
    def good(self) -> bool:
        """Whether it is as it should be; a control should not verify."""
        return self.state in ({"unverified"} if self.control else {"ok", "absent"})

    def to_dict(self) -> dict[str, Any]:
        """Give JSON-able data."""
        return self._asdict() | {"problems": list(self.problems), "good": self.good}
