"""The parent of all workers, asked directly: it spawns, reaps, adopts, and ends what is left."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stopbath.lifecycle
from observing import COOKIE, alive, run_processes, state_of, wait_until
from stopbath.lifecycle import Deadline, Exit, KeeperDied
from stopbath.lifecycle._registry import Record
from stopbath.lifecycle._spawn import Gone, KeeperClient, Spawned, SpawnFailed, WorkerExited

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

ENV = {"PATH": os.environ["PATH"], COOKIE: "1"}
PYTHON = [sys.executable, "-I", "-S", "-c"]
SLEEP = [*PYTHON, "import signal; signal.pause()"]


def launch() -> KeeperClient:
    return KeeperClient.launch(Record.create(os.urandom(8).hex(), "library", "test", ["test"]))


class Asked:
    """A keeper of our own, and the events it has sent."""

    def __init__(self) -> None:
        self.client = launch()
        self.events: list[Any] = []
        assert self.client.ref is not None
        self.pid = self.client.ref.pid

    def spawn(self, argv: list[str], **how: Any) -> Spawned:
        """Have a process spawned."""
        ident = self.client.spawn("it", argv, ENV, how.pop("fds", {}), **how)
        event = self.next(Spawned, ident)
        assert isinstance(event, Spawned)
        return event

    def next(self, kind: type, ident: int) -> Any:
        """Give the next event of a kind about a process."""
        by = Deadline.after(8)
        poll = select.poll()
        poll.register(self.client.channel, select.POLLIN)
        while True:
            for event in self.events:
                if isinstance(event, kind) and event.id == ident:
                    self.events.remove(event)
                    return event
            assert not self.client.channel.eof, "the keeper is gone"
            assert poll.poll(by.left_s() * 1000), f"no {kind.__name__}: {self.events}"
            self.events += self.client.events()

    def close(self) -> None:
        """Leave it."""
        for event in (*self.events, *([] if self.client.channel.eof else self.client.events())):
            if isinstance(event, Spawned):
                event.ref.close()
        self.client.close()


@pytest.fixture
def keeper() -> Iterator[Asked]:
    asked = Asked()
    yield asked
    asked.close()


@contextmanager
def held(event: Spawned) -> Iterator[int]:
    try:
        yield event.ref.pid
    finally:
        event.ref.close()


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("raise SystemExit(0)", Exit(code=0)),
        ("raise SystemExit(77)", Exit(code=77)),
        ("import os; os.kill(os.getpid(), 9)", Exit(signal=9)),
        ("import os; os.abort()", Exit(signal=6)),
    ],
)
def test_it_tells_how_a_process_ended_and_then_that_it_is_gone(
    keeper: Asked, code: str, end: Exit
) -> None:
    with held(keeper.spawn([*PYTHON, code])) as pid:
        exited = keeper.next(WorkerExited, 1)
        gone = keeper.next(Gone, 1)
        assert (exited.pid, exited.exit, exited.mine) == (pid, end, True)
        assert (gone.pid, gone.exit, gone.strays) == (pid, end, [])
        assert state_of(pid) == ""


@pytest.mark.parametrize("argv", [["/no/such/program"], ["/etc/passwd"], ["/"]])
def test_what_cannot_be_run_is_told_with_its_error(keeper: Asked, argv: list[str]) -> None:
    ident = keeper.client.spawn("it", argv, ENV, {})
    failed = keeper.next(SpawnFailed, ident)
    assert failed.errno in {errno.ENOENT, errno.ENOEXEC, errno.EACCES}
    assert argv[0] in failed.why or failed.why
    with held(keeper.spawn(SLEEP)):  # and the next one runs
        pass


def test_a_process_is_born_clean(keeper: Asked) -> None:
    """Own session, default handlers, unblocked mask, only the listed descriptors, no stdin."""
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    look = (
        "import os, signal\n"
        "os.write(7, repr((os.getsid(0) == os.getpid(),"
        " sorted(int(fd) for fd in os.listdir('/proc/self/fd')"
        " if os.path.exists('/proc/self/fd/' + fd)),"
        " signal.pthread_sigmask(signal.SIG_BLOCK, ()),"
        " open('/proc/self/status').read().partition('SigIgn:')[2].split()[0],"
        " os.readlink('/proc/self/fd/0'))).encode())"
    )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with held(keeper.spawn([*PYTHON, look], fds={7: write_end})):
            os.close(write_end)
            keeper.next(Gone, 1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGUSR2, before)
    with os.fdopen(read_end) as file:
        session, fds, mask, ignored, stdin = eval(file.read())  # noqa: S307  (our own words)
    assert session
    assert fds == [0, 1, 2, 7]
    assert mask == set()
    own = 1 << 12 | 1 << 24 | 3 << 31  # Python ignores SIGPIPE and SIGXFSZ, glibc its own two
    assert int(ignored, 16) & ~own == 0
    assert stdin == "/dev/null"


def test_the_keeper_itself_is_small_and_holds_nothing_of_the_program() -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    other = launch()
    try:
        assert other.ref is not None
        pid = other.ref.pid
        poll = select.poll()
        poll.register(other.channel, select.POLLIN)
        ident = other.spawn("it", ["/no/such/program"], ENV, {})
        assert ident == 1
        assert poll.poll(8000)  # it answers, so it is set up
        fds: dict[int, str] = {}
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # of the failed spawn, closed just now
                fds[int(path.name)] = str(path.readlink())
        assert not any(os.readlink(f"/proc/self/fd/{write_end}") == link for link in fds.values())  # noqa: PTH115
        assert len(fds) < 14
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
        assert os.getsid(pid) == pid
    finally:
        other.close()
        os.close(read_end)
        os.close(write_end)


STRAY = """
import os, signal, time
told = int(os.environ.get("TOLD", "7"))
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    {more}
    os.write(told, b"%d\\n" % os.getpid())
    os.close(told)
    while True:
        signal.pause()
