"""Step mode on several ranks: who is in the batch is rank 0's decision, made known every turn.

Ranks that take in and leave on their own would part in the middle of a collective. So all ranks
make the same turns. A turn opens with one exchange (an all_gather of a few numbers), in which
rank 0 says which calls it takes and drops, and every rank says what went wrong on it since the
last one. What follows is the same on all ranks by construction: the same queue, the same batch,
the same model call. What can go wrong on one rank alone (memory, most often) changes nothing
until the next opening, where all hear of it and leave the request together:

    begin       a request has its first step in the turn after the one that took it in
    a step      a scheduler that fails; its request stays in the batch until the next opening
    the end     a request whose steps are done is finished after the next opening

An error of the model call itself is told in the call's own exchange (`RowSplit`), or, where the
call is full of collectives (`UlyssesSplit`), ends the replica.

A rank begins a turn while it has calls, or waits for one. Calls reach all ranks or none, and leave
them in the same turn, so no rank waits in an opening for one that has nothing to do.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from stopbath.messages import Reply
from stopbath.pipelines.base import PeerFailed, PeerLost
from stopbath.pipelines.joint import Verdict
from stopbath.wire import ChannelClosed
from stopbath.worker.batch import BatchLoop

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Iterable, Mapping

    from stopbath.messages import Call
    from stopbath.pipelines.base import Sample, StepPipeline
    from stopbath.pipelines.joint import Peers
    from stopbath.worker.batch import _Running, _Waiting
    from stopbath.worker.loop import CallWatch

__all__ = ["JointBatchLoop"]

_NEWS: Final = 64  # calls that an opening can take or drop, beside all that can go wrong


class _Opening(NamedTuple):
    """What all ranks know at the beginning of a turn: ids of calls."""

    taken: list[int]
    dropped: list[int]
    failed: list[int]  # on any rank


class JointBatchLoop(BatchLoop):
    """One rank of several that make the same turns."""

    def __init__(
        self,
        sock: socket.socket,
        methods: Mapping[str, Callable[[Any, CallWatch], Any]],
        pipeline: StepPipeline,
        capacity: int,
        *,
        peers: Peers,
        **how: Any,
    ) -> None:
        super().__init__(sock, methods, pipeline, capacity, **how)
        self._peers = peers
        self._width = 3 + 2 * capacity + _NEWS
        self._turns = 0
        self._queued: dict[int, Call] = {}  # read, and not taken by rank 0 yet
        self._begun: list[tuple[_Waiting, Sample | Exception]] = []  # since the last opening
        self._stumbled: dict[int, Exception] = {}  # since the last opening

    def _work(self) -> None:
        try:
            while self._anything():
                self._turn()
        except PeerLost:
            if not self._over_without_peers():
                raise

    def _anything(self) -> bool:
        """Read what has come, and wait for it while there is nothing to do; whether there is."""
        idle = not (self._queued or self._waiting or self._begun or self._running)
        if idle:
            self._line.wait()
        calls = self._inbox.take()
        self._queued |= {call.id: call for call in calls}
        return not self._inbox.ended and not (idle and not calls)

    def _turn(self) -> None:
        self._line.leave()
        opening = self._open()
        self._confirm(set(opening.failed))
        self._drop(opening.dropped)
        self._finish([run for run in self._running if run.sample.over])
        for call_id in opening.taken:
            self._accept(self._awaited(call_id))
        self._admit()
        if self._running:
            self._step()

    # -- the opening -----------------------------------------------------------------------

    def _open(self) -> _Opening:
        failed = [w.watch.call_id for w, made in self._begun if isinstance(made, Exception)]
        failed += self._stumbled
        room = self._width - 3 - len(failed)
        dropped = list(self._unwanted())[:room]
        taken = list(self._queued)[: room - len(dropped)]
        mine = [len(taken), len(dropped), len(failed), *taken, *dropped, *failed]
        mine += [0] * (self._width - len(mine))
        self._turns += 1
        sent = torch.tensor(mine, dtype=torch.int64).to(self._peers.device)
        parts, _ = self._peers.exchange(sent, Verdict.GO, self._turns)
        heard = [_read(part.cpu().view(torch.int64).tolist()) for part in parts]
        everybody = [call_id for each in heard for call_id in each.failed]
        return heard[0]._replace(failed=everybody)

    def _awaited(self, call_id: int) -> Call:
        """Give a call that rank 0 has read; this rank does so within a moment."""
        while call_id not in self._queued:
            self._line.wait()
            calls = self._inbox.take()
            if not calls:
                raise PeerLost(f"rank{self._peers.rank} was stopped before call {call_id} came")
            self._queued |= {call.id: call for call in calls}
        self._line.leave()
        return self._queued.pop(call_id)

    def _confirm(self, failed: Collection[int]) -> None:
        """Let in what has begun on every rank; have leave what went wrong on one."""
        begun, self._begun = self._begun, []
        for waiting, made in begun:
            own = made if isinstance(made, Exception) else None
            if own is not None or waiting.watch.call_id in failed:
                self._fail(waiting.watch.call_id, own or _elsewhere())
            else:
                super()._enter(waiting, made)
        stumbled, self._stumbled = self._stumbled, {}
        for run in [each for each in self._running if each.watch.call_id in failed]:
            self._leave([run], stumbled.get(run.watch.call_id) or _elsewhere())

    # -- what waits for the next one -----------------------------------------------------------

    def _unwanted(self) -> set[int]:
        begun = {w.watch.call_id for w, _ in self._begun if w.watch.cancelled}
        return super()._unwanted() | begun

    def _enter(self, waiting: _Waiting, sample: Sample | Exception) -> None:
        self._begun.append((waiting, sample))

    def _stumble(self, run: _Running, problem: Exception) -> None:
        self._stumbled[run.watch.call_id] = problem

    def _leave(self, runs: Iterable[_Running], error: Exception) -> None:
        super()._leave(runs, error)
        if isinstance(error, PeerLost):
            raise error

    def _finish(self, over: list[_Running]) -> None:
        """Make the pictures on rank 0; the others only say that they are done."""
        if self._peers.rank == 0:
            super()._finish(over)
            return
        for run in over:
            self._running.remove(run)
            with suppress(ChannelClosed):  # the reader sees it too: the loop ends at a next turn
                self._line.send(Reply(id=run.watch.call_id, value=None))
            self._inbox.done(run.watch.call_id)


def _read(numbers: list[int]) -> _Opening:
    taken, dropped, failed = numbers[:3]
    ids = iter(numbers[3:])
    return _Opening(*([next(ids) for _ in range(count)] for count in (taken, dropped, failed)))


def _elsewhere() -> PeerFailed:
    return PeerFailed("another rank could not go on with this request")
