"""The record of a run: who belongs to it, which resources are its own, and whether it lives.

One file per run in the runtime directory, of JSON lines that are only ever appended: a write
that a crash cuts short costs the last line and never the ones before it, and nothing has to be
renamed, which would lose the lock. The lock is an flock on the file itself, taken by the
guardian (or the program) and inherited by the keeper. The kernel lets go of it when the last
of the two is dead, and not before: a free lock means that nobody is left to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from typing import TYPE_CHECKING, Any

from stopbath.lifecycle._errors import say
from stopbath.lifecycle._process import read_stat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MARK", "Record", "directories", "this_host", "usable"]

MARK = "STOPBATH_RUN"
"""The variable, in the environment of everything a keeper starts, that names the run."""

SUFFIX = ".run"
_ATTEMPTS = 8  # somebody who looks at a file holds its lock for microseconds
_LONGEST_LINE = 64 << 10
_RESOURCE = b'{"t": "resource"'
_CGROUP = _RESOURCE + b', "kind": "cgroup"'


def directories() -> Iterator[str]:
    """Give the directories a record may be in, the one to write to first."""
    session = os.environ.get("XDG_RUNTIME_DIR")  # noqa: TID251  (this layer has no config to ask)
    with contextlib.suppress(OSError):  # left over from another user's session by su or sudo
        if session and os.stat(session).st_uid == os.geteuid():
            yield os.path.join(session, "stopbath")
    # Not tempfile.gettempdir(), which costs the guardian 12 ms of imports.
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: TID251, S108  (checked when opened)
    yield os.path.join(temporary, f"stopbath-{os.geteuid()}")


def open_directory(path: str, *, make: bool) -> int:
    """Open a directory that is ours alone; whoever could write in it could have us kill."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return fd
    os.close(fd)
    whose = "another user's" if found.st_uid != os.geteuid() else "open to others"
    raise PermissionError(f"{path} is {whose}")


def this_host() -> str:
    """Name the boot and the PID namespace: a pid and start time mean nothing outside of them."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "?"


class Record:
    """The record of a living run, held by this process. Nothing here raises or blocks a stop.

    Without a usable directory it is a record of nothing, said once: a run that cannot be
    registered runs all the same.
    """

    __slots__ = ("fd", "path", "run_id")

    def __init__(self, run_id: str, path: str, fd: int) -> None:
        self.run_id, self.path, self.fd = run_id, path, fd

    @classmethod
    def create(cls, run_id: str, kind: str, name: str, argv: Sequence[str]) -> Record:
        """Register a run of which this process is the guardian, or the program."""
        path = os.path.join(next(directories()), run_id + SUFFIX)
        try:
            record = cls(run_id, path, _make_locked(path))
        except OSError as error:
            why = error.strerror or str(error)
            say(f"this run is not registered ({why}: {path}); ps and sweep will not know of it")
            return cls(run_id, "", -1)
        record.note(
            t="run",
            run_id=run_id,
            kind=kind,
            name=name,
            argv=list(argv),
            host=this_host(),
            started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        record.note_process("program" if kind == "library" else "guardian", name, os.getpid())
        return record

    def note_process(self, role: str, name: str, pid: int, start: int | None = None) -> None:
        """Add a process of the run."""
        if start is None:
            found = read_stat(pid)
            start = found.start if found is not None else 0
        self.note(t="process", role=role, name=name, pid=pid, start=start)

    def note_resource(self, kind: str, **facts: Any) -> None:
        """Add something that must not outlive the run: cgroup, shm or socket, with its proof."""
        self.note(t="resource", kind=kind, **facts)

    @property
    def names_leftovers(self) -> bool:
        """Whether there is anything in it that a process does not take along: a file, a segment.

        The run's cgroup does not count: who asks has removed it.
        """
        if not self.present:
            return False
        lines = os.pread(self.fd, os.fstat(self.fd).st_size, 0).splitlines()
        return any(line.startswith(_RESOURCE) and not line.startswith(_CGROUP) for line in lines)

    def marked(self, env: dict[str, str]) -> dict[str, str]:
        """Give an environment that carries the run's mark."""
        return env | {MARK: self.run_id}

    def note(self, **facts: Any) -> None:
        """Append one line; what cannot be written is not missed before a crash, then by `sweep`."""
        if self.fd >= 0:
            line = json.dumps(facts).encode() + b"\n"
            with contextlib.suppress(OSError):
                if len(line) <= _LONGEST_LINE:
                    os.write(self.fd, line)

    @property
    def present(self) -> bool:
        """Whether the record is still there; its run removes it when nothing is left."""
        try:
            return self.fd >= 0 and os.fstat(self.fd).st_nlink > 0
        except OSError:
            return False

    def remove(self) -> None:
        """Nothing of the run is left: take its record away and let go of it."""
        if self.present:
            unlink(self.path)
        self.close()

    def close(self) -> None:
        """Let go of the lock, and leave the record to whoever holds it still, or to a sweep."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _make_locked(path: str) -> int:
    """Make a file and lock it, whatever somebody else removes or looks at in between."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_ATTEMPTS):
        directory = open_directory(os.path.dirname(path), make=True)
        try:
            fd = os.open(os.path.basename(path), flags, 0o600, dir_fd=directory)
        except FileNotFoundError:  # the last run that ended took the directory away
            continue
        finally:
            os.close(directory)
        # Sticky: who tidies up temporary directories by age leaves it alone (XDG, tmpfiles.d).
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o1600)
        if lock(fd) and os.fstat(fd).st_nlink:
            return fd
        os.close(fd)
        time.sleep(0.001)  # a sweep has just taken the empty file for a dead run's
    raise OSError("the record could not be locked")


def usable() -> tuple[str, str]:
    """Give the directory that runs are registered in, and why it cannot be used, if it cannot."""
    where = next(directories())
    path = os.path.join(where, f"probe-{os.getpid()}")
    try:
        fd = _make_locked(path)
    except OSError as error:
        return where, error.strerror or str(error)
    os.close(fd)
    unlink(path)
    return where, ""


def unlink(path: str) -> None:
    """Remove a record, and the directory with the last one."""
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


def lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
