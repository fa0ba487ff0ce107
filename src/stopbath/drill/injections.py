"""Faults: the acts that bring them about."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopbath.drill.faces import get, post
from stopbath.drill.scene import Scene, pause
from stopbath.lifecycle import ProcessRef
from stopbath.lifecycle._containment import freezer_v1
from stopbath.lifecycle._process import tree_of

if TYPE_CHECKING:
    from stopbath.drill.scenario import Act

__all__: list[str] = []

GAP_S = 0.03  # between two deaths; the promise is about 20 ms and more


def nothing(_scene: Scene) -> None:
    """The fault is a habit of what was set up."""


def kill(*names: str, number: int = signal.SIGKILL, gap_s: float = GAP_S) -> Act:
    """Signal one after another, `gap_s` apart; 0 means in the same instant."""

    def inject(scene: Scene) -> None:
        refs = [scene.aim(name) for name in names]
        if not gap_s:
            for ref in refs:  # none of them runs between the signals
                ref.send(signal.SIGSTOP)
        for i, ref in enumerate(refs):
            if i and gap_s:
                pause(gap_s)
            scene.hit_at = time.monotonic()
            ref.send(number)

    return inject


def await_told(who: str) -> Act:
    """Wait until the fault that was set up begins; it may be seconds into a start."""

    def inject(scene: Scene) -> None:
        if not scene.control:
            scene.hear(who)

    return inject


def heard(who: str) -> Act:
    """Wait until this is told, in a control too."""

    def wait(scene: Scene) -> None:
        scene.hear(who)

    return wait


def kill_in_turns(name: str, turns: int) -> Act:
    """Kill a rank, and whoever takes its place, so many times in all."""

    def inject(scene: Scene) -> None:
        scene.notes["killed"] = False
        for turn in range(turns):
            ref = scene.aim(name)
            ref.send(signal.SIGKILL)
            if not scene.shows(scene.ref(name).dead):
                return
            if turn < turns - 1:
                scene.refs.pop(name).close()
                scene.until(lambda: get(scene, "/health/ready")[0] == 200, 10)  # noqa: PLR2004
                scene.forget(ref.pid)
                scene.ref(name)
        scene.notes["killed"] = True

    return inject


def timed_kill(name: str) -> Act:
    """Kill somebody, and take the time."""

    def inject(scene: Scene) -> None:
        ref = scene.aim(name)
        scene.notes["killed at"] = time.monotonic()
        ref.send(signal.SIGKILL)

    return inject


def send_to(name: str, number: int) -> Act:
    """Signal one process of the run, as part of asking for its end."""

    def then(scene: Scene) -> None:
        scene.hit_at = time.monotonic()
        scene.ref(name).send(number)

    return then


def kill_below(name: str, number: int = signal.SIGKILL) -> Act:
    """Signal the only child of a process: the PID 1 that `unshare` waits for."""

    def inject(scene: Scene) -> None:
        child = tree_of(scene.ref(name).pid)[0]
        scene.refs.setdefault("below", ProcessRef.open(child))
        scene.hit_at = time.monotonic()
        scene.aim("below").send(number)

    return inject


def stop(*names: str) -> Act:
    """Stop processes as a debugger does."""
    return kill(*names, number=signal.SIGSTOP, gap_s=0.001)


def stop_for(seconds: float, *names: str) -> Act:
    """Stop processes for a while: time itself is the fault."""

    def inject(scene: Scene) -> None:
        refs = [scene.aim(name) for name in names]
        for ref in refs:
            ref.send(signal.SIGSTOP)
        scene.notes["stopped"] = scene.until(
            lambda: all(scene.state_of(name) == "T" for name in names), scene.patience_s
        )
        if scene.notes["stopped"]:
            pause(seconds)
        for ref in refs:
            ref.send(signal.SIGCONT)

    return inject


def freeze(name: str) -> Act:
    """Make a process unkillable: the freezer of cgroup v1 holds it, SIGKILL or not."""

    def inject(scene: Scene) -> None:
        ref = scene.aim(name)
        home = Path(freezer_v1() or "/nowhere")
        cgroup = home / f"stopbath-drill-{scene.place.cookie}"
        cgroup.mkdir()

        def thaw() -> None:
            (cgroup / "freezer.state").write_text("THAWED")
            scene.until(ref.dead, 3)
            scene.until(lambda: _removed(home, cgroup), 3)

        scene.deferred.callback(thaw)
        (cgroup / "cgroup.procs").write_text(str(ref.pid))
        (cgroup / "freezer.state").write_text("FROZEN")
        scene.until(lambda: "FROZEN" in (cgroup / "freezer.state").read_text().split(), 3)

    return inject


def _removed(home: Path, cgroup: Path) -> bool:
    for word in (cgroup / "cgroup.procs").read_text().split():
        try:
            (home / "cgroup.procs").write_text(word)
        except OSError:
            continue  # has ended meanwhile
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True


def signals(numbers: tuple[int, ...], *, name: str = "front", gap_s: float = 0.0) -> Act:
    """Send signals one after another."""

    def inject(scene: Scene) -> None:
        ref = scene.aim(name)
        for i, number in enumerate(numbers):
            if i and gap_s:
                pause(gap_s)
            scene.hit_at = time.monotonic()
            ref.send(number)

    return inject


def at_random(numbers: tuple[int, ...], longest_s: float, name: str = "front") -> Act:
    """Send signals at an instant that the seed chooses."""

    def inject(scene: Scene) -> None:
        pause(scene.rng.uniform(0.0, longest_s))
        signals(numbers, name=name)(scene)

    return inject


def request(prompt: str, steps: int = 4, *, harmless: str = "a seven") -> Act:
    """Have a rank work on something; the client does not wait."""

    def inject(scene: Scene) -> None:
        asked = harmless if scene.control else prompt
        scene.notes["request"] = post(scene, asked, steps)
        scene.notes["prompt"] = asked
        scene.hear("generating")

    return inject


def both(*acts: Act) -> Act:
    """Do one thing after another."""

    def inject(scene: Scene) -> None:
        for one in acts:
            one(scene)

    return inject


def innocent(argv: tuple[str, ...] = ("sleep", "600"), **options: Any) -> Act:
    """Have a bystander live beside the run that only its identity tells from it."""

    def setup(scene: Scene) -> None:
        scene.notes["bystander"] = scene.prop(argv, **options)

    return setup


def unless_control(setup: Act, harmless: Act) -> Act:
    """Set the one, or in a control the other: the fault is in how the run is set."""

    def choose(scene: Scene) -> None:
        (harmless if scene.control else setup)(scene)

    return choose


def delete(scene: Scene, path: str) -> int:
    """Send a DELETE; gives the status."""
    connection = http.client.HTTPConnection("127.0.0.1", scene.notes["port"], timeout=5)
    connection.request("DELETE", path)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def false_record(scene: Scene) -> None:
    """Leave the record of a dead run that names the bystander's pid with another start time."""
    ref: ProcessRef = scene.notes["bystander"]
    (record,) = scene.runtime.rglob("*.run")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    head = next(line for line in lines if line["t"] == "run")
    false = record.with_name("0123456789abcdef.run")
    ghost = {"t": "process", "role": "worker", "name": "ghost", "pid": ref.pid}
    facts = [head | {"run_id": "0123456789abcdef"}, ghost | {"start": ref.start - 1}]
    if not scene.control:
        false.write_text("".join(json.dumps(fact) + "\n" for fact in facts))


def next_start(scene: Scene) -> None:
    """Sweep as the next start does by itself, by hand."""
    scene.hit_at = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "stopbath", "sweep", "--yes"],
        env=scene.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    scene.notes["sweep"] = done.returncode, done.stdout + done.stderr


def files_of_a_container(scene: Scene) -> None:
    """Have the runtime directory go as that of a container does: with it, at the end."""
    home = scene.runtime / "stopbath"
    scene.deferred.callback(lambda: shutil.rmtree(home, ignore_errors=True))
