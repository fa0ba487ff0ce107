"""What must be true after a fault, beyond that nothing is left; and acts that ask for an end."""

from __future__ import annotations

import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from stopbath.drill.faces import answer_of, get
from stopbath.lifecycle._process import read_stat

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.drill.scenario import Act, Check
    from stopbath.drill.scene import Scene
    from stopbath.lifecycle import ProcessRef

__all__: list[str] = []

LATE_S = 0.1


# -- acts that follow a fault


def term(number: int = signal.SIGTERM) -> Act:
    """Ask the whole run to stop, as a service manager or a person does."""

    def then(scene: Scene) -> None:
        scene.hit_at = time.monotonic()
        scene.ref("front").send(number)

    return then


def shutdown(within_s: float | None = None) -> Act:
    """Have the program of the library face stop its group by a deadline, and end."""

    def then(scene: Scene) -> None:
        scene.hit_at = time.monotonic()
        scene.ask("shutdown" if within_s is None else f"shutdown {within_s}")
        scene.let_go()

    return then


def end(scene: Scene) -> None:
    """Have the program of the library face end without a stop."""
    scene.hit_at = time.monotonic()
    scene.let_go()


# -- checks


def exit_code(*codes: int) -> Check:
    """The front process ended with one of these codes; -n means signal n."""

    def check(scene: Scene) -> str:
        found = scene.exit_code(3.0)
        return "" if found in codes else f"exit code {found}, not {' or '.join(map(str, codes))}"

    return check


def ended(name: str, *outcomes: str) -> Check:
    """By the report this worker ended so."""

    def check(scene: Scene) -> str:
        for worker in scene.report().get("workers", []):
            if worker["name"].rpartition("/")[2] == name:
                if worker["outcome"] in outcomes:
                    return ""
                return f"{name} was {worker['outcome']}, not {' or '.join(outcomes)}"
        return f"the report knows no {name}"

    return check


def steps(name: str, *expected: str) -> Check:
    """By the report these steps were done to this worker."""

    def check(scene: Scene) -> str:
        for worker in scene.report().get("workers", []):
            if worker["name"] == name:
                found = tuple(step["step"] for step in worker["steps"])
                return "" if found == expected else f"steps {found}, not {expected}"
        return f"the report knows no {name}"

    return check


def in_time(scene: Scene) -> str:
    """The stop came back by its deadline + 100 ms, measured in the program itself."""
    told = scene.told("stopped")
    if not told:
        return "the stop did not come back"
    late = float(told[-1]["late"])
    return "" if late <= LATE_S else f"the stop was {late:.3f} s past its deadline"


def cause(worker: str, *words: str) -> Check:
    """The first cause names this worker, with these words."""

    def check(scene: Scene) -> str:
        found = scene.report().get("cause")
        if not found:
            return "the report has no cause"
        if found["worker"].rpartition("/")[2] != worker:
            return f"the cause is {found['worker']}, not {worker}"
        text = " ".join([found["what"], *found["last_stderr"]])
        missing = [word for word in words if word not in text]
        return f"the cause lacks {missing}: {text[:200]}" if missing else ""

    return check


def noticed_within(seconds: float) -> Check:
    """The program's callback was called so soon after the hit."""

    def check(scene: Scene) -> str:
        told = scene.told("cause")
        if not told:
            return "the callback was not called"
        took = told[0]["at"] - scene.notes["killed at"]
        return "" if took <= seconds else f"noticed after {took:.3f} s"

    return check


def failed_within(seconds: float, *words: str) -> Check:
    """The start failed so soon, in these words."""

    def check(scene: Scene) -> str:
        told = scene.told("start failed")
        if not told:
            return "the start did not fail"
        missing = [word for word in words if word not in told[0]["text"]]
        if missing:
            return f"the error lacks {missing}: {told[0]['text'][:200]}"
        took = float(told[0]["took"])
        return "" if took <= seconds else f"the start failed only after {took:.1f} s"

    return check


