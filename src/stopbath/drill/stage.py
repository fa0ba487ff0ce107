"""One scenario, played in a process of its own: `python -m stopbath.drill.stage JSON`.

The process is a subreaper, so that whatever the run loses comes back to it, at any distance. It
writes two lines: what it found at the bound, and what it found three seconds later.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopbath.drill.catalog import find
from stopbath.drill.injections import next_start
from stopbath.drill.scenario import Result
from stopbath.drill.scene import Scene, SetupFailed, pause
from stopbath.lifecycle._process import become_subreaper

if TYPE_CHECKING:
    from stopbath.drill.ledger import Ledger
    from stopbath.drill.scenario import Scenario, State

__all__ = ["LATER_S", "main"]

LATER_S = 3.0
_LOOK_S, _LONGEST_LOOK_S = 0.005, 0.06
_THAW_S = 3.0
_RECORD = {"files", "cgroups"}


class _Play:
    """A scenario on its scene, from the first look to the last."""

    def __init__(self, scenario: Scenario, scene: Scene) -> None:
        self.scenario, self.scene = scenario, scene
        self.before = scene.ledger()
        self.took_s: float | None = None
        self.left: dict[str, list[str]] = {}

    def run(self) -> Result:
        """Play it up to its bound."""
        scenario, scene = self.scenario, self.scene
        try:
            scenario.setup(scene)
            scene.hit_at = time.monotonic()
            scenario.inject(scene)
        except (SetupFailed, OSError) as error:
            return self._result("broken", f"{type(error).__name__}: {error}")
        why = _checked(scenario.verify, scene)
        if scene.control:
            return self._result("unverified" if why else "wrong", why or "the control verified")
        if scenario.then is not None:
            try:
                scenario.then(scene)
            except (SetupFailed, OSError) as error:
                why = f"{type(error).__name__}: {error}"
        self._await(scene.hit_at)
        problems = [text for check in scenario.expect if (text := _checked(check, scene))]
        if scenario.survivor or scenario.swept:
            if scenario.swept:
                next_start(scene)
            scene.deferred.close()
            self._await_until(time.monotonic() + _THAW_S)
        if self.left:
            return self._result("left", *problems)
        if self.took_s is None:
            return self._result("late", f"the front process did not end; {why}", *problems)
        if why:
            return self._result("unverified", why, *problems)
        return self._result("wrong" if problems else "ok", *problems)

    def _await(self, from_s: float) -> None:
        """Wait until everything is as before, at most until the bound."""
        by = from_s + self.scenario.bound_s
        if self.scenario.survivor:
            if self.scene.exit_code(max(0.0, by - time.monotonic())) is not None:
                self.took_s = time.monotonic() - from_s
            return
        if self._await_until(by):
            self.took_s = time.monotonic() - from_s

    def _await_until(self, by: float) -> bool:
        first = time.monotonic()
        while True:
            began = time.monotonic()
            ended = self.scene.exit_code() is not None
            self.left = self.look().more_than(self.before)
            if not self.left and ended:
                return True
            if began >= by:
                return False
            if ended and self.scenario.swept and not set(self.left) - _RECORD:
                return True
            # Seldom enough not to take the time of what is being watched.
            pause(min(_LONGEST_LOOK_S, _LOOK_S + (began - first) / 4))

    def look(self) -> Ledger:
        """Look at everything that could be left."""
        return self.scene.ledger()

    def _result(self, state: State, *problems: str) -> Result:
        it = self.scenario
        return Result(
            it.id,
            it.face,
            it.title,
            it.bound_s,
            self.scene.control,
            state,
            self.took_s,
            self.left,
            tuple(problems),
            it.simulated(),
        )

    def later(self, result: Result) -> Result:
        """Look once more: what comes back to life counts as left."""
        self.left = self.look().more_than(self.before)
        # What appears only now is somebody else's, as nothing of the run was left to make it.
        if "shared_memory" not in result.left:
            self.left.pop("shared_memory", None)
        if self.left and result.state in {"ok", "late", "wrong"}:
            return result._replace(state="left", left=self.left)
        return result


def _checked(check: Any, scene: Scene) -> str:
    try:
        return str(check(scene))
    except Exception as error:  # noqa: BLE001  (a check that breaks is a finding, not the end)
        return f"{type(error).__name__}: {error}"


def _say(result: Result) -> None:
    sys.stdout.write(json.dumps(result.to_dict()) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> None:
    """Play the scenario named in the JSON; report twice; leave nothing whatever happens."""
    asked = json.loads(argv[0])
    become_subreaper()
    scenario = find(asked["id"])
    scene = Scene(
        Path(asked["folder"]),
        secrets.token_hex(4),
        random.Random(asked["seed"]),  # noqa: S311  (choices that a seed replays)
        control=asked["control"],
    )
    try:
        play = _Play(scenario, scene)
        result = play.run()
        if scene.control or result.state == "broken":
            scene.end_all()
        scene.let_go()
        scene.release()
        _say(result)
        if not scene.control and result.state != "broken":
            pause(LATER_S)
            result = play.later(result)
        _say(result)
    finally:
        scene.deferred.close()
        scene.end_all()


if __name__ == "__main__":
    main(sys.argv[1:])
