"""The keeper at work: it spawns, reaps, adopts and ends what is left.

It needs no worker to be well-behaved and no client to be alive:

* a client (the program, the guardian, the server) whose socket ends or whose pidfd says dead
  loses all its workers at once; with the first client, the root, everything ends;
* what a dead worker leaves behind comes back to the keeper, because every living worker is a
  subreaper of its own; the keeper kills it in passes until a pass finds nothing new.
"""

from __future__ import annotations

import os
import select
import signal

from stopbath.lifecycle._birth import spawn_process
from stopbath.lifecycle._channel import Channel, Frame
from stopbath.lifecycle._errors import Exit, ProtocolError
from stopbath.lifecycle._kept import Child, Client, Order
from stopbath.lifecycle._nursery import Nursery
from stopbath.lifecycle._process import (
    ProcessRef,
    children,
    descendants,
    peek_exit,
    reap,
    signal_group_of,
    stopped,
)
from stopbath.lifecycle._strays import WORKER_MARK, Strays

TYPE_CHECKING = False  # as `typing` has it, which this process does without
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from stopbath.lifecycle._containment import Leaf, RunCgroup
    from stopbath.lifecycle._last_look import LastLook
    from stopbath.lifecycle._registry import Record

__all__ = ["Keeper"]

_HISTORY = 256


class Keeper:
    """The loop; `_keeper.run` makes the one there is."""

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
        self._clients: dict[int, Client] = {}  # by socket
        self._children: dict[int, Child] = {}  # by pid, until reaped
        self._dead: list[Child] = []  # reaped; their strays are still ending
        self._strays = Strays(number, self._owner_of)
        self._nursery = Nursery(
            self._poll,
            cgroup,
            record,
            number=number,
            born=self._born,
            execute=self._execute,
            note=lambda client, what: self._tell(client, {"ev": "note", "what": what}),
        )
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
        while self._clients or self._children or self._strays or self._nursery:
            for fd, _ in self._poll.poll(self._nursery.left_ms):
                self._dispatch(fd)
            self._nursery.tick()

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
        if self._nursery.dispatch(fd):
            return
        for client in list(self._clients.values()):
            if client.ref is not None and client.ref.fileno() == fd:
                self._dismiss(client)
        for child in list(self._children.values()):
            if child.ref.fileno() == fd:
                self._bury(child)

    # -- clients

    def _admit(self, channel: Channel, ref: ProcessRef | None, *, root: bool) -> Client:
        client = Client(channel, ref, root=root)
        self._clients[channel.fileno()] = client
        self._poll.register(channel.fileno(), select.POLLIN)
        if ref is not None:
            self._poll.register(ref.fileno(), select.POLLIN)
        return client

    def _serve(self, client: Client) -> None:
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
            client.channel.keep_up(self._poll)

    def _obey(self, client: Client, frame: Frame, fds: list[int]) -> None:
        if frame["op"] == "spawn":
            self._spawn(client, frame, fds)
        elif frame["op"] == "cancel":
            if self._nursery.cancel(client, int(frame["id"])):
                self._failed(client, int(frame["id"]), 0, "it was called off")
        elif frame["op"] == "tree":
            self._signal_tree(int(frame["signal"]))
        elif frame["op"] == "bye":
            client.said_bye = True
        elif frame["op"] == "signal":
            for child in self._children.values():
                if child.client is client and child.id == frame["id"]:
                    send = signal_group_of if frame["group"] else ProcessRef.try_send
                    send(child.ref, int(frame["signal"]))

    def _dismiss(self, client: Client) -> None:
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
        self._nursery.dismiss(client)
        for child in self._children.values():
            if child.client is client or client.root:
                child.ref.try_send(signal.SIGKILL)
        if client.root:
            self._signal_tree(signal.SIGKILL)
            for other in list(self._clients.values()):
                self._dismiss(other)

    def _tell(self, client: Client, frame: Frame, fds: tuple[int, ...] = ()) -> None:
        """Send to a client, and to the root too, which wants to know what became of all."""
        for to in {client, self._root}:
            if to.channel.eof:
                continue
            try:
                to.channel.send({**frame, "mine": to is client}, fds)
            except (BrokenPipeError, ProtocolError):
                continue  # its end arrives as an event of its own
            to.channel.keep_up(self._poll)

    # -- spawning

    def _spawn(self, client: Client, frame: Frame, fds: list[int]) -> None:
        """Start one process: own session, default handlers, unblocked mask, only the listed fds."""
        self._births += 1
        mark = f"{self._record.run_id}/{self._births}"
        env = {**self._record.marked(frame["env"]), WORKER_MARK: mark}
        if frame["lifeline_fd"] is not None:
            frame["fds"].append(frame["lifeline_fd"])
            fds = [*fds, self._lifeline_end()]
        order = Order(client, frame, fds, env, mark)
        if frame["fork"] is None or not self._nursery.take(order):
            self._execute(order)

    def _execute(self, order: Order) -> None:
        """Start it as a new program."""
        leaf = self._cgroup.leaf()
        try:
            ref, access = spawn_process(order, self._cgroup, leaf)
        except OSError as error:
            self._failed(order.client, order.id, error.errno or 0, str(error))
            self._cgroup.bury(leaf)
            return
        if not order.frame["worker"]:
            self._strays.signal = None
            self._let_go()
        elif leaf is not None:
            leaf.admit(ref.pid)  # it waits for `go`, and forks nothing before
        self._born(order, ref, access, leaf)

    def _failed(self, client: Client, ident: int, errno: int, why: str) -> None:
        self._tell(client, {"ev": "failed", "id": ident, "errno": errno, "why": why})

    def _born(
        self, order: Order, ref: ProcessRef, access: socket.socket | None, leaf: Leaf | None
    ) -> None:
        """Take a new process over, and tell who asked for it."""
        child = self._children[ref.pid] = Child(order, ref, leaf, self._number(ref))
        self._record.note_process("worker", child.name, child.number, ref.start)
        self._poll.register(ref.fileno(), select.POLLIN)
        if access is not None:
            self._admit(Channel(access), ProcessRef.open(ref.pid, ref.start), root=False)
        told = {"id": child.id, "name": child.name, "pid": child.number, "start": ref.start}
        self._tell(child.client, {"ev": "spawned", **told}, (ref.fileno(),))

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

    def _bury(self, child: Child) -> None:
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

    def _owner_of(self, session: int, mark: str) -> Child | None:
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
        zygotes = self._nursery.pids
        changed = self._strays.adopt(self._children.keys() | zygotes, take=take, spare=zygotes)
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
            if left != child.strays:  # 64 workers that die together are not told 64 times each
                child.strays = left
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
    def _facts(child: Child) -> Frame:
        end = child.exit or Exit()
        return {
            "id": child.id,
            "name": child.name,
            "pid": child.number,
            "code": end.code,
            "signal": end.signal,
        }


def _empty(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return
