"""The stage of one scenario: what it has started, who is who, and what they have told."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from stopbath.drill.habits import TOLD, read_told
from stopbath.drill.ledger import COOKIE, Ledger, Place, records
from stopbath.lifecycle import ProcessRef
from stopbath.lifecycle._containment import remove_tree
from stopbath.lifecycle._process import read_stat

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Scene", "SetupFailed"]

_PATIENCE_S, _CONTROL_PATIENCE_S, _START_S = 3.0, 0.4, 30.0
_LOOK_S = 0.02


class SetupFailed(Exception):
    """What was to be hit did not even start."""


class Scene:
    """Where one scenario plays. Owns the processes it starts and the references it holds."""

    def __init__(self, folder: Path, cookie: str, rng: random.Random, *, control: bool) -> None:
        self.folder, self.rng, self.control = folder, rng, control
        self.runtime = folder / "runtime"
        self.runtime.mkdir(mode=0o700)
        self.place = Place(cookie, self.runtime, set(), set())
        self.refs: dict[str, ProcessRef] = {}
        self.front: subprocess.Popen[bytes] | None = None
        self.notes: dict[str, Any] = {}
        self.deferred = ExitStack()  # undone before the last look
        self.hit_at = 0.0  # when the last blow fell, or the last end was asked for
        self._past: set[int] = set()
        self.env = {
            **os.environ,  # noqa: TID251  (passed on, not read)
            "XDG_RUNTIME_DIR": str(self.runtime),
            "TMPDIR": str(self.runtime),
            TOLD: str(folder / "told"),
            COOKIE: cookie,
        }

    @property
    def patience_s(self) -> float:
        """How long a fault may take to show."""
        return _CONTROL_PATIENCE_S if self.control else _PATIENCE_S

    # -- waiting

    def until(self, condition: Callable[[], Any], within_s: float) -> Any:
        """Look until `condition` gives something; for what no descriptor tells. None if late."""
        by = time.monotonic() + within_s
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() >= by:
                return None
            pause(_LOOK_S)

    def shows(self, condition: Callable[[], Any]) -> Any:
        """Look until a fault has taken effect."""
        return self.until(condition, self.patience_s)

    # -- processes

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start the process under test; its stdin, where it reads one, is a pipe."""
        stderr = options.pop("stderr", None) or (self.folder / "stderr").open("ab")
        env = self.env | options.pop("env", {})
        self.front = subprocess.Popen(
            list(argv),
            env=env,
            stdin=options.pop("stdin", subprocess.PIPE),
            stdout=options.pop("stdout", subprocess.DEVNULL),
            stderr=stderr,
            start_new_session=options.pop("start_new_session", True),
            **options,
        )
        if not isinstance(stderr, int):
            stderr.close()
        self.place.awaited.add(self.front.pid)
        self.refs["front"] = ProcessRef.open(self.front.pid)
        return self.front

    def prop(self, argv: Sequence[str] = ("sleep", "600"), **options: Any) -> ProcessRef:
        """Start a process of the drill's own, which is no part of the run."""
        env = {k: v for k, v in os.environ.items() if k != COOKIE}  # noqa: TID251
        process = subprocess.Popen(list(argv), env=env, stderr=subprocess.DEVNULL, **options)
        self.place.own.add(process.pid)
        self.place.awaited.add(process.pid)
        ref = ProcessRef.open(process.pid)

        def end() -> None:
            ref.send(9)
            process.wait()
            ref.close()

        self.deferred.callback(end)
        return ref

    def aim(self, name: str) -> ProcessRef:
        """Give whom an injection hits: in a control somebody who has no part in it."""
        if self.control:
            return self.prop()
        return self.ref(name)

    def ref(self, name: str) -> ProcessRef:
        """Give one process of the run by its part."""
        if name not in self.refs:
            self.until(lambda: self.knows(name), _START_S)
        if name not in self.refs:
            raise SetupFailed(f"there is no {name}, only {sorted(self.refs)}")
        return self.refs[name]

    def knows(self, name: str) -> bool:
        """Whether there is, or was, a process with this part by now."""
        self._learn()
        return name in self.refs

    def _learn(self) -> None:
        """Read who is who from the run's own record, and from what the processes have told."""
        for record in records(self.runtime):
            with suppress(OSError):
                for line in record.read_text(errors="replace").splitlines():
                    with suppress(ValueError):
                        self._note(json.loads(line))
        for fact in self.told():
            if "pid" in fact and fact["who"] in {"helper", "stray", "mute"}:
                self._hold(fact["who"], fact["pid"], None)

    def _note(self, line: dict[str, Any]) -> None:
        if line.get("t") == "process":
            own = line["role"] in {"program", "guardian"}
            front = self.front is not None and self.front.pid == line["pid"]
            outer = "front" if front else "guardian"
            name = outer if own else "keeper" if line["role"] == "keeper" else line["name"]
            self._hold(name.rpartition("/")[2], line["pid"], line["start"])

    def _hold(self, name: str, pid: int, start: int | None) -> None:
        if name not in self.refs and pid not in self._past:
            with suppress(ProcessLookupError):
                self.refs[name] = ProcessRef.open(pid, start)

    def forget(self, pid: int) -> None:
        """Take this process for nobody any more: another has its part now."""
        self._past.add(pid)

    def state_of(self, name: str) -> str:
        """Give the state letter of one process; empty when it is gone."""
        found = read_stat(self.ref(name).pid)
        return "" if found is None else found.state

    def exit_code(self, within_s: float = 0.0) -> int | None:
        """Give the front process's exit code, -n for signal n; None while it runs."""
        front = self.front
        if front is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            return front.wait(within_s)
        return None

    # -- what was said

    def told(self, who: str = "") -> list[dict[str, Any]]:
        """Give what the run's processes have told, in order; all of it, or what `who` told."""
        facts = read_told(self.folder / "told")
        return [fact for fact in facts if not who or fact["who"] == who]

    def hear(self, who: str, within_s: float = _START_S) -> dict[str, Any]:
        """Wait for something to be told; `SetupFailed` when the run ends without it."""

        def look() -> dict[str, Any] | None:
            facts = self.told(who)
            return facts[-1] if facts else None

        found = self.until(lambda: look() or self.exit_code() is not None, within_s)
        found = look()
        if found is None:
            raise SetupFailed(f"nobody told {who!r}; stderr: {self.stderr()[-600:]}")
        return found

    def stderr(self) -> str:
        """Give what the front process has written to stderr."""
        path = self.folder / "stderr"
        return path.read_text(errors="replace") if path.exists() else ""

    def ask(self, line: str) -> None:
        """Give the program of the library face a line to obey."""
        if self.front is None or self.front.stdin is None:
            raise SetupFailed("nobody listens")
        with suppress(BrokenPipeError):
            self.front.stdin.write(line.encode() + b"\n")
            self.front.stdin.flush()

    @property
    def report_file(self) -> Path:
        """Where the run is told to write its report."""
        return self.folder / "report.json"

    def report(self) -> dict[str, Any]:
        """Give the account of the stop; empty when there is none."""
        if self.report_file.exists():
            found: dict[str, Any] = json.loads(self.report_file.read_text())
            return found
        told = [fact["report"] for fact in self.told("report") if fact["report"]]
        return told[-1] if told else {}

    # -- the end

    def ledger(self) -> Ledger:
        """Look at everything that could be left."""
        told = self.told("report")
        return Ledger.now(self.place, told[-1]["held"] if told else [])

    def let_go(self) -> None:
        """Close what this scene itself holds, so that its own descriptors are no leftovers."""
        if self.front is not None and self.front.stdin is not None:
            with suppress(OSError):
                self.front.stdin.close()

    def release(self) -> None:
        """Undo what was deferred, and let go of every reference."""
        self.deferred.close()
        for ref in self.refs.values():
            ref.close()

    def end_all(self) -> None:
        """End whatever of this scenario still lives; in passes, as forks race with a look."""
        for _ in range(200):
            ledger = self.ledger()
            if not ledger.processes:
                break
            for pid in ledger.pids():
                with suppress(ProcessLookupError):
                    ref = ProcessRef.open(pid)
                    ref.send(9)
                    ref.close()
            if self.front is not None:
                self.front.poll()
            pause(_LOOK_S)
        for path in self.ledger().cgroups:
            remove_tree(path)


def pause(seconds: float) -> None:
    """Let time pass: between two looks, or where the time itself is the fault."""
    select.poll().poll(seconds * 1000)
