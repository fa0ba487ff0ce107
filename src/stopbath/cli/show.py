"""Tables and lines for people: plain text anywhere, the same with colours on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Column", "duration", "memory", "say", "table", "width"]

_NARROWEST, _PLAIN = 60, 80


class Column(NamedTuple):
    """A column: its title, its width, and on which side it is aligned."""

    title: str
    width: int
    align: Literal["<", ">"] = "<"


def width() -> int:
    """Give the columns there are: the terminal's, or 80 for a file or a pipe."""
    if not sys.stdout.isatty():
        return _PLAIN
    return max(_NARROWEST, shutil.get_terminal_size((_PLAIN, 24)).columns)


def say(line: str = "", style: str = "") -> None:
    """Write one line; `style` is rich's, and is left out where there is no terminal."""
    if not sys.stdout.isatty():
        sys.stdout.write(line + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    Console(soft_wrap=True, highlight=False).print(Text(line, style=style))


def remark(line: str, style: str = "") -> None:
    """Write a sentence, wrapped to the width."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    for part in textwrap.wrap(line, width(), subsequent_indent=indent, break_on_hyphens=False):
        say(part, style)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], style: str = "bold") -> None:
    """Write rows in columns; the last column takes what is left of the width."""
    *fixed, last = columns
    rest = max(last.width, width() - sum(column.width + 1 for column in fixed))
    sized = [*fixed, last._replace(width=rest)]
    say(_row(sized, [column.title for column in columns]), style)
    for row in rows:
        say(_row(sized, row))


def _row(columns: Sequence[Column], cells: Sequence[str]) -> str:
    parts = []
    for column, cell in zip(columns, cells, strict=True):
        cut = cell if len(cell) <= column.width else cell[: column.width - 1] + "…"
        parts.append(f"{cut:{column.align}{column.width}}")
    return " ".join(parts).rstrip()


def duration(seconds: float) -> str:
    """Say an age in at most six characters."""
    for size, unit, below in ((86400, "d", "h"), (3600, "h", "m"), (60, "m", "s")):
        if seconds >= size:
            finer = size // (24 if unit == "d" else 60)
            return f"{seconds // size:.0f}{unit}{seconds % size // finer:.0f}{below}"
    return f"{seconds:.0f}s"


def memory(count: int | None) -> str:
    """Say bytes in at most six characters; nothing for None."""
    if count is None:
        return ""
    size = float(count)
    for unit in ("B", "K", "M"):
        if size < 1000:  # noqa: PLR2004  (four digits would not fit)
            return f"{size:.0f}{unit}"
        size /= 1024
    return f"{size:.1f}G"
