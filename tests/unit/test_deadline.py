from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopbath.lifecycle import Deadline

times = st.floats(allow_nan=False)


def test_a_deadline_in_the_past_acts_as_now() -> None:
    assert Deadline.after(-5).passed
    assert Deadline.after(-5).left_s() == 0
    assert Deadline(0).left_s() == 0


def test_never_does_not_come() -> None:
    assert not Deadline.never().passed
    assert Deadline.never().left_s() == math.inf


@pytest.mark.parametrize("make", [Deadline, Deadline.after])
def test_nan_is_refused_however_it_comes(make: type[Deadline]) -> None:
    with pytest.raises(ValueError, match="NaN"):
        make(math.nan)


@given(times, times)
def test_sooner_is_the_earlier_of_the_two(one: float, other: float) -> None:
    assert Deadline(one).sooner(Deadline(other)).at_s == min(one, other)


@given(times)
def test_the_time_left_is_never_negative(at_s: float) -> None:
    assert Deadline(at_s).left_s() >= 0


def test_its_repr_tells_the_time_left() -> None:
    assert repr(Deadline.after(1e6)).startswith(("<Deadline in 999999.", "<Deadline in 1000000."))