def says(*words: str) -> Check:
    """Stderr of the front process has these words."""

    def check(scene: Scene) -> str:
        missing = [word for word in words if word not in scene.stderr()]
        return f"stderr lacks {missing}" if missing else ""

    return check


def told(who: str, condition: Callable[[dict[str, Any]], bool], what: str) -> Check:
    """The last thing told by `who` is as it should be."""

    def check(scene: Scene) -> str:
        found = scene.told(who)
        return "" if found and condition(found[-1]) else f"{what}: {found[-1:]}"

    return check


def no_problems(scene: Scene) -> str:
    """The act of the host program found nothing wrong."""
    found = scene.told("act")
    if not found:
        return f"the act did not come to its end: {scene.stderr()[-300:]}"
    return "; ".join(found[-1]["problems"])


def not_told(who: str) -> Check:
    """Nobody has told this."""

    def check(scene: Scene) -> str:
        return f"somebody told {who!r}" if scene.told(who) else ""

    return check


def survived(name: str) -> Check:
    """The report names this process as a survivor, with evidence."""

    def check(scene: Scene) -> str:
        pid = scene.ref(name).pid
        for survivor in scene.report().get("survivors", []):
            if survivor["pid"] == pid:
                return "" if survivor["state"] and survivor["evidence"] else "without evidence"
        return f"the report does not name {name} ({pid}) as a survivor"

    return check


def bystander_lives(scene: Scene) -> str:
    """Somebody who only looked like part of the run is unharmed."""
    ref: ProcessRef = scene.notes["bystander"]
    stat = read_stat(ref.pid)
    return "" if stat is not None and stat.start == ref.start and stat.state != "Z" else "killed"


def port_free(scene: Scene) -> str:
    """The server's port can be bound at once."""
    port = scene.notes.get("port") or scene.told("port")[-1]["port"]
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        return f"port {port}: {error.strerror}"
    return ""


def answered(code: str, *words: str, statuses: tuple[int, ...] = (500, 503)) -> Check:
    """The request in flight got one typed error, in these words."""

    def check(scene: Scene) -> str:
        status, body = scene.notes.get("answer") or answer_of(scene.notes["request"])
        error = body.get("error") or {}
        if status not in statuses or error.get("code") != code:
            return f"the request got {status} {error.get('code')}, not {code}"
        missing = [word for word in words if word not in error["message"]]
        return f"the error lacks {missing}: {error['message']}" if missing else ""

    return check


def pictured(scene: Scene) -> str:
    """The request in flight got its picture."""
    status, body = scene.notes.get("answer") or answer_of(scene.notes["request"])
    return "" if status == 200 and body.get("data") else f"the request got {status} {body}"  # noqa: PLR2004


def same_ranks(scene: Scene) -> str:
    """Nobody was restarted or declared dead; asked while the server lives."""
    status, body = scene.notes.get("status") or get(scene, "/v1/status")
    if status != 200:  # noqa: PLR2004
        return f"no status: {status}"
    pids = [rank["pid"] for replica in body["replicas"] for rank in replica["ranks"]]
    restarts = sum(replica.get("restarts", 0) for replica in body["replicas"])
    if scene.ref("rank0").pid not in pids or restarts or body["cause"]:
        return f"the ranks are {pids}, {restarts} restarts, cause {body['cause']}"
    return ""


def ask_status(scene: Scene) -> None:
    """Note what the server says of itself, for `same_ranks`."""
    scene.notes["status"] = get(scene, "/v1/status")


def look(scene: Scene) -> None:
    """Note what the program says of its workers, for `same_workers`."""
    scene.ask("look")
    scene.notes["look"] = scene.hear("look", 5.0)


def same_workers(scene: Scene) -> str:
    """Every worker of the program is ready, in the process it was."""
    workers = scene.notes["look"]["workers"]
    for name, (pid, state) in workers.items():
        if state != "ready" or pid != scene.ref(name).pid:
            return f"{name} is {state} as {pid}"
    return ""
