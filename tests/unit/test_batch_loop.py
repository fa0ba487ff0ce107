"""The serve loop of step mode over a socketpair, with a model that counts instead of computing."""

from __future__ import annotations

import queue
import select
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from observing import wait_until
from stopbath.errors import RequestInvalid
from stopbath.lifecycle import Deadline
from stopbath.messages import (
    CANCELLED,
    GENERATE,
    PING,
    REQUEST_INVALID,
    Call,
    Cancel,
    Failure,
    FromRank,
    GenerationRequest,
    Hold,
    Progress,
    Reply,
    Resume,
)
from stopbath.wire import Channel

pytest.importorskip("torch")

from stopbath.worker.batch import BatchLoop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WAIT_S = 10.0


@dataclass(eq=False)
class Counted:
    """A sample that is over after so many calls; width stands for all that makes a shape."""

    prompt: str
    shape: int
    pictures: int
    steps: int
    steps_done: int = 0

    @property
    def over(self) -> bool:
        """Whether it has had its steps."""
        return self.steps_done == self.steps


class Counting:
    """A model that takes a step when the test says so. The prompt says what goes wrong."""

    def __init__(self) -> None:
        self.at: queue.Queue[str] = queue.Queue()
        self.go: queue.Queue[None] = queue.Queue()

    def begin(self, requests: Sequence[GenerationRequest]) -> list[Any]:
        """Refuse the bad ones."""
        return [
            RequestInvalid("no such prompt")
            if request.prompt == "bad"
            else Counted(request.prompt, request.width, request.n, request.num_inference_steps)
            for request in requests
        ]

    def step(self, samples: Sequence[Counted]) -> list[Exception | None]:
        """Say who is in the call, wait to be let go, count."""
        self.at.put(" ".join(sample.prompt for sample in samples))
        self.go.get(timeout=WAIT_S)
        if any(sample.prompt == "explodes" for sample in samples):
            raise MemoryError("no memory left")
        errors: list[Exception | None] = []
        for sample in samples:
            stumbles = sample.prompt == "stumbles"
            errors.append(ArithmeticError("no such sigma") if stumbles else None)
            sample.steps_done += not stumbles
        return errors

    def finish(self, samples: Sequence[Counted]) -> list[Any]:
        """Give no pictures."""
        if any(sample.prompt == "undecodable" for sample in samples):
            raise MemoryError("no memory left")
        return [[] for _ in samples]


