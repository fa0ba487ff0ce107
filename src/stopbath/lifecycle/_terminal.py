"""The terminal a run was started from, and who is in front of it (`run --tty`).

Signals are blocked in this process, so that handing the terminal on from the background, which
would stop it with SIGTTOU otherwise, simply works (tcsetpgrp(3)).
"""

from __future__ import annotations

import os
import termios

from stopbath.lifecycle._process import dup_high, read_stat

__all__ = ["Terminal", "under_job_control"]


class Terminal:
    """The terminal on stdin: lent to a process group, taken back at the end."""

    __slots__ = ("_fd", "_modes", "_own")

    def __init__(self) -> None:
        self._fd = dup_high(0)
        self._own = os.getpgrp()
        self._modes = termios.tcgetattr(self._fd)

    def lend(self, group: int) -> None:
        """Put a process group in front; not when we are in the background ourselves."""
        try:
            if os.tcgetpgrp(self._fd) == self._own:
                os.tcsetpgrp(self._fd, group)
        except OSError:
            return  # hung up, or the group has ended

    def take_back(self, *, reset: bool) -> None:
        """Be in front again; `reset` the modes too, which a program that was killed left as is."""
        try:
            if os.tcgetpgrp(self._fd) != self._own:
                os.tcsetpgrp(self._fd, self._own)
            if reset:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)
        except (OSError, termios.error):
            return  # hung up


def under_job_control() -> bool:
    """Whether somebody is there to continue us when we stop: a shell, in our own session.

    Without one (PID 1, a service, the leader of the session) a stop would last for ever; the
    kernel itself does not stop such a group for SIGTSTP.
    """
    parent = read_stat(os.getppid())
    return parent is not None and parent.session == os.getsid(0) != os.getpid()
