from __future__ import annotations

import array
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopbath.lifecycle import ProtocolError
from stopbath.lifecycle._channel import MAX_FDS, MAX_FRAME, MAX_TURN, Channel

if TYPE_CHECKING:
    from collections.abc import Iterator

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
frames = st.lists(st.dictionaries(st.text(), json_values, max_size=3), min_size=1, max_size=5)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(sock) for sock in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    sock, theirs = socket.socketpair()
    channel = Channel(theirs)
    yield sock, channel
    channel.close()
    sock.close()


def same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


@given(frames)
def test_frames_arrive_whole_and_in_order(messages: list[dict]) -> None:
    with ExitStack() as owned:
        one, other = (Channel(sock) for sock in socket.socketpair())
        owned.callback(one.close)
        owned.callback(other.close)
        for message in messages:
            one.send(message)
        assert [frame for frame, _ in other.receive()] == messages
        assert not other.eof


@given(frames, st.integers(1, 7))
def test_a_frame_may_come_in_pieces(messages: list[dict], size: int) -> None:
    with ExitStack() as owned:
        source, tap = socket.socketpair()
        sock, theirs = socket.socketpair()
        sender, receiver = Channel(source), Channel(theirs)
        for end in (sender, tap, sock, receiver):
            owned.callback(end.close)
        for message in messages:
            sender.send(message)
        data = tap.recv(1 << 20)
        got = []
        for at in range(0, len(data), size):
            sock.sendall(data[at : at + size])
            got += [frame for frame, _ in receiver.receive()]
        assert got == messages


def test_descriptors_come_with_their_frame(pair: tuple[Channel, Channel]) -> None:
    """The receiver owns its own; the sender keeps, and may close, what it sent."""
    one, other = pair
    files = [os.memfd_create(f"file{i}") for i in range(3)]
    one.send({"n": 0}, files[:2])
    one.send({"n": 1})
    one.send({"n": 2}, files[2:])
    got = other.receive()
    assert [len(fds) for _, fds in got] == [2, 0, 1]
    received = [fd for _, fds in got for fd in fds]
    assert all(same_file(mine, theirs) for mine, theirs in zip(files, received, strict=True))
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in (*files, *received):
        os.close(fd)


def test_what_the_socket_does_not_take_is_queued_with_its_descriptors(
    pair: tuple[Channel, Channel],
) -> None:
    one, other = pair
    blob = os.memfd_create("blob")
    sent = 0
    while not one.wants_write:
        one.send({"n": sent, "text": "x" * 50_000}, [blob])
        sent += 1
    got: list[tuple[dict, list[int]]] = []
    while len(got) < sent:
        got += other.receive()
        one.flush()
    assert [frame["n"] for frame, _ in got] == list(range(sent))
    for _, fds in got:
        assert same_file(blob, fds[0])
        os.close(fds[0])
    os.close(blob)


def test_a_peer_that_never_reads_cannot_make_the_queue_grow_for_ever(
    pair: tuple[Channel, Channel],
) -> None:
    one, _ = pair

    def flood() -> None:
        for _ in range(100):
            one.send({"text": "x" * 1_000_000})

    with pytest.raises(ProtocolError, match="does not read"):
        flood()


def test_a_peer_that_floods_cannot_keep_the_reader(pair: tuple[Channel, Channel]) -> None:
    """One call reads a bounded amount, even when the peer refills the socket at every read."""
    one, other = pair

    class Refilling:
        """The socket of `other`, whose peer writes again whenever it was read."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def recvmsg(self, *args: int) -> object:
            one.flush()
            for _ in range(40):
                if not one.wants_write:
                    one.send({"text": "x" * 50_000})
            return self._sock.recvmsg(*args)

        def close(self) -> None:
            self._sock.close()

    other._sock = Refilling(other._sock)  # type: ignore[assignment]
    frames = other.receive()
    assert MAX_TURN / 50_100 - 2 < len(frames) < 3 * MAX_TURN / 50_000


def test_the_end_of_a_peer_is_told_once_everything_it_said_has_been(
    pair: tuple[Channel, Channel],
) -> None:
    one, other = pair
    one.send({"last": "words"})
    one.close()
    assert other.receive() == [({"last": "words"}, [])]
    assert other.eof
    with pytest.raises(BrokenPipeError):
        other.send({"any": "answer"})


def test_a_reset_counts_as_the_end(pair: tuple[Channel, Channel]) -> None:
    """A peer that is killed with unread data in its socket gives ECONNRESET."""
    one, other = pair
    other.send({"never": "read"})
    one.close()
    assert other.receive() == []
    assert other.eof


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        b"\x00\x00\x00\x02\xff{}",
        b"\x00\x00\x00\x03\x00{a}",
        b"\x00\x00\x00\x02\x00[]",
        b"\x00\x00\x00\x02\x01{}",
        b"\x00\x00\x00\x02\x00\xff\xff",
    ],
    ids=["huge", "too many fds", "no json", "no object", "fds missing", "no text"],
)
def test_what_is_not_a_frame_is_refused(raw: tuple[socket.socket, Channel], data: bytes) -> None:
    sock, channel = raw
    sock.sendall(data)
    with pytest.raises(ProtocolError):
        channel.receive()


def test_descriptors_that_nobody_announced_are_closed_with_the_channel(
    raw: tuple[socket.socket, Channel],
) -> None:
    sock, channel = raw
    read_end, write_end = os.pipe()
    rights = array.array("i", [write_end])
    sock.sendmsg([b"\x00"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    os.close(write_end)
    channel.receive()
    channel.close()
    with os.fdopen(read_end, "rb") as file:
        assert file.read() == b""  # nobody holds the write end any more


def test_what_is_too_large_is_refused_before_it_is_sent(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    with pytest.raises(ProtocolError, match="too large"):
        one.send({"text": "x" * MAX_FRAME})
    with pytest.raises(ProtocolError, match="too large"):
        one.send({}, [0] * (MAX_FDS + 1))
    assert other.receive() == []


def test_a_descriptor_that_cannot_be_duplicated_leaves_nothing_behind(
    pair: tuple[Channel, Channel],
) -> None:
    one, other = pair
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match="Bad file descriptor"):
        one.send({"n": 1}, [write_end, 1 << 20])
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        assert file.read() == b""
    one.send({"n": 2})
    assert other.receive() == [({"n": 2}, [])]