class Served:
    """A loop on a thread, and the server's end of its channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel: Channel[Any] = Channel(ours, FromRank)
        self.model = Counting()
        methods = {PING: lambda params, _watch: params}
        self.loop = BatchLoop(theirs, methods, self.model, 4)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.loop.serve, daemon=True)
        self.thread.start()

    def call(
        self, call_id: int, prompt: str, *, steps: int = 2, n: int = 1, width: int = 8
    ) -> None:
        """Send a request and wait until the rank has read it."""
        request = GenerationRequest(
            id=prompt,
            prompt=prompt,
            n=n,
            width=width,
            height=8,
            seed=0,
            num_inference_steps=steps,
            guidance_scale=1.0,
        )
        self.send(Call(id=call_id, method=GENERATE, params=msgspec.to_builtins(request)))

    def send(self, message: Call | Cancel | Hold | Resume) -> None:
        """Send a message and wait until the rank has read it."""
        inbox = self.loop._inbox
        self.channel.send(message)
        if isinstance(message, Resume):
            wait_until(lambda: message.id not in inbox._held, Deadline.after(WAIT_S))
            return
        known = {Call: inbox._open, Cancel: inbox._cancelled, Hold: inbox._held}[type(message)]
        wait_until(lambda: message.id in known, Deadline.after(WAIT_S))

    def at(self) -> str:
        """Wait for the next model call: the prompts in it."""
        return self.model.at.get(timeout=WAIT_S)

    def turn(self) -> str:
        """Let the model call that has begun end, and wait for the next one."""
        self.model.go.put(None)
        return self.at()

    def answers(self, count: int) -> list[Any]:
        """Wait for the answers of `count` calls."""
        got: list[Any] = []
        while len(got) < count:
            assert select.select([self.channel], [], [], WAIT_S)[0], f"only {got} came"
            got += [m for m in self.channel.receive() if not isinstance(m, Progress)]
        return got


@pytest.fixture
def served() -> Iterator[Served]:
    rank = Served()
    yield rank
    for _ in range(100):
        rank.model.go.put(None)
    rank.channel.close()
    rank.thread.join(WAIT_S)
    assert not rank.thread.is_alive()


def test_a_request_joins_at_the_next_step_and_leaves_when_it_is_done(served: Served) -> None:
    served.call(1, "a", steps=3)
    assert served.at() == "a"
    served.call(2, "b", steps=1)
    assert served.turn() == "a b"
    assert served.turn() == "a"
    (answer,) = served.answers(1)
    assert (type(answer), answer.id) == (Reply, 2)
    served.model.go.put(None)
    assert served.answers(1)[0].id == 1


def test_a_cancel_ends_one_of_three_at_the_next_step(served: Served) -> None:
    served.call(1, "a", steps=9)
    assert served.at() == "a"
    served.call(2, "b")
    served.call(3, "c")
    served.send(Cancel(id=2))
    assert served.turn() == "a c"
    (failure,) = served.answers(1)
    assert (failure.id, failure.kind) == (2, CANCELLED)
    served.call(4, "d")
    served.send(Cancel(id=1))
    assert served.turn() == "c d"
    (failure,) = served.answers(1)
    assert (failure.id, failure.message) == (1, "given up after step 2 of 9")
    served.model.go.put(None)
    assert served.answers(1)[0].id == 3


def test_a_request_that_cannot_begin_or_step_ends_alone(served: Served) -> None:
    served.call(1, "a")
    assert served.at() == "a"
    served.call(2, "bad")
    served.call(3, "stumbles")
    served.channel.send(Call(id=4, method=GENERATE, params={"prompt": 1}))
    served.send(Call(id=5, method=PING, params=5))
    assert served.turn() == "a stumbles"
    served.model.go.put(None)
    answers = {answer.id: answer for answer in served.answers(5)}
    assert answers[2].kind == REQUEST_INVALID
    assert answers[3].kind == "ArithmeticError"
    assert answers[4].kind == "ValidationError"
    assert answers[5].value == 5
    assert isinstance(answers[1], Reply)


def test_an_error_of_the_model_ends_those_in_the_call(served: Served) -> None:
    """Another batch, of another size, goes on; and so does the rank."""
    served.call(1, "a", steps=9)
    assert served.at() == "a"
    served.call(2, "explodes")
    served.call(3, "wide", width=16)
    assert served.turn() == "a explodes"
    assert served.turn() == "wide"
    failures = served.answers(2)
    assert {failure.id for failure in failures} == {1, 2}
    assert all(failure.kind == "MemoryError" for failure in failures)
    served.call(4, "b")
    assert [served.turn() for _ in range(3)] == ["wide", "b", "b"]
    served.model.go.put(None)
    assert {answer.id for answer in served.answers(2)} == {3, 4}


def test_pictures_that_cannot_be_decoded_end_their_request(served: Served) -> None:
    served.call(1, "undecodable", steps=1)
    served.model.go.put(None)
    assert served.answers(1)[0].kind == "MemoryError"


def test_sizes_take_turns(served: Served) -> None:
    served.call(1, "a", steps=3)
    assert served.at() == "a"
    served.call(2, "wide", steps=3, width=16)
    served.call(3, "b", steps=3)
    assert [served.turn() for _ in range(4)] == ["a b", "wide", "a b", "wide"]


def test_the_batch_has_a_capacity_in_pictures_and_nobody_is_overtaken(served: Served) -> None:
    served.call(1, "three", n=3)
    assert served.at() == "three"
    served.call(2, "two", n=2)
    served.call(3, "one", n=1)
    assert served.turn() == "three"
    assert served.turn() == "two one"


def test_a_request_above_the_capacity_runs_alone(served: Served) -> None:
    served.call(1, "a")
    assert served.at() == "a"
    served.call(2, "nine", n=9)
    assert served.turn() == "a"
    assert served.turn() == "nine"


def test_a_cancel_reaches_a_call_that_waits_for_room(served: Served) -> None:
    served.call(1, "four", n=4, steps=9)
    assert served.at() == "four"
    served.call(2, "a")
    assert served.turn() == "four"
    served.send(Cancel(id=2))
    assert served.turn() == "four"
    failure = served.answers(1)[0]
    assert isinstance(failure, Failure)
    assert (failure.id, failure.kind) == (2, CANCELLED)


def test_a_stop_finishes_what_was_accepted(served: Served) -> None:
    served.call(1, "four", n=4)
    assert served.at() == "four"
    served.call(2, "a", steps=1)
    served.loop.stop()
    for _ in range(3):
        served.model.go.put(None)
    assert [answer.id for answer in served.answers(2)] == [1, 2]
    served.thread.join(WAIT_S)
    assert not served.thread.is_alive()


def test_nothing_is_kept_of_calls_that_are_over(served: Served) -> None:
    for i in range(3):
        served.call(3 * i, "a", steps=1)
        assert served.at() == "a"
        served.call(3 * i + 1, "bad")
        served.call(3 * i + 2, "b")
        served.send(Cancel(id=3 * i + 2))
        served.model.go.put(None)
        served.answers(3)
    inbox, loop = served.loop._inbox, served.loop
    wait_until(lambda: not inbox._open, Deadline.after(WAIT_S))
    assert [*inbox._cancelled, *loop._running, *loop._waiting] == []


def test_a_call_on_hold_makes_no_step_and_goes_on_where_it_was(served: Served) -> None:
    """Its place in the batch is free meanwhile; what it has done is not done again."""
    served.call(1, "four", n=4, steps=3)
    assert served.at() == "four"
    served.send(Hold(id=1))
    served.call(2, "urgent", n=4, steps=2)
    assert [served.turn() for _ in range(2)] == ["urgent", "urgent"]
    served.model.go.put(None)
    assert served.answers(1)[0].id == 2
    served.send(Resume(id=1))
    assert [served.at(), served.turn()] == ["four", "four"]
    served.model.go.put(None)
    assert served.answers(1)[0].id == 1


def test_a_cancel_reaches_a_call_on_hold_while_nothing_else_runs(served: Served) -> None:
    served.call(1, "a", steps=9)
    assert served.at() == "a"
    served.send(Hold(id=1))
    served.model.go.put(None)
    wait_until(lambda: served.loop._running[0].sample.steps_done == 1, Deadline.after(WAIT_S))
    served.channel.send(Cancel(id=1))
    failure = served.answers(1)[0]
    assert (failure.kind, failure.message) == (CANCELLED, "given up after step 1 of 9")


def test_a_hold_that_comes_too_late_is_nothing(served: Served) -> None:
    served.call(1, "a", steps=1)
    assert served.at() == "a"
    served.send(Hold(id=1))
    served.model.go.put(None)
    assert isinstance(served.answers(1)[0], Reply), "its last step was under way"
    served.channel.send(Hold(id=1))
    served.call(2, "b", steps=1)
    assert served.at() == "b"
