"""What unit tests share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A server process configures logging for good; these tests run it in theirs."""
    root = logging.getLogger()
    handlers, raising = list(root.handlers), logging.raiseExceptions
    yield
    root.handlers[:], logging.raiseExceptions = handlers, raising
    structlog.reset_defaults()