os.wait()
os.write(told, b"made\\n")
os.close(told)
{then}
"""


@pytest.mark.parametrize("then", ["", "signal.pause()"])
def test_what_a_dead_process_left_comes_back_and_is_ended(keeper: Asked, then: str) -> None:
    """Whether the process leaves by itself or is killed; the strays are told with `gone`."""
    read_end, write_end = os.pipe()
    code = STRAY.format(more="signal.signal(signal.SIGTERM, signal.SIG_IGN)", then=then)
    with held(keeper.spawn([*PYTHON, code], fds={7: write_end})) as pid:
        os.close(write_end)
        with os.fdopen(read_end) as file:
            words = set(file.read().split())
        # One whose parent leaves at once may be ended before it has said its number.
        said = {int(word) for word in words - {"made"}}
        if then:
            assert len(said) == 1
            assert all(map(alive, said))
            os.kill(pid, signal.SIGKILL)
        gone = keeper.next(Gone, 1)
    # The one in between may still be ending when its group is, and is told then, too.
    told = {it["pid"]: it["outcome"] for it in gone.strays}
    assert told
    assert said <= told.keys()
    assert set(told.values()) == {"killed"}
    assert not any(state_of(stray) for stray in told)


def test_the_group_of_a_dead_process_is_ended_with_it(keeper: Asked) -> None:
    read_end, write_end = os.pipe()
    code = "import os, signal\nif os.fork() == 0:\n  signal.pause()\nos.close(7)\nsignal.pause()"
    with held(keeper.spawn([*PYTHON, code], fds={7: write_end})) as pid:
        os.close(write_end)
        children = Path(f"/proc/{pid}/task/{pid}/children")
        wait_until(lambda: children.read_text().split(), Deadline.after(5))
        helper = int(children.read_text())
        os.kill(pid, signal.SIGKILL)
        keeper.next(Gone, 1)
    assert state_of(helper) == ""
    os.close(read_end)


@pytest.mark.parametrize("how", ["closes its socket", "talks nonsense"])
def test_a_client_that_leaves_takes_everything_with_it(keeper: Asked, how: str) -> None:
    with held(keeper.spawn(SLEEP)) as one, held(keeper.spawn(SLEEP)) as other:
        if how == "talks nonsense":
            os.write(keeper.client.channel.fileno(), b"\xff" * 32)
        else:
            keeper.client.channel.close()
        wait_until(lambda: not alive(one) and not alive(other), Deadline.after(5))
        wait_until(lambda: not alive(keeper.pid), Deadline.after(5))


def test_it_ends_everything_when_the_program_dies_though_the_socket_lives_on(
    program: Callable[..., subprocess.Popen[str]],
) -> None:
    """A forked child may hold the program's end of the socket: the pidfd tells."""
    host = program(
        """
        group = WorkerGroup("g", [WorkerSpec("misbehaving:deaf") for _ in range(3)])
        group.start()
        group.wait_ready(Deadline.after(20))
        supervisor = group._supervisor
        os.dup(supervisor.keeper.channel.fileno())  # not known to be closed in a forked child
        keeper = supervisor.keeper.ref.pid
        holder = os.fork()
        if holder == 0:
            signal.pause()
        tell(holder, keeper, *[worker.pid for worker in group.workers])
        signal.pause()
        """
    )
    assert host.stdout is not None
    holder, keeper, *workers = (int(word) for word in host.stdout.readline().split())
    try:
        assert all(map(alive, workers))
        host.kill()
        host.wait()
        wait_until(lambda: not any(map(alive, workers)), Deadline.after(2))
        wait_until(lambda: not alive(keeper), Deadline.after(2))
        assert alive(holder)
    finally:
        os.kill(holder, signal.SIGKILL)


