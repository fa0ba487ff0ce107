"""The first code of a worker: `python -I -S _child.py NAME CONTROL_FD ENDS KEPT_FDS PARENT_PID`.

The order is the point. Parent-death first, before any .pth file or import hook runs; then the
check against the parent that was *given*, which catches a parent that died before the arming;
then only the listed descriptors stay open; then the subreaper flag; and nothing of the user's
is imported before the supervisor, which by then holds the pidfd, says go. A worker that a zygote
has forked does the same, but for the descriptors, which the zygote sorts.

ENDS are the descriptors whose end is the parent's death; `kernel` for the parent-death signal.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _SIGKILL = 1, 36, 9


def protect(parent_pid: int, *, by_kernel: bool) -> None:
    """Die with the process that was given as the parent, if the kernel is to see to it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if by_kernel and libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot arm the parent-death signal")
    if os.getppid() != parent_pid:
        os._exit(1)


def keep_only(kept: set[int]) -> None:
    """Close everything but stdin, stdout, stderr and what was listed."""
    first = 3
    for fd in sorted(kept):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 20)


def be(words: list[str], *, forked: bool) -> None:
    """Protect, shake hands, run the target, leave."""
    name, control, ends, kept, parent = words
    protect(int(parent), by_kernel=ends == "kernel")
    if not forked:
        keep_only({int(word) for word in kept.split(",")})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    from stopbath.lifecycle._handshake import run_target, shake_hands

    if ends != "kernel":
        from stopbath.lifecycle._parent_death import watch_ends

        watch_ends([int(word) for word in ends.split(",")])
    run_target(shake_hands(int(control), name, forked=forked))


if __name__ == "__main__":  # run by path, without site: let the package be found beside it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    be(sys.argv[1:], forked=False)
