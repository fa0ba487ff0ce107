"""Worker functions: one that behaves, and the ones that reports from the field are made of.

Every function is a worker target: it runs in a process of its own and gets its `WorkerContext`
first. What a test has to know of it comes with `ready` or over a descriptor, never by waiting.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from stopbath.lifecycle import StopNotice, WorkerContext


def _for_ever() -> NoReturn:
    while True:
        signal.pause()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def obedient(ctx: WorkerContext) -> None:
    """Say ready, return when asked."""
    ctx.ready({"pid": os.getpid()})
    ctx.wait_stop()


def has_a_group(ctx: WorkerContext) -> None:
    """Be a program with a group of its own, whose processes are told with `ready`."""
    from stopbath.lifecycle import WorkerGroup, WorkerSpec

    with WorkerGroup("inner", [WorkerSpec("misbehaving:obedient")]) as group:
        supervisor = group._supervisor
        assert supervisor is not None
        assert supervisor.keeper.ref is not None
        ctx.ready({"pids": [supervisor.keeper.ref.pid, *(it.pid for it in group.workers)]})
        ctx.wait_stop()


def heard(ctx: WorkerContext) -> None:
    """Write every stage of a stop, as a letter, to the descriptor `heard`; end at the last."""

    def tell(notice: StopNotice) -> None:
        os.write(ctx.fds["heard"], notice.action.name[-1:].encode())

    signal.signal(signal.SIGTERM, lambda *_: os.write(ctx.fds["heard"], b"t"))
    ctx.on_stop(tell)
    ctx.ready()
    _for_ever()


def dies_of_sigquit(ctx: WorkerContext) -> None:
    """Have SIGQUIT at its default, and end when asked."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    obedient(ctx)


def counts_its_signals(ctx: WorkerContext) -> None:
    """Write an x to the descriptor `heard` for every SIGTERM, and go on."""
    signal.signal(signal.SIGTERM, lambda *_: os.write(ctx.fds["heard"], b"x"))
    ctx.ready()
    _for_ever()


def armed() -> int:
    """Give the parent-death signal of this process; 0 when none is armed."""
    number = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
    return number.value


def tells_how_it_is_armed(ctx: WorkerContext, sits: str = "") -> None:
    """Be deaf, with a plain child; say which parent-death signal is armed, then sit as told."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctx.ready({"pid": os.getpid(), "armed": armed(), "helper": _helper()})
    if sits == "in python":
        while True:
            pass
    if sits == "in c":
        ctypes.CDLL(None).pause()  # CDLL lets other threads run
    _for_ever()


def deaf(ctx: WorkerContext) -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP, and whatever is asked."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctx.ready()
    _for_ever()


def deaf_while_starting(ctx: WorkerContext) -> None:
    """Ignore SIGTERM and never become ready; say so on stderr."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctx.progress("ignoring everything")
    _say("deaf")
    _for_ever()


def never_ready(ctx: WorkerContext) -> None:
    """Load for ever, without a word."""
    ctx.stopping.wait()
    _for_ever()


def stops_itself(ctx: WorkerContext) -> None:
    """SIGSTOP itself once ready."""
    ctx.ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    ctx.wait_stop()


def in_a_c_call(ctx: WorkerContext) -> None:
    """Sit in a C function that never gives the interpreter back, and that no signal interrupts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # never gets to run
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL
    libc.pthread_mutex_lock(mutex)
    ctx.ready()
    libc.pthread_mutex_lock(mutex)


def hangs_in_its_handler(ctx: WorkerContext) -> None:
    """Clean up for ever on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: _for_ever())
    ctx.ready()
    _for_ever()


def leaves_a_thread(ctx: WorkerContext) -> None:
    """Return when asked, with a non-daemon thread that never ends."""
    threading.Thread(target=threading.Event().wait, daemon=False).start()
    ctx.ready()
    ctx.wait_stop()


def floods_stderr(ctx: WorkerContext) -> None:
    """Write to stderr as fast as it goes until asked to stop, and then once more."""
    ctx.ready()
    while not ctx.stopping.is_set():
        os.write(2, b"much ado about nothing\n" * 400)
    _say("the last line")


def raises_before_ready(ctx: WorkerContext) -> None:
    """Fail to load."""
    _say(f"{ctx.name}: cannot open the checkpoint")
    raise FileNotFoundError("no such checkpoint")


def returns_before_ready(ctx: WorkerContext) -> None:
    """Forget to say ready."""
    _say(f"{ctx.name}: nothing to do")


def dies_while_starting(ctx: WorkerContext) -> None:
    """Be killed by the kernel half-way through loading."""
    ctx.progress("loading 3/10")
    _say("Killed: out of memory")
    os.kill(os.getpid(), signal.SIGKILL)


def says_ready_twice(ctx: WorkerContext) -> None:
    """Say ready, and again."""
    ctx.ready()
    ctx.ready()


def progress_for_ever(ctx: WorkerContext) -> None:
    """Report progress as fast as it goes, and never be ready."""
    while True:
        ctx.progress("x" * 400)


def waits_for(ctx: WorkerContext, what: str) -> None:
    """Do `what` as soon as the descriptor `go` can be read."""
    ctx.ready()
    os.read(ctx.fds["go"], 1)
    _say("about to " + what)
    if what == "raise":
        raise RuntimeError("a tensor of the wrong shape")
    if what == "exit":
        sys.exit(7)
    if what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    # "return": fall off the end


