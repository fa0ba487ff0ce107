"""Ranks leave a call together: two threads stand for two ranks, a barrier for the collective."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective import RANKS, Table

torch = pytest.importorskip("torch")

from stopbath.pipelines.base import Cancelled, PeerFailed  # noqa: E402
from stopbath.pipelines.joint import JointCall, Verdict  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 5.0
NEVER = 10**6


@dataclass
class FakePeers:
    """`Peers` over a `Table`."""

    rank: int
    table: Table
    made: list[Any] = field(default_factory=list)

    def exchange(
        self, data: Any, verdict: Verdict, call_id: int
    ) -> tuple[list[Any], list[Verdict]]:
        """Exchange as `Peers` does, and insist that both ranks are at the same exchange."""
        shape = None if data is None else tuple(data.shape)
        seen = self.table.gather(self.rank, (data, verdict, call_id, shape))
        assert len({(entry[2], entry[3]) for entry in seen}) == 1, f"different exchanges: {seen}"
        self.made.append(shape)
        parts = [entry[0] for entry in seen]
        return parts, [entry[1] for entry in seen]


@dataclass(frozen=True)
class Fate:
    """When a rank sees the cancel and when it fails, in looks at the flag and in actions."""

    cancelled_from: int
    fails_at: int


def run_call(peers: FakePeers, call_id: int, steps: int, fate: Fate) -> str:
    """Play one call: encode, open, share the steps, decode; say how it ended."""
    looks = actions = 0

    def cancelled() -> bool:
        nonlocal looks
        looks += 1
        return looks > fate.cancelled_from

    def act() -> None:
        nonlocal actions
        actions += 1
        if actions > fate.fails_at:
            raise MemoryError

    half = torch.full((1, 2), float(peers.rank))
    try:
        with JointCall(peers, call_id, cancelled) as call:  # type: ignore[arg-type]
            act()
            call.open(torch.zeros(1, 2))
            for _ in range(steps):
                act()
                whole = torch.cat(call.share(half))
                assert whole.tolist() == [[0.0, 0.0], [1.0, 1.0]]
            act()
    except (Cancelled, PeerFailed, MemoryError) as error:
        return type(error).__name__
    return "done"


def on_both(play: Callable[[FakePeers], list[str]]) -> tuple[list[FakePeers], list[list[str]]]:
    table = Table(WAIT_S)
    peers = [FakePeers(rank, table) for rank in range(RANKS)]
    ends: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            ends[rank] = play(peers[rank])
        except BaseException as error:  # noqa: BLE001  (a broken barrier is the failure)
            ends[rank] = [repr(error)]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT_S)
    return peers, ends


moments = st.integers(0, 8) | st.just(NEVER)
fates = st.builds(Fate, moments, moments)


@settings(max_examples=150, deadline=None)
@given(steps=st.integers(0, 4), calls=st.lists(st.tuples(fates, fates), min_size=1, max_size=3))
def test_ranks_make_the_same_exchanges_whatever_happens_to_each(
    steps: int, calls: list[tuple[Fate, Fate]]
) -> None:
    """A cancel or an error of one rank at any moment ends the call on both; the next one works."""

    def play(peers: FakePeers) -> list[str]:
        ends = [run_call(peers, i, steps, fate[peers.rank]) for i, fate in enumerate(calls)]
        return [*ends, run_call(peers, NEVER, 1, Fate(NEVER, NEVER))]

    peers, (one, two) = on_both(play)
    assert peers[0].made == peers[1].made
    assert one[-1] == two[-1] == "done"
    for ours, theirs in zip(one, two, strict=True):
        assert (ours == "done") == (theirs == "done")
        assert (ours == "Cancelled") == (theirs == "Cancelled")


def test_without_shared_steps_nothing_more_is_exchanged() -> None:
    """Guidance is off: after the opening each rank computes everything, alone."""

    def play(peers: FakePeers) -> list[str]:
        with JointCall(peers, 1, lambda: False) as call:  # type: ignore[arg-type]
            call.open(None)
            assert not call.sharing
        return ["done"]

    peers, ends = on_both(play)
    assert ends == [["done"]] * RANKS
    assert peers[0].made == [None]


def test_the_opening_of_a_call_that_is_not_wanted_skips_the_prompt() -> None:
    """A rank that knows of the cancel before it begins still meets its peer, which does not."""

    def play(peers: FakePeers) -> list[str]:
        fate = Fate(0, NEVER) if peers.rank == 0 else Fate(NEVER, NEVER)
        return [run_call(peers, 1, 3, fate), run_call(peers, 2, 1, Fate(NEVER, NEVER))]

    _, ends = on_both(play)
    assert ends == [["Cancelled", "done"]] * RANKS
