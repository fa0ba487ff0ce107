"""How a worker learns that whoever owns it is dead, when nobody is left to end it.

Two ways, chosen here once per platform and handed to the worker at its birth:

* `kernel`: the parent-death signal (prctl(2)) against the keeper. Also ends a worker that sits in
  C code with the interpreter locked; is lost by setuid and by any change of uid or gid.
* `socket`: a thread of the worker waits for the end of two descriptors, the control socket (its
  supervisor is dead) and a pipe whose other end the keeper alone holds (the keeper is dead). Needs
  nothing but poll(2); a thread of a locked interpreter does not run.
"""

from __future__ import annotations

import _thread
import select
import sys
from typing import TYPE_CHECKING, Final, Literal

from stopbath.lifecycle._process import die_with_group

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PARENT_DEATH", "ParentDeath", "watch_ends"]

ParentDeath = Literal["kernel", "socket"]

PARENT_DEATH: Final[ParentDeath] = "kernel" if sys.platform == "linux" else "socket"


def watch_ends(fds: Sequence[int]) -> None:
    """Have this process and its group killed once the other end of one of `fds` is gone."""
    _thread.start_new_thread(_watch, (tuple(fds),))


def _watch(fds: tuple[int, ...]) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, 0)  # what is sent is another thread's; the end is reported unasked
    poll.poll()
    die_with_group()
