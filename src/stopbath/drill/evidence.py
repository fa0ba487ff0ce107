"""How a fault is seen to have taken effect: in /proc, in an exit status, in words."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._process import read_stat, tree_of

if TYPE_CHECKING:
    from stopbath.drill.scenario import Check
    from stopbath.drill.scene import Scene

__all__: list[str] = []


def died(*names: str, number: int = signal.SIGKILL) -> Check:
    """Everyone named is dead; of the front process also by which signal."""

    def verify(scene: Scene) -> str:
        for name in names:
            if name == "front" and len(names) == 1:
                scene.shows(lambda: scene.exit_code() is not None)
                if scene.exit_code() != -number:
                    return f"the front process ended with {scene.exit_code()}, not signal {number}"
            elif not scene.shows(scene.ref(name).dead):
                return f"{name} is not dead"
        return ""

    return verify


def in_state(letter: str, *names: str) -> Check:
    """Everyone named is in this state, by /proc."""

    def verify(scene: Scene) -> str:
        for name in names:
            if not scene.shows(lambda name=name: scene.state_of(name) == letter):  # type: ignore[misc]
                return f"{name} is in state {scene.state_of(name) or 'gone'}, not {letter}"
        return ""

    return verify


def deaf(name: str) -> Check:
    """The process ignores SIGTERM, by /proc."""

    def verify(scene: Scene) -> str:
        if scene.shows(lambda: mask(scene.ref(name).pid, "SigIgn") >> (signal.SIGTERM - 1) & 1):
            return ""
        return f"{name} does not ignore SIGTERM"

    return verify


def catches(name: str) -> Check:
    """The process has a handler for SIGTERM, by /proc."""

    def verify(scene: Scene) -> str:
        if scene.shows(lambda: mask(scene.ref(name).pid, "SigCgt") >> (signal.SIGTERM - 1) & 1):
            return ""
        return f"{name} has no handler for SIGTERM"

    return verify


def mask(pid: int, word: str) -> int:
    """Give a signal mask of a process, by /proc; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.partition(f"{word}:")[2].split()[0], 16)


def outside(who: str) -> Check:
    """A descendant lives; a stray also in a session that is none of the run's."""

    def verify(scene: Scene) -> str:
        own = {ref.pid for name, ref in scene.refs.items() if name != "stray"}

        def found() -> bool:
            for fact in scene.told(who):
                stat = read_stat(fact["pid"])
                if stat is not None and stat.state not in "ZX":
                    return who == "helper" or stat.session not in own
            return False

        return "" if scene.shows(found) else f"there is no living {who}"

    return verify


def was_told(who: str, **facts: Any) -> Check:
    """The process at fault has told of it itself."""

    def verify(scene: Scene) -> str:
        def found() -> bool:
            return any(facts.items() <= fact.items() for fact in scene.told(who))

        return "" if scene.shows(found) else f"nobody told {who!r}"

    return verify


def noted(name: str) -> Check:
    """The injection itself has seen its effect."""

    def verify(scene: Scene) -> str:
        return "" if scene.notes.get(name) else f"not {name}"

    return verify


def front_ended(scene: Scene) -> str:
    """The front process has ended although nobody asked for more."""
    ended = scene.until(lambda: scene.exit_code() is not None, 2 * scene.patience_s)
    return "" if ended else "the run goes on"


def broken_stderr(scene: Scene) -> str:
    """The front process's stderr is a pipe that nobody reads."""
    fd = os.open(f"/proc/{scene.ref('front').pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    broken = any(mask & select.POLLERR for _, mask in poll.poll(0))
    os.close(fd)
    return "" if broken else "somebody reads stderr"


def is_pid_1(scene: Scene) -> str:
    """The guardian is PID 1 of a namespace."""
    below = tree_of(scene.ref("front").pid)
    if not below:
        return "nothing runs"
    text = Path(f"/proc/{below[0]}/status").read_text()
    numbers = text.partition("NSpid:")[2].splitlines()[0].split()
    return "" if numbers[1:] == ["1"] else f"the guardian's numbers are {numbers}"


def was_slow(least_s: float) -> Check:
    """The start took at least so long, and succeeded."""

    def verify(scene: Scene) -> str:
        took = float(scene.hear("up")["took"])
        return "" if took >= least_s else f"the start took only {took:.1f} s"

    return verify


def has_false_record(scene: Scene) -> str:
    """The false record is there, and names a pid that lives."""
    for record in scene.runtime.rglob("0123456789abcdef.run"):
        pid = scene.notes["bystander"].pid
        return "" if f'"pid": {pid}' in record.read_text() else "it names somebody else"
    return "there is no false record"
