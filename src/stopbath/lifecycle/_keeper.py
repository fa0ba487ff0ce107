"""The keeper: the parent of all workers. It spawns, reaps, adopts and ends what is left.

One small single-threaded process that never runs user code, in a session of its own, child
subreaper. Run by path with `python -I -S` for a program, forked by the guardian for `serve` and
`run`. It needs no worker to be well-behaved and no client to be alive:

* a client (the program, the guardian, the server) whose socket ends or whose pidfd says dead
  loses all its workers at once; with the first client, the root, everything ends;
* what a dead worker leaves behind comes back to the keeper, because every living worker is a
  subreaper of its own; the keeper kills it in passes until a pass finds nothing new.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

if __name__ == "__main__":  # run by path, without site: let the package be found beside it
    # Last: what lies beside it, a backport called `enum`, must not hide the standard library's.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from stopbath.lifecycle._birth import spawn_process
from stopbath.lifecycle._channel import Channel, Frame
from stopbath.lifecycle._containment import Leaf, RunCgroup
from stopbath.lifecycle._errors import Exit, ProtocolError
from stopbath.lifecycle._process import (
    ProcessRef,
    become_subreaper,
    children,
    descendants,
    peek_exit,
    reap,
    signal_group_of,
    stopped,
)
from stopbath.lifecycle._registry import Record
from stopbath.lifecycle._strays import WORKER_MARK, Strays

TYPE_CHECKING = False  # as `typing` has it, which this process does without
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.lifecycle._last_look import LastLook

__all__ = ["Keeper", "run"]


_HISTORY = 256


class _Client:
    """Who may ask for workers, and loses them when it ends."""

    __slots__ = ("channel", "ref", "root", "said_bye")

    def __init__(self, channel: Channel, ref: ProcessRef | None, *, root: bool) -> None:
        self.channel, self.ref, self.root = channel, ref, root
        self.said_bye = False  # it leaves of its own will, and gives the account itself


class _Child:
    """A process this keeper spawned."""

    __slots__ = ("client", "exit", "id", "leaf", "mark", "name", "number", "ref", "suspendable")

    def __init__(
        self, client: _Client, ident: int, name: str, ref: ProcessRef, leaf: Leaf | None
    ) -> None:
        self.client, self.id, self.name, self.ref, self.leaf = client, ident, name, ref, leaf
        self.mark = ""  # in its environment, and in that of what it starts
        self.number = ref.pid  # what the clients know it by
        self.suspendable = False  # it has a terminal, and its client wants to hear of a Ctrl-Z
        self.exit: Exit | None = None  # known once dead; it stays here until its strays have ended


class Keeper:
    """The loop. `run` is the only caller."""

    def __init__(
        self,
        sock: socket.socket,
        root: ProcessRef | None,
        wake_fd: int,
        record: Record,
        cgroup: RunCgroup,
        *,
        number: Callable[[ProcessRef], int],
        handed_on: Sequence[int],
        last_look: LastLook | None,
    ) -> None:
        self._last_look = last_look
        self._record, self._cgroup = record, cgroup
        self._number = number  # of a process, as the clients know it
        self._handed_on = handed_on
        self._poll = select.poll()
        self._clients: dict[int, _Client] = {}  # by socket
        self._children: dict[int, _Child] = {}  # by pid, until reaped
        self._dead: list[_Child] = []  # reaped; their strays are still ending
        self._strays = Strays(number, self._owner_of)
        self._births = 0
        self.history: list[Frame] = []  # the last children that ended, for a root that cannot tell
        self._lifeline: tuple[int, int] | None = None
        self._wake_fd = wake_fd
        self._poll.register(wake_fd, select.POLLIN)
        self._root = self._admit(Channel(sock), root, root=True)

    @property
    def abandoned(self) -> bool:
        """Whether the root client is gone without a word."""
        return self._root.channel.eof and not self._root.said_bye

    def loop(self) -> None:
        """Serve until the root client is gone and nothing is left."""
        while self._clients or self._children or self._strays:
            for fd, _ in self._poll.poll():
                self._dispatch(fd)

    def dismiss_all(self) -> None:
        """End everything, as if every client were gone."""
        for client in list(self._clients.values()):
            self._dismiss(client)

    def _dispatch(self, fd: int) -> None:
        if fd == self._wake_fd:
            _empty(fd)
            self._tell_of_stops()
            self._adopt()
            return
        client = self._clients.get(fd)
        if client is not None:
            self._serve(client)
            return
        for client in list(self._clients.values()):
            if client.ref is not None and client.ref.fileno() == fd:
                self._dismiss(client)
        for child in list(self._children.values()):
            if child.ref.fileno() == fd:
                self._bury(child)

    # -- clients

    def _admit(self, channel: Channel, ref: ProcessRef | None, *, root: bool) -> _Client:
        client = _Client(channel, ref, root=root)
        self._clients[channel.fileno()] = client
        self._poll.register(channel.fileno(), select.POLLIN)
        if ref is not None:
            self._poll.register(ref.fileno(), select.POLLIN)
        return client

    def _serve(self, client: _Client) -> None:
        try:
            frames = client.channel.receive()
        except ProtocolError:  # a client that talks nonsense is as good as dead
            self._dismiss(client)
            return
        for frame, fds in frames:
            try:
                self._obey(client, frame, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        if client.channel.eof:
            self._dismiss(client)
        else:
            self._flush(client)

    def _obey(self, client: _Client, frame: Frame, fds: list[int]) -> None:
        if frame["op"] == "spawn":
            self._spawn(client, frame, fds)
        elif frame["op"] == "tree":
            self._signal_tree(int(frame["signal"]))
        elif frame["op"] == "bye":
            client.said_bye = True
        elif frame["op"] == "signal":
            for child in self._children.values():
                if child.client is client and child.id == frame["id"]:
                    send = signal_group_of if frame["group"] else ProcessRef.try_send
                    send(child.ref, int(frame["signal"]))

    def _dismiss(self, client: _Client) -> None:
        """End everything a client that is gone had asked for; with the root, everything."""
        if self._clients.pop(client.channel.fileno(), None) is None:
            return
        self._poll.unregister(client.channel.fileno())
        if client.ref is not None:
            self._poll.unregister(client.ref.fileno())
            client.ref.close()
        client.channel.close()
        if client.root and not client.said_bye and self._last_look is not None:
            self._last_look.look()
        for child in self._children.values():
            if child.client is client or client.root:
                child.ref.try_send(signal.SIGKILL)
        if client.root:
            self._signal_tree(signal.SIGKILL)
            for other in list(self._clients.values()):
                self._dismiss(other)

    def _tell(self, client: _Client, frame: Frame, fds: tuple[int, ...] = ()) -> None:
        """Send to a client, and to the root too, which wants to know what became of all."""
        for to in {client, self._root}:
            if to.channel.eof:
                continue
            try:
                to.channel.send({**frame, "mine": to is client}, fds)
            except (BrokenPipeError, ProtocolError):
                continue  # its end arrives as an event of its own
            self._flush(to)

    def _flush(self, client: _Client) -> None:
        try:
            done = client.channel.flush()
        except BrokenPipeError:
            return  # its end arrives as an event of its own
        mask = select.POLLIN if done else select.POLLIN | select.POLLOUT
        self._poll.modify(client.channel.fileno(), mask)

    # -- spawning

    def _spawn(self, client: _Client, frame: Frame, fds: list[int]) -> None:
        """Start one process: own session, default handlers, unblocked mask, only the listed fds."""
        ident, name, env = int(frame["id"]), str(frame["name"]), self._record.marked(frame["env"])
        self._births += 1
        mark = env[WORKER_MARK] = f"{self._record.run_id}/{self._births}"
        leaf = self._cgroup.leaf()
        if frame["lifeline_fd"] is not None:
            frame["fds"].append(frame["lifeline_fd"])
            fds = [*fds, self._lifeline_end()]
        try:
            ref, access = spawn_process(frame, fds, env, self._cgroup, leaf)
        except OSError as error:
            self._tell(
                client, {"ev": "failed", "id": ident, "errno": error.errno or 0, "why": str(error)}
            )
            self._cgroup.bury(leaf)
            return
        if not frame["worker"]:
            self._strays.signal = None
            self._let_go()
        elif leaf is not None:
            leaf.admit(ref.pid)  # it waits for `go`, and forks nothing before
        child = self._children[ref.pid] = _Child(client, ident, name, ref, leaf)
        child.number, child.mark = self._number(ref), mark
        child.suspendable = not frame["new_session"]
        self._record.note_process("worker", name, child.number, ref.start)
        self._poll.register(ref.fileno(), select.POLLIN)
        if access is not None:
            self._admit(Channel(access), ProcessRef.open(ref.pid, ref.start), root=False)
        self._tell(
            client,
            {"ev": "spawned", "id": ident, "name": name, "pid": child.number, "start": ref.start},
            (child.ref.fileno(),),
        )

    def _lifeline_end(self) -> int:
        """Give what ends with this process: the pipe's other end is nobody else's."""
        if self._lifeline is None:
            self._lifeline = os.pipe()
        return self._lifeline[0]

    def _let_go(self) -> None:
        """Close what was the command's alone, or who reads from it would wait for us too."""
        for fd in self._handed_on:
            if fd > 2:  # noqa: PLR2004  (stderr)
                os.close(fd)
            else:
                os.dup2(self._wake_fd, fd)  # taken by something that nobody reads or writes
        self._handed_on = ()

    def _tell_of_stops(self) -> None:
        for child in self._children.values():
            if child.suspendable and stopped(child.ref):
                self._tell(child.client, {"ev": "stopped", "id": child.id})

    # -- ends

    def _bury(self, child: _Child) -> None:
        """Tell how a child ended, kill its group while the zombie holds the number, reap it."""
        try:
            child.exit = peek_exit(child.ref)
        except ChildProcessError:
            child.exit = Exit()
        if child.exit is None:
            return  # an event of a number that meant another descriptor a moment ago
        self._tell(child.client, {"ev": "exited", **self._facts(child)})
        if self._strays.signal == signal.SIGKILL and child.leaf is not None:
            child.leaf.kill()
        if self._strays.signal is not None:
            signal_group_of(child.ref, self._strays.signal)
        self._poll.unregister(child.ref.fileno())
        reap(child.ref)
        child.ref.close()
        self._cgroup.bury(child.leaf)
        del self._children[child.ref.pid]
        self._dead.append(child)
        self.history = [*self.history[1 - _HISTORY :], self._facts(child)]
        self._adopt()
        if self._strays:  # those that came to us before we knew of this death were told to nobody
            self._announce_strays()

    def _owner_of(self, session: int, mark: str) -> _Child | None:
        """Find the dead child that left a process; a living one keeps what is its own."""
        dead = [*self._dead, *(it for it in self._children.values() if it.ref.dead())]
        for child in dead:
            if session == child.ref.pid or len(dead) == 1:
                return child
        return next((child for child in dead if child.mark == mark), None)

    def _adopt(self) -> None:
        """One pass: reap what has died, take on what is new; whose nothing is left is gone.

        Called again by SIGCHLD for every stray that ends, so the passes go on until one finds
        nothing: a fork that raced with this pass is found in the one its parent's end brings.
        """
        take = self._strays.signal is not None or not self._children
        changed = self._strays.adopt(self._children, take=take)
        self._cgroup.tidy()
        for child in [it for it in self._dead if not self._strays.left(it)]:
            self._dead.remove(child)
            ended = self._strays.take_ended(child)
            self._tell(child.client, {"ev": "gone", "strays": ended, **self._facts(child)})
        if changed:
            self._announce_strays()

    def _announce_strays(self) -> None:
        """Name the strays that are still there, for a stop that cannot wait for them."""
        for child in self._dead:
            left = self._strays.left(child)
            self._tell(child.client, {"ev": "strays", "id": child.id, "left": left})

    def _signal_tree(self, number: int) -> None:
        """Signal everything below this process, and what comes to it from now on."""
        self._strays.signal = number
        if number == signal.SIGKILL:
            self._cgroup.kill()
        self._adopt()
        self._strays.send(number)
        # Below no child there is nobody; to look through the whole of /proc takes 10 ms and more.
        for ref in descendants(os.getpid()) if children() else ():
            if ref.pid not in self._strays:
                ref.try_send(number)
                ref.try_send(signal.SIGCONT)
            ref.close()

    @staticmethod
    def _facts(child: _Child) -> Frame:
        end = child.exit or Exit()
        return {
            "id": child.id,
            "name": child.name,
            "pid": child.number,
            "code": end.code,
            "signal": end.signal,
        }


_NOT_IGNORED = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP),
}


def _own_number(ref: ProcessRef) -> int:
    return ref.pid


def _empty(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


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
    if cgroup.remove():
        # Here: the keeper of a library has no use for it before its end.
        from stopbath.lifecycle._sweep import remove_recorded

        remove_recorded(record)  # where the guardian is alive, it has done so already


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
        parent = ProcessRef.open(parent_pid, parent_start)
    except ProcessLookupError:  # gone before we looked; nothing was started yet
        cgroup.remove()
        record.remove()
        return
    run(sock, parent, record, cgroup)
    os._exit(0)  # nothing to finalize, and the client waits for this end


if __name__ == "__main__":
    main(sys.argv[1:])
