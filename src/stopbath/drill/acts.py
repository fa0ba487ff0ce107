"""What a host program can do with a group that is not plain: its loop, its threads, its forks.

Each act gives what went wrong, in words. `asked["harmless"]` leaves the odd part out: it is what
a control plays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from stopbath.drill import habits
from stopbath.lifecycle import Deadline, LifecycleError, ProcessRef, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from stopbath.drill.program import Program

__all__: list[str] = []


def _odd(program: Program) -> bool:
    return not program.asked.get("harmless")


def _hit(pid: int, number: int) -> None:
    ref = ProcessRef.open(pid)
    ref.send(number)
    ref.close()


def _in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def thread_that_ends(program: Program) -> list[str]:
    """Start the group on a thread that ends: no worker may die of that (F15)."""
    if _odd(program):
        _in_thread(program.start)
        habits.tell(who="odd", what="the starting thread has ended")
    else:
        program.start()
    threading.Event().wait(0.3)  # what a parent-death signal would need by far
    states = [view.state for view in program.group.workers]
    program.shutdown(3)
    return [] if set(states) == {WorkerState.READY} else [f"workers are {states}"]


def in_asyncio(program: Program) -> list[str]:
    """Use the group inside a running loop with a signal handler of its own (F33)."""
    heard: list[str] = []

    async def body() -> None:
        loop = asyncio.get_running_loop()
        if _odd(program):
            loop.add_signal_handler(signal.SIGTERM, heard.append, "term")
            habits.tell(who="odd", what="a loop is running")
        await asyncio.to_thread(program.start)
        if _odd(program):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # two turns of the loop
        await asyncio.to_thread(program.shutdown, 3)

    asyncio.run(body())
    program.tell_report()  # once more: in the loop it held the loop's own
    return [] if heard == ["term"] or not _odd(program) else ["the host's own handler was lost"]


def twice_and_nested(program: Program) -> list[str]:
    """Two groups at once, one inside the life of the other, and the same again (F33)."""
    problems: list[str] = []
    program.start()
    for turn in range(2):
        other = program.make(f"inner{turn}")
        other.start()
        other.wait_ready(Deadline.after(20))
        if _odd(program):
            habits.tell(who="odd", what="two groups at once")
        if other.shutdown(Deadline.after(3)).survivors:
            problems.append("the inner group left something")
    if any(view.state is not WorkerState.READY for view in program.group.workers):
        problems.append("the outer group was hurt")
    program.shutdown(3)
    try:
        program.group.start()
        problems.append("a group could be started twice")
    except LifecycleError:
        pass
    return problems


def after_fork(program: Program) -> list[str]:
    """A forked child owns nothing of its parent's group, and its end hurts nobody (F33, F34)."""
    problems: list[str] = []
    program.start()
    if _odd(program):
        pid = os.fork()
        if pid == 0:
            try:
                program.group.shutdown()
            except LifecycleError:
                os._exit(0)
            os._exit(1)
        habits.tell(who="odd", what="a child was forked")
        if os.waitpid(pid, 0)[1] != 0:
            problems.append("the child could stop its parent's group")
    if any(view.state is not WorkerState.READY for view in program.group.workers):
        problems.append("the child's end hurt the group")
    program.shutdown(3)
    return problems


def no_stop(program: Program) -> list[str]:
    """Come to the end of the interpreter without any stop (F33)."""
    program.start()
    if _odd(program):
        habits.tell(who="odd", what="nobody stops the group")
    else:
        program.shutdown(3)
    return []


def touched_nothing(program: Program) -> list[str]:
    """Handlers, mask and wake-up descriptor of the host are as they were (F33, F34)."""

    def look() -> list[object]:
        wake = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wake)
        handlers = [signal.getsignal(n) for n in (1, 2, 3, 13, 15, 17)]
        return [*handlers, wake, signal.pthread_sigmask(signal.SIG_BLOCK, ())]

    read_end, wake_fd = os.pipe()
    os.set_blocking(wake_fd, False)
    os.set_blocking(read_end, False)
    if _odd(program):
        signal.set_wakeup_fd(wake_fd)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        habits.tell(who="odd", what="the host has a wake-up descriptor and handlers")
    before = look()
    program.start()
    pid = program.group.workers[0].pid
    if _odd(program) and pid is not None:
        _hit(pid, signal.SIGUSR1)
    problems = [] if look() == before else ["the host's signals were touched"]
    if _odd(program):
        until = time.monotonic() + 2
        while program.group.cause is None and time.monotonic() < until:
            threading.Event().wait(0.01)
        try:
            os.read(read_end, 16)
            problems.append("a signal to a worker ran the host's handler")
        except BlockingIOError:
            pass
    signal.set_wakeup_fd(-1)
    os.close(read_end)
    os.close(wake_fd)
    program.shutdown(3)
    return problems


def children_ignored(program: Program) -> list[str]:
    """The host ignores SIGCHLD, which destroys the status of its children (F17)."""
    if _odd(program):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        habits.tell(who="odd", what="SIGCHLD is ignored")
    program.start()
    program.shutdown(3)
    report = program.group.report
    known = report is not None and all(w.exit != (None, None) for w in report.workers)
    return [] if known else ["an exit status was lost"]


def callback_raises(program: Program) -> list[str]:
    """The host's own callback raises in the middle of a failure (F26)."""

    def bad(_: object) -> None:
        habits.tell(who="odd", what="the callback raises")
        raise RuntimeError("of the host's")

    if _odd(program):
        program.group.on_failure(bad)
    program.start()
    if _odd(program):
        pid = program.group.workers[0].pid
        assert pid is not None  # noqa: S101  (it is ready)
        _hit(pid, signal.SIGKILL)
        until = time.monotonic() + 5
        while program.group.report is None and time.monotonic() < until:
            threading.Event().wait(0.01)
    program.shutdown(3)
    return [] if program.group.report is not None else ["no account of the stop"]


def no_descriptors(program: Program) -> list[str]:
    """Every descriptor is used up when the stop begins (F26)."""
    import resource

    program.start()
    taken: list[int] = []
    if _odd(program):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        try:
            while True:
                taken.append(os.dup(0))
        except OSError as error:
            text = str(error)
    began = time.monotonic()
    report = program.group.shutdown(Deadline.after(3))
    late = time.monotonic() - began - 3
    for fd in taken:
        os.close(fd)
    if _odd(program):
        habits.tell(who="odd", what=text)
    program.tell_report()
    return ["late"] if late > 0.1 or report.survivors else []  # noqa: PLR2004


def clock_jumps(program: Program) -> list[str]:
    """The wall clock is set back by an hour in the middle of a stop (F38)."""
    real = time.time  # noqa: TID251  (the clock that jumps, and that nothing may follow)
    program.start()
    if _odd(program):
        time.time = lambda: real() - 3600  # noqa: TID251
        if time.time() < real() - 1800:  # noqa: TID251
            habits.tell(who="odd", what="the wall clock is an hour behind")
    program.shutdown(1.0)
    time.time = real  # noqa: TID251
    return []
