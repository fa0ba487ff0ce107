"""The guardian: the outermost process of `serve` and `run`, from its start to the keeper's.

All outside signals arrive here and only here. It has the outer deadline (a hung server does not
hear anybody), writes the report and gives the exit code. Run by path with `python -I -S`; what
it is to do comes in an anonymous file. It imports what the keeper needs, forks it, and imports
the rest while the keeper makes itself ready.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import signal
import socket
import sys

if __name__ == "__main__":  # run by path, without site: let the package be found beside it
    # Last: what lies beside it, a backport called `enum`, must not hide the standard library's.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from typing import TYPE_CHECKING, Any

from stopbath.lifecycle import _keeper
from stopbath.lifecycle._belongings import Before
from stopbath.lifecycle._containment import RunCgroup
from stopbath.lifecycle._errors import KeeperDied, say
from stopbath.lifecycle._last_look import LastLook
from stopbath.lifecycle._process import (
    STOP_SIGNALS,
    ProcessRef,
    SignalQueue,
    become_subreaper,
    reap,
)
from stopbath.lifecycle._registry import Record

if TYPE_CHECKING:
    from stopbath.lifecycle._spawn import KeeperClient

__all__ = ["main"]

_ONLY_RUN = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)


def _fork_keeper(
    job: dict[str, Any], record: Record, cgroup: RunCgroup
) -> tuple[socket.socket, ProcessRef]:
    """Fork the keeper while this process is still small, single-threaded and owns nothing.

    `OSError` when it cannot be PID 1 of a namespace of its own, as it was asked to be.
    """
    ours, theirs = socket.socketpair()
    failed, fail = os.pipe()
    me = ProcessRef.open(os.getpid())
    isolated = job.get("isolate") == "pid"
    apart: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isolated:
        from stopbath.lifecycle._isolation import PidNamespace

        apart = PidNamespace()
    with apart:
        pid = os.fork()
        if pid == 0:  # never leaves this block
            try:
                ours.close()
                os.close(failed)
                _be_the_keeper(job, theirs, me, fail, record=record, cgroup=cgroup)
            finally:
                os._exit(1)
    theirs.close()
    me.close()
    os.close(fail)
    why = os.read(failed, 200) if isolated else b""
    os.close(failed)
    keeper = ProcessRef.open(pid)
    if why:
        reap(keeper)
        raise OSError(0, why.decode())
    return ours, keeper


def _be_the_keeper(
    job: dict[str, Any],
    sock: socket.socket,
    guardian: ProcessRef,
    fail: int,
    *,
    record: Record,
    cgroup: RunCgroup,
) -> None:
    if not job.get("tty"):
        os.setsid()
    more: dict[str, Any] = {}
    if job["kind"] == "run":
        more["handed_on"] = (0, 1, *job["inherited"])
        more["last_look"] = LastLook(job["before"])
        if job["before"].births >= 0:
            os.close(job["before"].births)  # the guardian's
    if job.get("isolate") == "pid":
        from stopbath.lifecycle._isolation import OwnProc

        try:
            more["number"] = OwnProc().number
        except OSError as error:
            os.write(fail, str(error.strerror).encode())
            return
    os.close(fail)
    _keeper.run(sock, guardian, record, cgroup, report=job["report"], **more)
    os._exit(0)


def _dispositions(job: dict[str, Any]) -> list[int]:
    """Hear what stops us, whatever was ignored at the start; gives what to block and listen to.

    A shell starts background jobs with SIGINT ignored: their command keeps that, but who sends
    SIGINT to us means us. Only an ignored SIGHUP stays one here too: that is nohup.
    """
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    ignored -= {signal.SIGPIPE, signal.SIGXFSZ}  # by this interpreter, not by who started it
    heard = [*STOP_SIGNALS, signal.SIGCHLD]
    if job["kind"] == "run":
        heard += _ONLY_RUN
    if signal.SIGHUP in ignored:
        heard.remove(signal.SIGHUP)
    for number in heard:
        signal.signal(number, signal.SIG_DFL)  # nor Python's own handler of SIGINT
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    job["ignored"] = [int(number) for number in ignored]
    return [int(number) for number in heard]


def main(argv: list[str]) -> None:
    """Entry of `python -I -S _guardian.py FD`, the descriptor of the job."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with os.fdopen(int(argv[0]), "rb") as file:
        job = _read_job(file.read())
    heard = _dispositions(job)
    job["inherited"] = _inherited()
    become_subreaper()
    record = Record.create(job["run_id"], job["kind"], job["name"], job.get("argv", ()))
    cgroup = RunCgroup.create(record)
    if job["kind"] == "run":
        job["before"] = Before.now()
        job["env"] = _environment(job)
    try:
        keeper = _fork_keeper(job, record, cgroup)
    except OSError as error:
        cgroup.remove()
        record.remove()
        isolated = job.get("isolate") == "pid"
        say(
            f"--isolate pid is not possible here: {error.strerror}; it needs CAP_SYS_ADMIN"
            if isolated
            else f"cannot start: {error.strerror}"
        )
        os._exit(125)
    # From here on beside the keeper, which makes itself ready.
    from stopbath.lifecycle._spawn import KeeperClient
    from stopbath.lifecycle._sweep import sweep_at_start

    job["swept"] = [str(run) for run in sweep_at_start()]
    client = KeeperClient(*keeper)
    if job["kind"] == "run":
        _ask_early(job, client)
    from stopbath.lifecycle._guardian_loop import Guardian  # beside the start of the command

    guardian = Guardian(job, client, SignalQueue(heard), record, cgroup)
    os._exit(guardian.run())


def _environment(job: dict[str, Any]) -> dict[str, str]:
    """Give the command's environment: what we were started with, and nothing of Python's own."""
    env = dict(os.environ)  # noqa: TID251  (passed on, not read)
    if job["coerced"]:
        env.pop("LC_CTYPE", None)
    return env


def _ask_early(job: dict[str, Any], client: KeeperClient) -> None:
    """Have the command started before we can look after it: the keeper can, and holds its end."""
    job["asked"] = 0
    if job["tty"] or job["capture"]:  # something has to be set up for it first
        return
    with contextlib.suppress(KeeperDied):  # it is asked again when somebody can say so
        job["asked"] = client.spawn(
            job["worker"],
            job["argv"],
            job["env"],
            {},
            worker=False,
            ignore=job["ignored"],
        )


def _read_job(data: bytes) -> dict[str, Any]:
    """Read what the command line wrote, or the same as JSON.

    Importing `json` would cost the command line 4 ms; here the control sockets need it anyway.
    """
    read: Any = json.loads if data.startswith(b'{"') else marshal.loads
    job: dict[str, Any] = read(data)
    return job


def _inherited() -> list[int]:
    """List the descriptors beyond the usual three that whoever started us hands on."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed again
            if int(name) > 2 and os.get_inheritable(int(name)):  # noqa: PLR2004  (stderr)
                found.append(int(name))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
