"""A rank's serve loop over a socketpair, with methods in place of a model."""

from __future__ import annotations

import select
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from stopbath.messages import (
    CANCELLED,
    PEER_LOST,
    Call,
    Cancel,
    Failure,
    FromRank,
    Progress,
    Reply,
)
from stopbath.pipelines.base import Cancelled, PeerLost
from stopbath.wire import Channel
from stopbath.worker import loop as loop_module
from stopbath.worker.loop import CallWatch, RankLoop

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 10.0


class Served:
    """A loop on a thread, and the server's end of its channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel: Channel[Any] = Channel(ours, FromRank)
        self._sock = ours
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.log: list[Any] = []
        self.ended: list[Any] = []
        methods = {"note": self._note, "hold": self._hold, "steps": _steps, "lose": _lose}
        self.loop = RankLoop(theirs, methods)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.ended.append(self.loop.serve())
        except Exception as error:  # noqa: BLE001
            self.ended.append(error)

    def _note(self, params: Any, _watch: CallWatch) -> Any:
        self.log.append(params)
        return params

    def _hold(self, _params: Any, watch: CallWatch) -> str:
        """Hold until cancelled or told to go on, as a denoising loop does between its steps."""
        self.began.set()
        while not self.go_on.wait(0.002):
            if watch.cancelled:
                raise Cancelled("given up")
        return "held"

    def send(self, *messages: Any) -> None:
        """Send messages, in order."""
        for message in messages:
            self.channel.send(message)

    def receive(self, count: int) -> list[Any]:
        """Wait for `count` messages."""
        got: list[Any] = []
        while len(got) < count and not self.channel.eof:
            assert select.select([self.channel], [], [], WAIT_S)[0], f"only {got} came"
            got += self.channel.receive()
        return got

    def end(self) -> Any:
        """Wait for the end of `serve`: what it gave, or what it raised."""
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.ended[0]


def _steps(params: int, watch: CallWatch) -> None:
    for step in range(params):
        watch.progress(step + 1, params)


def _lose(_params: Any, _watch: CallWatch) -> None:
    raise PeerLost("connection closed by peer")


@pytest.fixture
def served() -> Iterator[Served]:
    before = threading.active_count()
    rank = Served()
    yield rank
    rank.go_on.set()
    rank.channel.close()
    rank.end()
    assert threading.active_count() == before


def test_calls_are_answered_in_order_and_errors_are_answers(served: Served) -> None:
    """An unknown method, or one that raises, ends its own call and not the rank."""
    served.send(
        Call(id=1, method="note", params=1),
        Call(id=2, method="nothing", params=None),
        Call(id=3, method="steps", params="no number"),
        Call(id=4, method="note", params=4),
    )
    one, two, three, four = served.receive(4)
    assert one == Reply(id=1, value=1)
    assert (two.id, two.kind) == (2, "LookupError")
    assert (three.id, three.kind) == (3, "TypeError")
    assert "_steps" in three.traceback
    assert four == Reply(id=4, value=4)


def test_a_cancel_reaches_a_running_call(served: Served) -> None:
    """The channel is read while the main thread computes."""
    served.send(Call(id=1, method="hold", params=None))
    assert served.began.wait(WAIT_S)
    served.send(Cancel(id=1))
    (failure,) = served.receive(1)
    assert isinstance(failure, Failure)
    assert failure.kind == CANCELLED


def test_a_cancel_never_reaches_another_call(served: Served) -> None:
    """Cancels of finished and of unknown calls are dropped, and nothing of them is kept."""
    served.send(Call(id=1, method="note", params=1))
    served.receive(1)
    served.send(Cancel(id=1), Cancel(id=2), Call(id=2, method="hold", params=None))
    assert served.began.wait(WAIT_S)
    served.go_on.set()
    assert served.receive(1) == [Reply(id=2, value="held")]
    assert not served.loop._inbox._cancelled


def test_a_deadline_gives_a_call_up_without_a_cancel(served: Served) -> None:
    served.send(Call(id=1, method="hold", params=None, left_s=0.02))
    (failure,) = served.receive(1)
    assert failure.kind == CANCELLED


def test_a_stop_finishes_what_was_accepted(served: Served) -> None:
    served.send(Call(id=1, method="hold", params=None), Call(id=2, method="note", params=2))
    assert served.began.wait(WAIT_S)
    served.loop.stop()
    served.go_on.set()
    assert served.receive(2) == [Reply(id=1, value="held"), Reply(id=2, value=2)]
    assert served.end() is None


def test_an_idle_rank_stops_at_once(served: Served) -> None:
    served.loop.stop()
    assert served.end() is None


def test_without_a_server_a_running_call_is_given_up(served: Served) -> None:
    """The end of the channel ends the loop with the reason, also in the middle of a call."""
    served.send(Call(id=1, method="hold", params=None))
    assert served.began.wait(WAIT_S)
    served.channel.close()
    assert "closed the data channel" in served.end()


def test_a_server_that_talks_nonsense_ends_the_rank(served: Served) -> None:
    served._sock.send(b"\xff" * 64)
    assert "not a frame" in served.end()


def test_progress_is_throttled_and_its_last_step_comes(served: Served) -> None:
    served.send(Call(id=1, method="steps", params=1000))
    messages: list[Any] = []
    while not any(isinstance(message, Reply) for message in messages):
        messages += served.receive(1)
    steps = [message.step for message in messages if isinstance(message, Progress)]
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert len(steps) < 20


def test_a_reply_waits_for_a_slow_server_and_arrives_whole(served: Served) -> None:
    """More than the socket holds is sent on by the reader thread, without another wake-up."""
    big = "x" * (4 << 20)
    served.send(Call(id=1, method="note", params=big))
    while len(served.log) < 1:
        served.channel.flush()
    assert served.receive(1) == [Reply(id=1, value=big)]


def test_a_rank_without_peers_answers_and_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the first word to the dead peer, and ends by itself when nobody stops it."""
    monkeypatch.setattr(loop_module, "_LAST_WORD_S", 0.05)
    served.send(Call(id=1, method="lose", params=None))
    (failure,) = served.receive(1)
    assert failure.kind == PEER_LOST
    assert isinstance(served.end(), PeerLost)
