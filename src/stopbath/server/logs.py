"""Logs to stderr that never block the loop: a full pipe costs lines, not answers."""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import Any

import structlog

__all__ = ["StderrLines", "configure"]

_QUEUE_LINES = 1000
_STDERR = 2


class StderrLines:
    """Writes lines on a thread of its own; drops, and says how many, when nobody reads."""

    def __init__(self, fd: int = _STDERR) -> None:
        self._fd = fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queue a line; never waits."""
        try:
            self._lines.put_nowait(text.rstrip("\n").encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Do nothing: writing is the thread's business (part of the file protocol)."""

    def close(self, within_s: float) -> None:
        """Let what is queued out, for at most so many seconds."""
        try:
            self._lines.put(None, timeout=within_s / 2)
        except queue.Full:
            return
        self._thread.join(within_s / 2)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line = b"stopbath: %d log lines were dropped\n" % dropped + line
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:  # nobody will ever read it: go on emptying the queue
                continue


class _ToLines(logging.Handler):
    """Sends what libraries log through the same door."""

    def __init__(self, lines: StderrLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.write(self.format(record))


def configure(lines: StderrLines) -> None:
    """Send structlog's events and the warnings of all libraries to `lines`."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(
                key_order=["timestamp", "level", "event"], drop_missing=True
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: _LineLogger(lines),
        cache_logger_on_first_use=False,
    )
    logging.getLogger().addHandler(_ToLines(lines))
    logging.raiseExceptions = False  # a handler's own error would be printed, and could block


class _LineLogger:
    """structlog's idea of an output: one method per level."""

    def __init__(self, lines: StderrLines) -> None:
        self._lines = lines

    def __getattr__(self, level: str) -> Any:
        return self._lines.write
