"""Step mode on two ranks: two threads stand for them, a barrier for the collective."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective import RANKS, Table
from observing import wait_until
from stopbath.lifecycle import Deadline
from stopbath.messages import (
    CANCELLED,
    GENERATE,
    PEER_FAILED,
    PEER_LOST,
    PING,
    Call,
    Cancel,
    Failure,
    FromRank,
    GenerationRequest,
    Progress,
    Reply,
)
from stopbath.wire import Channel

pytest.importorskip("torch")

from stopbath.pipelines.base import PeerLost
from stopbath.worker import loop as loop_module
from stopbath.worker.joint import JointBatchLoop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CAPACITY = 4
WAIT_S = 10.0


@dataclass
class FakePeers:
    """`Peers` over a `Table`."""

    rank: int
    table: Table
    device: str = "cpu"
    world_size: int = RANKS

    def exchange(self, data: Any, verdict: Any, call_id: int) -> tuple[list[Any], list[Any]]:
        """Exchange as `Peers` does; a broken barrier is a dead peer."""
        try:
            seen = self.table.gather(self.rank, (data, verdict, call_id, "opening"))
        except threading.BrokenBarrierError as error:
            raise PeerLost(f"rank{self.rank} lost its peers") from error
        assert {(entry[2], entry[3]) for entry in seen} == {(call_id, "opening")}
        return [entry[0] for entry in seen], [entry[1] for entry in seen]


@dataclass(eq=False)
class Counted:
    """A sample that is over after so many steps."""

    prompt: str
    pictures: int
    steps: int
    steps_done: int = 0
    shape: int = 0

    @property
    def over(self) -> bool:
        """Whether it has had its steps."""
        return self.steps_done == self.steps


class Together:
    """A model whose steps are collectives: both ranks must make each with the same requests.

    A prompt names what goes wrong and where: "begin1" cannot begin on rank 1, "step0" stumbles
    there at its second step, "all" explodes on both.
    """

    def __init__(self, rank: int, table: Table) -> None:
        self.rank, self.table = rank, table
        self.steps = 0

    def begin(self, requests: Sequence[GenerationRequest]) -> list[Any]:
        """Begin, or have no memory for it on one rank."""
        return [
            MemoryError("no memory left")
            if request.prompt == f"begin{self.rank}"
            else Counted(request.prompt, request.n, request.num_inference_steps)
            for request in requests
        ]

    def step(self, samples: Sequence[Counted]) -> list[Exception | None]:
        """Meet the peer in a collective, then count."""
        self.steps += 1
        ours = [(sample.prompt, sample.steps_done) for sample in samples]
        seen = self.table.gather(self.rank, ours)
        assert seen[0] == seen[1], f"different batches: {seen}"
        if any(sample.prompt == "all" for sample in samples):
            raise ArithmeticError("not a number")
        errors: list[Exception | None] = []
        for sample in samples:
            stumbles = sample.prompt == f"step{self.rank}" and sample.steps_done == 1
            errors.append(ArithmeticError("no such sigma") if stumbles else None)
            sample.steps_done += not stumbles
        return errors

    def finish(self, samples: Sequence[Counted]) -> list[Any]:
        """Give no pictures; only one rank is asked for them."""
        assert self.rank == 0
        return [[] for _ in samples]


class Pair:
    """Two loops on threads, and the server's ends of their channels."""

    def __init__(self) -> None:
        table = Table(WAIT_S)
        self.table = table
        self.ends: list[Any] = [None] * RANKS
        self.channels: list[Channel[Any]] = []
        self.loops = []
        self.models = [Together(rank, table) for rank in range(RANKS)]
        self.threads = []
        for rank in range(RANKS):
            ours, theirs = socket.socketpair()
            self.channels.append(Channel(ours, FromRank))
            loop = JointBatchLoop(
                theirs,
                {PING: lambda params, _watch: params},
                self.models[rank],  # type: ignore[arg-type]
                CAPACITY,
                peers=FakePeers(rank, table),  # type: ignore[arg-type]
            )
            self.loops.append(loop)
            self.threads.append(threading.Thread(target=self.serve, args=(rank,), daemon=True))
            self.threads[-1].start()

    def serve(self, rank: int) -> None:
        """Serve; note how it ended."""
        try:
            self.ends[rank] = self.loops[rank].serve()
        except Exception as error:  # noqa: BLE001  (that is what the test looks at)
            self.ends[rank] = error

    def send(self, rank: int, message: Any) -> None:
        """Send one rank a message; the other may have it much later."""
        self.channels[rank].send(message)

    def answers(self, rank: int, ids: set[int]) -> dict[int, Any]:
        """Wait for the answers of these calls."""
        got: dict[int, Any] = {}
        while set(got) < ids:
            assert select.select([self.channels[rank]], [], [], WAIT_S)[0], f"only {got} came"
            for message in self.channels[rank].receive():
                if not isinstance(message, Progress):
                    assert message.id not in got, f"answered twice: {message}"
                    got[message.id] = message
        return got

    def made_steps(self, more: int) -> None:
        """Wait for so many more steps."""
        target = self.models[0].steps + more
        wait_until(lambda: self.models[0].steps >= target, Deadline.after(WAIT_S))

    def end(self) -> None:
        """Stop both."""
        for loop in self.loops:
            loop.stop()
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for channel in self.channels:
            channel.close()


