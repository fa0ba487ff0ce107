"""The listening socket: bound once, before anything heavy, with a readable error."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CannotListen", "listen", "url_of"]

_BACKLOG = 2048
_SEARCH_S = 1.0  # looking for the holder of a port must not delay the error
_LISTEN_STATE = "0A"
_FIELDS_TO_INODE = 10


class CannotListen(Exception):
    """The address cannot be had; one line, with who holds it where that can be found."""


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen; 0 takes a free port. The socket is not inherited by children.

    Listening begins here, not when the server runs: between a bind and its listen another
    process could bind the same port, as both set SO_REUSEADDR.
    """
    where = f"{host or '*'}:{port}"
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"cannot listen on {where}: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)  # non-inheritable, by PEP 446
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.settimeout(0)  # asyncio wants it non-blocking
    except OSError as error:
        listener.close()
        holder = _holder(port) if error.errno == errno.EADDRINUSE else None
        by = f" (held by {holder})" if holder else ""
        raise CannotListen(f"cannot listen on {where}: {error.strerror}{by}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Give the address as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _holder(port: int) -> str | None:
    """Name the process that listens on `port`, from /proc; None when it cannot be found."""
    by = Deadline.after(_SEARCH_S)
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for pid in (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if by.passed:
            return None
        if sockets.intersection(_open_files(pid)):
            return f"pid {pid}: {_command(pid)}"
    return "a process of another user"


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if len(fields) < _FIELDS_TO_INODE:
                continue
            local_port = int(fields[1].rpartition(":")[2], 16)
            if local_port == port and fields[3] == _LISTEN_STATE:
                yield fields[9]


def _open_files(pid: str) -> Iterator[str]:
    """Give what a process has open; nothing when it has ended or is another user's."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                yield str(link.readlink())
            except OSError:  # closed since
                continue
    except OSError:
        return


def _command(pid: str) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "command unknown"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:200] or "command unknown"
