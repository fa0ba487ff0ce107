"""The keeper's side of zygotes: what they are asked for, what they owe, and when one is given up.

A zygote (`_zygote`) has imported once what its workers need. It forks a worker twice, so that the
worker comes up to the keeper, a subreaper, and is the keeper's child like any other. Until the
keeper has taken hold of it the worker does nothing but wait for a byte, and ends without one.

Until then it is in the zygote's session, by which the keeper tells it from a stray. One fork is
asked for at a time, over all zygotes. A zygote that does not answer in time, dies or cannot be
forked is given up, and its workers are started as programs of their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import deque

from stopbath.lifecycle._birth import Layout, spawn_zygote
from stopbath.lifecycle._channel import Channel, Frame
from stopbath.lifecycle._errors import Exit, ProtocolError
from stopbath.lifecycle._process import ProcessRef, peek_exit, read_stat, reap, signal_group_of

TYPE_CHECKING = False  # as `typing` has it, which this process does without
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from stopbath.lifecycle._containment import Leaf, RunCgroup
    from stopbath.lifecycle._kept import Client, Order
    from stopbath.lifecycle._registry import Record

__all__ = ["Nursery"]

_ANSWER_S = 5.0  # for a fork, which takes milliseconds
_IMPORTING, _READY, _LEAVING = "importing", "ready", "leaving"


class _Zygote:
    """One zygote: whose it is, what it imports, who waits to be born of it."""

    __slots__ = ("channel", "client", "leaf", "orders", "ref", "state", "wants")

    def __init__(
        self, client: Client, wants: Frame, ref: ProcessRef, channel: Channel, leaf: Leaf | None
    ) -> None:
        self.client, self.wants = client, wants
        self.ref, self.channel, self.leaf = ref, channel, leaf
        self.orders: deque[Order] = deque()
        self.state = _IMPORTING


class _Asked:
    """The fork that is owed. Owns the order's descriptors, and the gate the newborn waits at."""

    __slots__ = ("_gate", "due", "layout", "order", "zygote")

    def __init__(self, zygote: _Zygote, order: Order, gate: int, layout: Layout) -> None:
        self.zygote, self.layout, self._gate = zygote, layout, gate
        self.order: Order | None = order  # None: called off
        self.due = time.monotonic() + _ANSWER_S

    def let_in(self) -> None:
        """Let the newborn begin; one that is dead by now is told of by its pidfd."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._gate, b"g")

    def call_off(self) -> None:
        """Nobody waits for it any more: it ends at the gate."""
        if self.order is not None:
            self.order.close()
        self.order = None
        self._shut()

    def close(self) -> None:
        """It is born, or never will be."""
        self.layout.close()
        self._shut()

    def _shut(self) -> None:
        gate, self._gate = self._gate, -1
        if gate >= 0:
            os.close(gate)


class Nursery:
    """The zygotes of one keeper; true while one is alive.

    `born` takes a worker over, `execute` starts one as a program of its own, `note` says
    something to a client; `number` gives the number by which clients know a process.
    """

    def __init__(
        self,
        poll: select.poll,
        cgroup: RunCgroup,
        record: Record,
        *,
        number: Callable[[ProcessRef], int],
        born: Callable[[Order, ProcessRef, socket.socket | None, Leaf | None], None],
        execute: Callable[[Order], None],
        note: Callable[[Client, str], None],
    ) -> None:
        self._poll, self._cgroup, self._record, self._number = poll, cgroup, record, number
        self._born, self._execute, self._note = born, execute, note
        self._zygotes: list[_Zygote] = []  # until they are reaped
        self._given_up: list[tuple[Client, Frame]] = []
        self._asked: _Asked | None = None

    def __bool__(self) -> bool:
        return bool(self._zygotes)

    @property
    def pids(self) -> set[int]:
        """The zygotes themselves, and their sessions: what is in those is no stray."""
        return {zygote.ref.pid for zygote in self._zygotes}

    @property
    def left_ms(self) -> float | None:
        """How long the keeper may wait for an event; None when nothing is owed."""
        return None if self._asked is None else max(0.0, self._asked.due - time.monotonic()) * 1e3

    # -- what the keeper asks for

    def take(self, order: Order) -> bool:
        """Take an order on; False when it is to be started as a program of its own."""
        wants = {what: order.frame["fork"][what] for what in ("preload", "path", "cwd")}
        if (order.client, wants) in self._given_up:
            return False
        zygote = next((it for it in self._zygotes if self._serves(it, order.client, wants)), None)
        try:
            zygote = zygote or self._start(order, wants)
            order.keep()
        except OSError as error:
            self._note(order.client, f"no zygote can be started: {error.strerror}")
            return False
        zygote.orders.append(order)
        self._ask_next()
        return True

    @staticmethod
    def _serves(zygote: _Zygote, client: Client, wants: Frame) -> bool:
        return zygote.client is client and zygote.wants == wants and zygote.state != _LEAVING

    def _start(self, order: Order, wants: Frame) -> _Zygote:
        env = self._record.marked(order.frame["env"])
        ref, sock = spawn_zygote(str(order.frame["argv"][0]), env)
        leaf = self._cgroup.leaf()
        if leaf is not None:
            leaf.admit(ref.pid)
        self._record.note_process("zygote", "zygote", self._number(ref), ref.start)
        zygote = _Zygote(order.client, wants, ref, Channel(sock), leaf)
        self._zygotes.append(zygote)
        for it in (zygote.channel, ref):
            self._poll.register(it.fileno(), select.POLLIN)
        self._send(zygote, {"op": "preload", **wants})
        return zygote

    def cancel(self, client: Client, ident: int) -> bool:
        """Forget an order, asked for or not; False when there is none with this number."""
        asked = self._asked
        order = None if asked is None else asked.order
        if asked is not None and order is not None and _is(order, client, ident):
            asked.call_off()
            return True
        for zygote in self._zygotes:
            for order in [it for it in zygote.orders if _is(it, client, ident)]:
                zygote.orders.remove(order)
                order.close()
                return True
        return False

    def dismiss(self, client: Client) -> None:
        """End the zygotes of a client that is gone, and forget what it had asked for."""
        self._given_up = [it for it in self._given_up if it[0] is not client]
        for zygote in [it for it in self._zygotes if it.client is client]:
            for order in zygote.orders:
                order.close()
            zygote.orders.clear()
            asked = self._no_more_asked(zygote)
            if asked is not None:
                asked.call_off()  # one that is born all the same is a stray
                asked.close()
            self._end(zygote)

    # -- what happens

    def dispatch(self, fd: int) -> bool:
        """Take an event of a zygote; False when it is none of ours."""
        for zygote in self._zygotes:
            if zygote.channel.fileno() == fd:
                self._hear(zygote)
                return True
            if zygote.ref.fileno() == fd:
                self._bury(zygote)
                return True
        return False

    def tick(self) -> None:
        """Give up a zygote that has owed a fork for too long."""
        if self._asked is not None and time.monotonic() >= self._asked.due:
            self._give_up(self._asked.zygote, f"has not answered for {_ANSWER_S:g} s")

    def _hear(self, zygote: _Zygote) -> None:
        try:
            frames = zygote.channel.receive()
        except ProtocolError as error:
            self._give_up(zygote, f"broke the protocol: {error}")
            return
        for frame, fds in frames:
            for fd in fds:
                os.close(fd)
            if zygote.state != _LEAVING:
                self._heard(zygote, frame)
        if zygote.channel.eof:
            self._hang_up(zygote)  # its pidfd tells the rest
        else:
            zygote.channel.keep_up(self._poll)

    def _heard(self, zygote: _Zygote, frame: Frame) -> None:
        kind = frame.get("ev")
        if kind == "ready" and zygote.state == _IMPORTING:
            zygote.state = _READY
        elif kind == "unfit":
            self._give_up(zygote, str(frame.get("why")))
        elif kind in {"forked", "failed"} and self._owes(zygote):
            pid = frame.get("pid")  # what it imported could have it say anything
            self._take_in(zygote, pid if isinstance(pid, int) else 0)
        else:
            self._give_up(zygote, "spoke out of turn")
        self._ask_next()

    def _owes(self, zygote: _Zygote) -> bool:
        return self._asked is not None and self._asked.zygote is zygote

    def _no_more_asked(self, zygote: _Zygote) -> _Asked | None:
        """Forget the fork that a zygote owes, if it owes one; the caller closes it."""
        if not self._owes(zygote):
            return None
        asked, self._asked = self._asked, None
        return asked

    # -- births

    def _ask_next(self) -> None:
        for zygote in list(self._zygotes):
            while self._asked is None and zygote.state == _READY and zygote.orders:
                self._ask(zygote, zygote.orders.popleft())

    def _ask(self, zygote: _Zygote, order: Order) -> None:
        try:
            layout = Layout(order)
        except OSError:  # no descriptor left; if there is none for an exec either, that says so
            self._by_exec(order)
            return
        try:
            gate_in, gate = os.pipe()
        except OSError:
            layout.close()
            self._by_exec(order)
            return
        asked = self._asked = _Asked(zygote, order, gate, layout)
        words = [*order.frame["fork"]["words"], str(os.getpid())]
        frame = {"op": "fork", "words": words, "env": order.env, "targets": layout.targets}
        sent = self._send(zygote, frame, [gate_in, *layout.fds])
        os.close(gate_in)
        if not sent:
            self._asked = None
            asked.close()
            self._by_exec(order)

    def _take_in(self, zygote: _Zygote, pid: int) -> None:
        """The fork was made: take hold of the worker, before it does anything."""
        asked = self._no_more_asked(zygote)
        assert asked is not None
        order = asked.order
        if order is not None:
            ref = _newborn(zygote, pid)
            if ref is None:  # it is dead, or never was
                self._by_exec(order)
            else:
                leaf = self._cgroup.leaf()
                if leaf is not None and not leaf.admit(pid):
                    self._spare(zygote)
                asked.let_in()
                self._born(order, ref, asked.layout.handed_on(), leaf)
                order.close()
        asked.close()

    def _by_exec(self, order: Order) -> None:
        self._execute(order)
        order.close()

    # -- ends

    def _give_up(self, zygote: _Zygote, why: str) -> None:
        """End a zygote that is of no use; who was to be born of it is started another way."""
        if zygote.state == _LEAVING:
            return
        self._given_up.append((zygote.client, zygote.wants))
        self._note(zygote.client, f"the zygote {why}; workers start without one from now on")
        self._end(zygote)
        orders, zygote.orders = list(zygote.orders), deque()
        asked = self._no_more_asked(zygote)
        if asked is not None:
            if asked.order is not None:
                orders.insert(0, asked.order)
            asked.close()
        for order in orders:
            self._by_exec(order)
        self._ask_next()

    def _end(self, zygote: _Zygote) -> None:
        zygote.state = _LEAVING
        zygote.ref.try_send(signal.SIGKILL)
        self._hang_up(zygote)

    def _hang_up(self, zygote: _Zygote) -> None:
        if zygote.channel.fileno() >= 0:
            self._poll.unregister(zygote.channel.fileno())
            zygote.channel.close()

    def _spare(self, zygote: _Zygote) -> None:
        """A worker had to stay in the zygote's cgroup, which is not to be killed then."""
        leaf, zygote.leaf = zygote.leaf, None
        self._cgroup.bury(leaf)

    def _bury(self, zygote: _Zygote) -> None:
        """A zygote is dead: end what it left in its group and its cgroup, then reap it.

        What else it left comes to the keeper, as any worker's strays do.
        """
        try:
            end = peek_exit(zygote.ref)
        except ChildProcessError:
            end = Exit()
        if end is None:
            return  # an event of a number that meant another descriptor a moment ago
        self._give_up(zygote, f"was {end}" if end.signal else f"ended ({end})")
        if zygote.leaf is not None:
            zygote.leaf.kill()
        signal_group_of(zygote.ref, signal.SIGKILL)
        self._poll.unregister(zygote.ref.fileno())
        self._hang_up(zygote)
        reap(zygote.ref)
        zygote.ref.close()
        self._zygotes.remove(zygote)
        self._cgroup.bury(zygote.leaf)
        self._ask_next()

    # -- the socket

    def _send(self, zygote: _Zygote, frame: Frame, fds: Sequence[int] = ()) -> bool:
        """Whether it went out, or will; the end of a zygote is an event of its own."""
        try:
            zygote.channel.send(frame, fds)
        except (OSError, ProtocolError):
            return False
        zygote.channel.keep_up(self._poll)
        return True


def _is(order: Order, client: Client, ident: int) -> bool:
    return order.client is client and order.id == ident


def _newborn(zygote: _Zygote, pid: int) -> ProcessRef | None:
    """Take hold of the worker that a zygote says it has forked, if that is what it is.

    A child of ours in the zygote's session can be nothing else: workers have their own.
    """
    stat = read_stat(pid) if pid > 0 else None
    if stat is None or stat.ppid != os.getpid() or stat.session != zygote.ref.pid:
        return None
    if stat.state == "Z":
        return None
    try:
        return ProcessRef.open(pid, stat.start)
    except OSError:
        return None