@contextmanager
def paired() -> Iterator[Pair]:
    """Give a pair, and leave no thread of it behind, however the test ends."""
    pair = Pair()
    try:
        yield pair
    finally:
        for channel in pair.channels:
            channel.close()
        pair.end()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Give a pair."""
    with paired() as made:
        yield made


def generate(call_id: int, prompt: str, *, steps: int = 3, n: int = 1) -> Call:
    request = GenerationRequest(
        id=str(call_id),
        prompt=prompt,
        n=n,
        width=8,
        height=8,
        seed=0,
        num_inference_steps=steps,
        guidance_scale=1.0,
    )
    return Call(id=call_id, method=GENERATE, params=msgspec.to_builtins(request))


prompts = st.sampled_from(["fine", "fine", "begin0", "begin1", "step0", "step1", "all", "ping"])
told = st.tuples(prompts, st.integers(1, 4), st.integers(1, 3), st.booleans())


@settings(max_examples=40, deadline=None)
@given(calls=st.lists(told, min_size=1, max_size=8), chance=st.randoms(use_true_random=False))
def test_ranks_make_the_same_steps_whatever_comes_when(calls: list[Any], chance: Any) -> None:
    """Calls and cancels that reach the ranks at different times, and faults of one rank alone."""
    with paired() as pair:
        scripts: list[list[Any]] = [[], []]
        for i, (prompt, steps, n, cancelled) in enumerate(calls):
            call = generate(i, prompt, steps=100 if cancelled else steps, n=n)
            message = Call(id=i, method=PING, params=i) if prompt == "ping" else call
            for script in scripts:
                script.append(message)
                if cancelled:
                    script.insert(
                        chance.randint(script.index(message) + 1, len(script)), Cancel(id=i)
                    )
        while any(scripts):
            rank = chance.choice([rank for rank in range(RANKS) if scripts[rank]])
            pair.send(rank, scripts[rank].pop(0))
        one, two = (pair.answers(rank, set(range(len(calls)))) for rank in range(RANKS))
        pair.end()
    assert pair.ends == [None, None]
    assert pair.models[0].steps == pair.models[1].steps
    for i, (prompt, _, _, cancelled) in enumerate(calls):
        kinds = [getattr(each[i], "kind", None) for each in (one, two)]
        assert (kinds[0] is None) == (kinds[1] is None), (prompt, kinds)
        assert (CANCELLED in kinds) == (kinds == [CANCELLED] * 2)
        if not cancelled and prompt in {"begin0", "begin1"}:
            own = int(prompt[-1])
            assert (kinds[own], kinds[1 - own]) == ("MemoryError", PEER_FAILED)


def test_a_fault_of_one_rank_ends_its_request_on_both_and_no_other(pair: Pair) -> None:
    for rank in range(RANKS):
        for call in (generate(1, "fine"), generate(2, "begin1"), generate(3, "step0")):
            pair.send(rank, call)
    one, two = (pair.answers(rank, {1, 2, 3}) for rank in range(RANKS))
    assert [type(each[1]) for each in (one, two)] == [Reply, Reply]
    assert [each[2].kind for each in (one, two)] == [PEER_FAILED, "MemoryError"]
    assert [each[3].kind for each in (one, two)] == ["ArithmeticError", PEER_FAILED]
    pair.end()


def test_a_cancel_that_only_the_other_rank_has_read_waits_for_rank_0(pair: Pair) -> None:
    """For as many steps as it takes."""
    for rank in range(RANKS):
        pair.send(rank, generate(1, "fine", steps=10**6))
    pair.send(1, Cancel(id=1))
    pair.made_steps(20)
    wait_until(lambda: pair.loops[1]._inbox.given_up(1), Deadline.after(WAIT_S))
    pair.made_steps(20)
    pair.send(0, Cancel(id=1))
    assert [pair.answers(rank, {1})[1].kind for rank in range(RANKS)] == [CANCELLED] * 2
    pair.end()


def test_a_dead_peer_ends_the_rank(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the first word to the dead one, and ends by itself when nobody stops it."""
    monkeypatch.setattr(loop_module, "_LAST_WORD_S", 0.05)
    pair.table.barrier.abort()
    pair.send(0, generate(1, "fine"))
    pair.threads[0].join(WAIT_S)
    assert type(pair.ends[0]).__name__ == PEER_LOST
    pair.end()


def test_nothing_is_kept_of_calls_that_are_over(pair: Pair) -> None:
    for rank in range(RANKS):
        for call in (generate(1, "fine"), generate(2, "begin1"), generate(3, "step0")):
            pair.send(rank, call)
    for rank in range(RANKS):
        assert not any(isinstance(m, Failure) and m.id == 1 for m in pair.answers(rank, {1, 2, 3}))
    pair.end()
    for loop in pair.loops:
        kept = [*loop._queued, *loop._begun, *loop._stumbled, *loop._running, *loop._waiting]
        assert kept + list(loop._inbox._open) + list(loop._inbox._cancelled) == []