def test_a_worker_with_the_keepers_socket_is_a_client_of_its_own(keeper: Asked) -> None:
    """Its processes end with it; the program hears of them, and its own live on."""
    theirs, ours = socket.socketpair()
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(stopbath.lifecycle.__file__).parents[2])!r})\n"
        "from stopbath.lifecycle._spawn import KeeperClient\n"
        "import select, signal\n"
        "client = KeeperClient.inherited(4)\n"
        f"client.spawn('inner', {SLEEP!r}, {ENV!r}, {{}})\n"
        "signal.pause()\n"
    )
    with held(keeper.spawn(SLEEP)) as mine, held(keeper.spawn([*PYTHON, code], keeper_fd=4)) as pid:
        by = Deadline.after(8)
        inner: list[Spawned] = []
        while not inner:
            wait_until(lambda: select.select([keeper.client.channel], [], [], 0)[0], by)
            keeper.events += keeper.client.events()
            inner = [it for it in keeper.events if isinstance(it, Spawned) and it.name == "inner"]
        keeper.events.remove(inner[0])
        with held(inner[0]) as inner_pid:
            assert not inner[0].mine
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not alive(inner_pid), Deadline.after(3))
            assert alive(mine)
            assert alive(keeper.pid)
    theirs.close()
    ours.close()


@pytest.mark.parametrize("number", [1, 2, 3, 15, 13])
def test_it_is_deaf_to_what_a_service_manager_or_terminal_sends(keeper: Asked, number: int) -> None:
    with held(keeper.spawn(SLEEP)) as pid:
        os.kill(keeper.pid, number)
        with held(keeper.spawn(SLEEP)):  # it still works
            assert alive(pid)


def test_its_death_is_an_error_for_whoever_asks(keeper: Asked) -> None:
    os.kill(keeper.pid, signal.SIGKILL)
    assert keeper.client.ref is not None
    assert keeper.client.ref.dead(5)
    with pytest.raises(KeeperDied):
        keeper.client.spawn("it", SLEEP, ENV, {})


def test_many_at_once(keeper: Asked) -> None:
    """Sixty-four that end in the same instant: each is told of and none is left."""
    events = [keeper.spawn(SLEEP) for _ in range(64)]
    began = time.monotonic()
    for event in events:
        event.ref.send(signal.SIGKILL)
    for event in events:
        assert keeper.next(Gone, event.id).exit == Exit(signal=9)
        event.ref.close()
    assert time.monotonic() - began < 2
    assert run_processes() == {keeper.pid}


def test_a_client_that_does_not_read_cannot_hold_it_up(keeper: Asked) -> None:
    """What it would say is queued, within bounds; it goes on reaping."""
    for _ in range(300):
        keeper.client.spawn("x" * 4000, ["/no/such/program"], ENV, {})
    last = keeper.client.spawn("it", [*PYTHON, "pass"], ENV, {})
    keeper.client.channel.flush()
    event = None
    by = Deadline.after(20)
    while event is None:
        keeper.client.channel.flush()
        assert not by.passed
        keeper.events += keeper.client.events()
        event = next((e for e in keeper.events if isinstance(e, Gone) and e.id == last), None)
    assert event.exit == Exit(code=0)
