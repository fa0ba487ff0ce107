"""Plays many scenarios, a few at a time, each in a process of its own."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopbath.drill.scenario import Result
from stopbath.lifecycle import ProcessRef
from stopbath.lifecycle._process import become_subreaper, children, reap_pid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stopbath.drill.scenario import Scenario

__all__ = ["Turn", "conduct", "turns"]

_LONGEST_S = 60.0  # beyond its bound: starting what is to be hit, on a busy machine


class Turn:
    """One playing of one scenario; owns its process."""

    def __init__(self, scenario: Scenario, seed: str, *, control: bool) -> None:
        self.scenario, self.seed, self.control = scenario, seed, control
        self.result: Result | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._by = 0.0

    def start(self, home: Path) -> None:
        """Start the process that plays it."""
        asked = {
            "id": self.scenario.id,
            "control": self.control,
            "seed": self.seed,
            "folder": tempfile.mkdtemp(dir=home),
        }
        self._by = time.monotonic() + self.scenario.bound_s + _LONGEST_S
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stopbath.drill.stage", json.dumps(asked)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def stdout(self) -> Any:
        """The pipe on which its process speaks."""
        assert self.process is not None  # noqa: S101  (asked only of those that were started)
        return self.process.stdout

    @property
    def overdue(self) -> bool:
        """Whether it has had more time than it can need."""
        return time.monotonic() > self._by

    def hear(self) -> bool:
        """Read what its process says; whether it has ended."""
        data = os.read(self.stdout.fileno(), 65536)
        self._said += data
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            facts = json.loads(line)
            facts["problems"] = tuple(facts["problems"])
            del facts["good"]
            self.result = Result(**facts)
        return not data

    def finish(self) -> Result:
        """Reap its process; one that said nothing was broken."""
        assert self.process is not None  # noqa: S101  (asked only of those that were started)
        if self.overdue and self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        self.stdout.close()
        if self.result is not None and not code:
            return self.result
        it = self.scenario
        why = f"the scenario's own process ended with {code}"
        return Result(it.id, it.face, it.title, it.bound_s, self.control, "broken", problems=(why,))


def turns(
    scenarios: Iterable[Scenario], *, repeat: int, seed: int, controls: bool = True
) -> list[Turn]:
    """Lay out what is to be played: every scenario, then a control of each way to inject."""
    chosen = list(scenarios)
    found = [
        Turn(scenario, f"{seed}:{scenario.id}:{turn}", control=False)
        for turn in range(repeat)
        for scenario in chosen
    ]
    if controls:
        first = {(it.injection, it.face): it for it in reversed(chosen)}
        found += [Turn(it, f"{seed}:{it.id}:control", control=True) for it in first.values()]
    return found


def conduct(
    todo: list[Turn], *, jobs: int, on_result: Callable[[Result], None]
) -> Iterator[Result]:
    """Play everything, `jobs` at a time; gives the results as they come.

    A scenario gives its place to the next at its bound, and looks once more three seconds later.
    """
    become_subreaper()  # what a scenario's process leaves by its own fault is ended here
    home = Path(tempfile.mkdtemp(prefix="stopbath-drill-"))
    queue = list(reversed(todo))
    selector = selectors.DefaultSelector()
    playing: set[Turn] = set()
    try:
        while queue or selector.get_map():
            while queue and len(playing) < jobs:
                turn = queue.pop()
                turn.start(home)
                playing.add(turn)
                selector.register(turn.stdout, selectors.EVENT_READ, turn)
            for key, _ in selector.select(1.0):
                if not key.data.hear():
                    if key.data.result is not None:
                        playing.discard(key.data)  # at its bound
                    continue
                yield _over(selector, playing, key.data, on_result)
            for key in list(selector.get_map().values()):
                if key.data.overdue:
                    yield _over(selector, playing, key.data, on_result)
    finally:
        for key in list(selector.get_map().values()):
            key.data.process.kill()
            key.data.finish()
        selector.close()
        _end_left()
        shutil.rmtree(home, ignore_errors=True)


def _over(
    selector: selectors.BaseSelector,
    playing: set[Turn],
    turn: Turn,
    on_result: Callable[[Result], None],
) -> Result:
    selector.unregister(turn.stdout)
    playing.discard(turn)
    result = turn.finish()
    on_result(result)
    return result


def _end_left() -> None:
    """End what scenarios' processes that were cut short have left."""
    by = time.monotonic() + 2.0
    while (pids := children()) and time.monotonic() < by:
        for pid in pids:
            try:
                ref = ProcessRef.open(pid)
            except ProcessLookupError:
                continue
            ref.send(9)
            ref.dead(wait_s=0.2)
            reap_pid(pid)
            ref.close()