def raises_when_asked(ctx: WorkerContext) -> None:
    """Fail in its own stop path."""
    ctx.ready()
    ctx.wait_stop()
    raise RuntimeError("cannot flush")


def asks_for_time(ctx: WorkerContext, seconds: float) -> None:
    """Announce that its own stop takes `seconds`, and take what it gets."""
    ctx.announce_stop_within(seconds)
    ctx.ready()
    _for_ever()


def closes_its_control_socket(ctx: WorkerContext) -> None:
    """Shut the line to the supervisor, ignore SIGTERM, and carry on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctx.ready()
    os.write(3, b"\xff" * 64)  # not a frame, and not one that can be skipped
    _for_ever()


def _sleeper(told: int, *, own_session: bool, erased: bool) -> None:
    """Leave a process that nobody's pid or group leads to; its pid goes to `told`."""
    if os.fork():
        return
    if own_session:
        os.setsid()
    if os.fork():
        os._exit(0)
    os.write(told, b"%d\n" % os.getpid())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if erased:
        os.execve("/bin/sleep", ["sleep", "600"], {})  # noqa: S606  (no environment to be found by)
    _for_ever()


def _stray(*, erased: bool = False) -> int:
    told_in, told = os.pipe()
    _sleeper(told, own_session=True, erased=erased)
    os.close(told)
    with os.fdopen(told_in, "rb") as file:
        pid = int(file.readline())
    os.waitpid(-1, 0)  # the middle one of the double fork
    return pid


def _helper() -> int:
    """Fork a plain child that holds every descriptor of this process."""
    pid = os.fork()
    if pid == 0:
        _for_ever()
    return pid


def leaves_strays(ctx: WorkerContext, *, deaf: bool = False, erased: bool = False) -> None:
    """Have a helper that holds all descriptors and a stray that left session and tree."""
    helper, stray = _helper(), _stray(erased=erased)
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctx.ready({"pid": os.getpid(), "helper": helper, "stray": stray})
    if deaf:
        _for_ever()
    ctx.wait_stop()


def forks_without_end(ctx: WorkerContext) -> None:
    """Have descendants that hop from session to session for as long as they live."""
    if os.fork() == 0:
        while True:
            os.setsid()
            if os.fork():
                os._exit(0)
    ctx.ready()
    ctx.wait_stop()


def calls_off_ranks(ctx: WorkerContext) -> None:
    """Be a server that asks for ranks, and calls them off before they are born."""
    from stopbath.lifecycle import Deadline, WorkerGroup, WorkerSpec

    supervisor = ctx.supervisor()
    supervisor.start_thread()
    never = WorkerSpec("born:tells_where", preload=["born"], env={"BORN": "hangs"})
    group = WorkerGroup("ranks", [never], supervisor=supervisor)
    group.start()
    report = group.shutdown(Deadline.after(2))
    ctx.ready()
    _say(f"called off {report.clean} {[worker.pid for worker in report.workers]}")
    ctx.wait_stop()


def serves_ranks(
    ctx: WorkerContext,
    ranks: int,
    target: str,
    graces: tuple[float, ...],
    fields: dict[str, Any],
) -> None:
    """Play the server of a guardian: start ranks through its keeper, stop them when asked."""
    from stopbath.lifecycle import Action, Deadline, Escalation, WorkerGroup, WorkerSpec

    supervisor = ctx.supervisor()
    supervisor.start_thread()
    group = WorkerGroup(
        "ranks",
        [WorkerSpec(target, name=f"rank{rank}", **fields) for rank in range(ranks)],
        escalation=Escalation(*graces),
        supervisor=supervisor,
    )
    stop_now = threading.Event()

    def harder(notice: StopNotice) -> None:
        if notice.action > Action.DRAIN:
            stop_now.set()
            join = {"target": group.shutdown, "kwargs": {"first": Action.SIGTERM}}
            threading.Thread(**join, daemon=True).start()

    failed = threading.Event()
    group.on_failure(lambda _: (failed.set(), ctx.stopping.set()))
    group.start()
    group.wait_ready(Deadline.after(20))
    ctx.on_stop(harder)
    ctx.announce_stop_within(sum(graces))
    ctx.ready({"ranks": [worker.pid for worker in group.workers]})
    _say("ready " + " ".join(str(worker.pid) for worker in group.workers))
    _say(f"armed {armed()}")
    for worker in group.workers:
        if worker.info and "armed" in worker.info:
            _say(f"armed {worker.info['armed']}")
        if worker.info and "stray" in worker.info:
            _say(f"stray {worker.info['stray']}")
    _say(f"tree {os.getpid()} {ctx.keeper_pid} {ctx.guardian_pid}")
    signal.signal(signal.SIGTERM, lambda *_: stop_now.set())
    ctx.wait_stop()
    report = group.shutdown(
        Deadline.after(sum(graces)), first=Action.SIGTERM if stop_now.is_set() else Action.DRAIN
    )
    ctx.send_report({"groups": [report.to_dict()], "cause": None, "unfinished_requests": 0})
    if failed.is_set():
        sys.exit(4)
