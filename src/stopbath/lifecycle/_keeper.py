"""The keeper's process, from its start to its end: the parent of all workers.

One small single-threaded process that never runs user code, in a session of its own, child
subreaper. Run by path with `python -I -S` for a program, forked by the guardian for `serve` and
`run`. What it does meanwhile stands in `_keeper_loop`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

if __name__ == "__main__":  # run by path, without site: let the package be found beside it
    # Last: what lies beside it, a backport called `enum`, must not hide the standard library's.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from stopbath.lifecycle._containment import RunCgroup
from stopbath.lifecycle._keeper_loop import Keeper
from stopbath.lifecycle._process import ProcessRef, become_subreaper
from stopbath.lifecycle._registry import Record

TYPE_CHECKING = False  # as `typing` has it, which this process does without
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.lifecycle._last_look import LastLook

__all__ = ["run"]

_NOT_IGNORED = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP),
}


def _own_number(ref: ProcessRef) -> int:
    return ref.pid


def run(
    sock: socket.socket,
    parent: ProcessRef,
    record: Record,
    cgroup: RunCgroup,
    *,
    number: Callable[[ProcessRef], int] = _own_number,
    handed_on: Sequence[int] = (),
    report: str | None = None,
    last_look: LastLook | None = None,
) -> None:
    """Be the keeper of the process that holds the other end of `sock`, until it is gone.

    `number` gives the number by which that process knows another; `handed_on` are descriptors
    for the first command alone; `report` is where the account goes if the guardian cannot give it.

    Returns when nothing is left. The keeper arms no parent-death signal: it would shoot the one
    that has to clean up. SIGTERM and friends are for the guardian; a service manager that sends
    them to every process must not make the keeper leave before what it keeps.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for one in signal.valid_signals() - _NOT_IGNORED:
        signal.signal(one, signal.SIG_IGN)
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_in, False)
    os.set_blocking(wake_out, False)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    become_subreaper()
    me = ProcessRef.open(os.getpid())
    record.note_process("keeper", "keeper", number(me), me.start)
    me.close()
    if handed_on:  # a command is going to be asked for
        cgroup.wait_inside()
    keeper = Keeper(
        sock,
        parent,
        wake_in,
        record,
        cgroup,
        number=number,
        handed_on=handed_on,
        last_look=last_look,
    )
    try:
        keeper.loop()
    except BaseException:
        # A bug here must not leave what this process alone can end.
        sys.excepthook(*sys.exc_info())
        keeper.dismiss_all()
        keeper.loop()
    if report is not None and keeper.abandoned:
        from stopbath.lifecycle._account import abandoned, write_report

        write_report(report, abandoned(record.run_id, keeper.history))
    if last_look is not None:
        last_look.note(record)
    if not cgroup.remove():
        return
    if record.names_leftovers:
        # Here, and as a rule not at all: importing it takes longer than the rest of a stop.
        from stopbath.lifecycle._sweep import remove_recorded

        remove_recorded(record)  # where the guardian is alive, it has done so already
    else:
        record.remove()


def main(argv: list[str]) -> None:
    """Entry of `python -I -S _keeper.py FD RECORD_FD PARENT_PID PARENT_START RUN_ID PATH`.

    RECORD_FD is FD + 1, or -1 when the run has no record.
    """
    fd, record_fd, parent_pid, parent_start = (int(word) for word in argv[:4])
    # What C libraries of the program opened without CLOEXEC.
    os.closerange(max(fd, record_fd) + 1, 1 << 20)
    os.set_inheritable(fd, False)
    if record_fd >= 0:
        os.set_inheritable(record_fd, False)  # a worker that held it would keep a dead run alive
    record = Record(argv[4], argv[5], record_fd)
    sock = socket.socket(fileno=fd)
    cgroup = RunCgroup.create(record)
    try:
        try:
            parent = ProcessRef.open(parent_pid, parent_start)
        except ProcessLookupError:  # gone before we looked; nothing was started yet
            cgroup.remove()
            record.remove()
            return
        run(sock, parent, record, cgroup)
    except OSError:  # no descriptor is left; to remove a directory takes one
        sock.close()
        cgroup.remove()
        raise
    os._exit(0)  # nothing to finalize, and the client waits for this end


if __name__ == "__main__":
    main(sys.argv[1:])
