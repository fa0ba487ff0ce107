"""The data channel: frames, descriptors, bounds, and what happens when the other side dies."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stopbath.messages import Call, Cancel, Failure, FromRank, Progress, Reply, ToRank
from stopbath.wire import (
    INLINE_MAX,
    Blob,
    Channel,
    ChannelClosed,
    ChannelFull,
    FrameTooLarge,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BIG = os.urandom(INLINE_MAX + 1)


def open_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def pair() -> Iterator[tuple[Channel[Any], Channel[Any]]]:
    """A server's and a rank's end; every descriptor is back at the end of the test."""
    before = open_fds()
    ours, theirs = socket.socketpair()
    server: Channel[Any] = Channel(ours, FromRank)
    rank: Channel[Any] = Channel(theirs, ToRank)
    yield server, rank
    server.close()
    rank.close()
    assert open_fds() == before, "descriptors leaked"


def raw_pair() -> tuple[socket.socket, Channel[Any]]:
    ours, theirs = socket.socketpair()
    return ours, Channel(theirs, ToRank)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([BIG, BIG[:INLINE_MAX]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(values=st.lists(plain, min_size=1, max_size=5), portion=st.integers(1, 4096))
def test_values_arrive_as_they_were_sent(values: list[Any], portion: int) -> None:
    """Whatever the portions the stream is cut into, every frame arrives whole and in order."""
    before = open_fds()
    ours, theirs = socket.socketpair()
    if portion < 64:  # a small buffer makes the kernel take frames piece by piece
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sender: Channel[Any] = Channel(ours, FromRank)
    receiver: Channel[Any] = Channel(theirs, ToRank)
    for i, value in enumerate(values):
        sender.send(Call(id=i, method="m", params=value))
    got: list[Any] = []
    for _ in range(100_000):
        got += receiver.receive()
        if len(got) == len(values):
            break
        sender.flush()
    assert [call.params for call in got] == values
    assert [call.id for call in got] == list(range(len(values)))
    sender.close()
    receiver.close()
    del got
    assert open_fds() == before


@pytest.mark.parametrize(
    "message",
    [
        Reply(id=1, value={"a": [1, b"x"]}),
        Failure(id=1, kind="K", message="m", traceback="t"),
        Progress(id=1, step=1, steps=2),
    ],
)
def test_every_message_of_a_rank_travels(
    pair: tuple[Channel[Any], Channel[Any]], message: Any
) -> None:
    server, rank = pair
    rank.send(message)
    assert server.receive() == [message]


def test_a_large_blob_is_shared_memory_without_a_name(
    pair: tuple[Channel[Any], Channel[Any]],
) -> None:
    """A blob arrives as a sealed memfd (no file of /dev/shm): same bytes, dtype, shape."""
    server, rank = pair
    rank.send(Reply(id=1, value=[Blob(BIG, "uint8", (1, len(BIG))), Blob(b"1234", "int32", (1,))]))
    (reply,) = server.receive()
    assert Path(f"/proc/self/fd/{reply.value[0]._fd}").readlink().name.startswith("memfd:")
    large, small = reply.value
    assert (large.dtype, large.shape, bytes(large.data)) == ("uint8", (1, len(BIG)), BIG)
    assert (small.dtype, small.shape, bytes(small.data)) == ("int32", (1,), b"1234")
    large.data[0] ^= 0xFF  # private: nobody else may see this


def test_a_blob_is_handed_on_without_being_mapped(
    pair: tuple[Channel[Any], Channel[Any]],
) -> None:
    server, rank = pair
    rank.send(Reply(id=1, value=Blob(BIG)))
    (reply,) = server.receive()
    server.send(Call(id=2, method="m", params=reply.value))
    (call,) = rank.receive()
    assert bytes(call.params.data) == BIG
    assert "descriptor" in repr(reply.value)


def test_received_descriptors_are_not_inherited(pair: tuple[Channel[Any], Channel[Any]]) -> None:
    server, rank = pair
    rank.send(Reply(id=1, value=Blob(BIG)))
    (reply,) = server.receive()
    assert not os.get_inheritable(reply.value._fd)


def test_a_dead_reader_leaves_no_descriptors(pair: tuple[Channel[Any], Channel[Any]]) -> None:
    """Blobs in flight and in the queue are freed when the receiver dies in the middle."""
    server, rank = pair
    before = open_fds()
    for i in range(40):
        server.send(Call(id=i, method="m", params=[BIG, BIG, "x" * 20_000]))
    assert not server.idle
    rank.close()
    server.flush()
    with pytest.raises(ChannelClosed):
        server.send(Call(id=99, method="m", params=BIG))
    server.receive()
    assert server.eof
    assert open_fds() <= before - 1


def test_a_reader_killed_with_unread_data_is_an_end_and_no_error() -> None:
    """Linux says ECONNRESET, not EOF, when the peer closed with data unread."""
    ours, theirs = socket.socketpair()
    channel: Channel[Any] = Channel(ours, FromRank)
    channel.send(Cancel(id=1))
    theirs.close()
    assert channel.receive() == []
    assert channel.eof
    channel.close()


def test_a_stuck_reader_never_blocks_the_sender(pair: tuple[Channel[Any], Channel[Any]]) -> None:
    """Sending to a rank that reads nothing returns at once until the bound, then refuses."""
    server, _ = pair
    done = threading.Event()

    def fill() -> None:
        try:
            for i in range(1_000_000):
                server.send(Call(id=i, method="m", params="x" * 10_000))
        except ChannelFull:
            done.set()

    threading.Thread(target=fill, daemon=True).start()
    assert done.wait(20)
    assert not server.has_room


def test_a_frame_over_the_limit_is_refused_by_its_sender(
    pair: tuple[Channel[Any], Channel[Any]],
) -> None:
    server, rank = pair
    with pytest.raises(FrameTooLarge):
        server.send(Call(id=1, method="m", params="x" * (17 << 20)))
    with pytest.raises(FrameTooLarge):
        server.send(Call(id=1, method="m", params=[BIG] * 65))
    with pytest.raises(TypeError):
        server.send(Call(id=1, method="m", params=[BIG, object()]))
    server.send(Cancel(id=7))  # the channel is as good as before
    assert rank.receive() == [Cancel(id=7)]


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<II", 1 << 31, 0),
        struct.pack("<II", 1, 1000),
        struct.pack("<II", 4, 0) + b"\xff\xff\xff\xff",
        struct.pack("<II", 1, 1) + b"\xc0",  # announces a descriptor that does not come
        struct.pack("<II", 1, 0) + b"\xc0",
    ],
)
def test_garbage_is_an_error_and_not_memory(garbage: bytes) -> None:
    sock, channel = raw_pair()
    sock.send(garbage)
    with pytest.raises(WireError):
        channel.receive()
    sock.close()
    channel.close()


def test_memory_that_could_still_shrink_is_refused(
    pair: tuple[Channel[Any], Channel[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unsealed memfd could be cut under the reader, which would be SIGBUS."""
    server, rank = pair
    monkeypatch.setattr("fcntl.F_ADD_SEALS", 1034)  # F_GET_SEALS: seals nothing
    rank.send(Reply(id=1, value=BIG))
    with pytest.raises(WireError, match="not sealed"):
        server.receive()


def test_descriptors_lost_at_emfile_are_an_error(
    pair: tuple[Channel[Any], Channel[Any]],
) -> None:
    """At the limit the kernel drops descriptors silently, and says so only in a flag."""
    server, rank = pair
    rank.send(Reply(id=1, value=[BIG, BIG]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    spare = []
    try:
        while True:
            try:
                spare.append(os.dup(0))
            except OSError:
                break
        with pytest.raises(WireError, match="EMFILE"):
            server.receive()
    finally:
        for fd in spare:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
