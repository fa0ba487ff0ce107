"""One meaning per code; the precedence of design.md: 5 > 4 > 3 > 1 > 128+n > 0."""

from __future__ import annotations

import errno
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopbath.lifecycle import Exit
from stopbath.lifecycle._exitcode import Ending, run_exit_code, serve_exit_code

ASKED = Ending(
    exit=Exit(code=0),
    asked=True,
    was_ready=True,
    killed_by_us=False,
    survivors=False,
    signals=(signal.SIGTERM,),
)
KILLED = Exit(signal=signal.SIGKILL)

endings = st.builds(
    Ending,
    exit=st.one_of(
        st.builds(Exit, code=st.integers(0, 255), signal=st.none()),
        st.builds(Exit, code=st.none(), signal=st.integers(1, 64)),
        st.just(Exit()),
    ),
    asked=st.booleans(),
    was_ready=st.booleans(),
    killed_by_us=st.booleans(),
    survivors=st.booleans(),
    signals=st.lists(st.sampled_from([2, 15, 1, 3]), max_size=4).map(tuple),
    spawn_errno=st.sampled_from([0, errno.ENOENT, errno.EACCES]),
)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (ASKED, 0),
        (ASKED._replace(was_ready=False), 0),
        (ASKED._replace(exit=Exit(code=3)), 3),
        (ASKED._replace(exit=Exit(code=4)), 4),
        (ASKED._replace(exit=Exit(code=77)), 1),
        (ASKED._replace(signals=(15, 2)), 128 + 2),
        (ASKED._replace(signals=(2, 2, 2), exit=KILLED, killed_by_us=True), 128 + 2),
        (ASKED._replace(signals=(15, 15), exit=Exit(code=4)), 4),
        (ASKED._replace(exit=KILLED, killed_by_us=True), 1),
        (ASKED._replace(asked=False, signals=(), exit=KILLED), 4),
        (ASKED._replace(asked=False, signals=(), exit=KILLED, was_ready=False), 3),
        (ASKED._replace(exit=KILLED, lost=True), 4),
        (ASKED._replace(survivors=True), 5),
        (ASKED._replace(survivors=True, exit=Exit(code=4)), 5),
    ],
)
def test_serve(ending: Ending, code: int) -> None:
    assert serve_exit_code(ending) == code


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (ASKED, 0),
        (ASKED._replace(exit=Exit(code=77)), 77),
        (ASKED._replace(exit=Exit(signal=15)), 143),
        (ASKED._replace(exit=Exit(), spawn_errno=errno.ENOENT), 127),
        (ASKED._replace(exit=Exit(), spawn_errno=errno.EACCES), 126),
        (ASKED._replace(exit=Exit()), 125),
        (ASKED._replace(survivors=True), 125),
    ],
)
def test_run(ending: Ending, code: int) -> None:
    assert run_exit_code(ending) == code


@given(endings)
def test_every_ending_has_a_code_and_survivors_come_first(ending: Ending) -> None:
    code = serve_exit_code(ending)
    assert code in {0, 1, 2, 3, 4, 5} or code == 128 + ending.signals[-1]
    assert (code == 5) == ending.survivors
    assert 0 <= run_exit_code(ending) <= 255


@given(endings)
def test_serve_is_clean_only_when_it_was_asked_to_end_or_ended_with_zero(ending: Ending) -> None:
    if serve_exit_code(ending) == 0:
        assert ending.asked or ending.exit.code == 0
