"""The request's table."""

from __future__ import annotations

import itertools

import pytest

from stopbath.engine.request import (
    ENDED,
    REQUEST_TRANSITIONS,
    Request,
    RequestEvent,
    RequestState,
)
from stopbath.engine.state import ENGINE_TRANSITIONS, EngineEvent, EngineState, after
from stopbath.lifecycle import IllegalTransition


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)))
def test_only_the_tables_rows_can_happen(state: RequestState, event: RequestEvent) -> None:
    """What the table does not have is a typed error that says who, where and what."""
    request = Request("r1", "client", 0.0, state=state)
    if (state, event) in REQUEST_TRANSITIONS:
        request.apply(event)
        assert request.state is REQUEST_TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"request r1.*{event.value}.*{state.value}"):
            request.apply(event)
        assert request.state is state


def test_an_ended_request_has_no_way_out() -> None:
    """A request is answered once: nothing leads out of its last state."""
    assert not [row for row in REQUEST_TRANSITIONS if row[0] in ENDED]
    assert {RequestState.COMPLETED, RequestState.ABORTED, RequestState.ERROR} == ENDED


def test_an_engine_that_left_ready_never_comes_back() -> None:
    """Health never says ready again once a stop or a fault took it away."""
    gone = {EngineState.DRAINING, EngineState.DEAD, EngineState.STOPPED}
    assert not [row for row, to in ENGINE_TRANSITIONS.items() if row[0] in gone and to not in gone]
    with pytest.raises(IllegalTransition, match=r"engine.*ready.*stopped"):
        after(EngineState.STOPPED, EngineEvent.READY)
