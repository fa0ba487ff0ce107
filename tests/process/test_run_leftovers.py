"""`stopbath run`: what a command leaves is cleared up when it is proved to be its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from observing import alive, wait_until
from stopbath.lifecycle import Deadline
from wrapped import Holdings, Wrapped, wrapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

SHM = Path("/dev/shm")
QUICK = ("--drain", "0.5", "--terminate", "0.5", "--kill", "2")


@pytest.fixture
def wrap(nothing_left: None, tmp_path: Path) -> Iterator[Callable[..., Wrapped]]:  # noqa: ARG001  (runs around this)
    yield from wrapping(tmp_path)


@pytest.fixture
def name(nothing_left: None) -> Iterator[str]:  # noqa: ARG001  (runs around this)
    """A name for shared memory that nobody else has; what is left of it goes after the test."""
    unique = f"sbtest-{uuid.uuid4().hex}"
    yield unique
    for path in SHM.glob(f"{unique}*"):
        path.unlink()


def python(code: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-u", "-c", textwrap.dedent(code), *args)


HOLDS = """
import os, signal, sys
fd = os.open("/dev/shm/" + sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(fd, 4096)
print("up", flush=True)
signal.pause()
"""


def removed(report: dict[str, Any]) -> set[str]:
    return {it["path"] for it in report["swept"]["removed"]}


def test_shared_memory_that_the_tree_held_is_removed(
    wrap: Callable[..., Wrapped], name: str
) -> None:
    run = wrap(*python(HOLDS, name))
    run.says("up")
    wait_until(lambda: run.recorded(SHM / name), Deadline.after(5), "it is proved at its birth")
    os.kill(run.command, signal.SIGKILL)
    assert run.ended() == 137
    assert not (SHM / name).exists()
    assert removed(run.report) == {str(SHM / name)}
    assert f"removed shm {SHM / name}" in run.errors


def test_a_mapping_alone_is_proof(wrap: Callable[..., Wrapped], name: str) -> None:
    code = HOLDS.replace(
        'print("up"', 'import mmap; m = mmap.mmap(fd, 4096); os.close(fd); print("up"'
    )
    run = wrap(*python(code, name))
    run.says("up")
    run.send(signal.SIGTERM)  # the look at the first signal sees what the one at its birth did not
    assert run.ended() == 143
    assert not (SHM / name).exists()


@pytest.mark.parametrize("who", ["guardian", "keeper"])
def test_it_is_removed_whoever_of_us_was_killed(
    wrap: Callable[..., Wrapped], name: str, who: str
) -> None:
    run = wrap(*python(HOLDS, name), options=QUICK)
    run.says("up")
    wait_until(lambda: run.recorded(SHM / name), Deadline.after(5), "it is proved")
    held = Holdings.of(run)
    os.kill(getattr(run, who), signal.SIGKILL)
    run.ended()
    held.are_gone(3)
    wait_until(lambda: not (SHM / name).exists(), Deadline.after(2), "it is removed")


def test_a_strangers_segment_that_was_born_meanwhile_survives(
    wrap: Callable[..., Wrapped], name: str
) -> None:
    """One that lives with its owner, and one that the tree had attached to."""
    alone, shared = SHM / f"{name}-alone", SHM / f"{name}-shared"
    code = """
        import os, signal, sys
        print("up", flush=True)
        sys.stdin.readline()
        fd = os.open(sys.argv[1], os.O_RDWR)
        print("attached", flush=True)
        signal.pause()
    """
    run = wrap(*python(code, str(shared)), stdin=subprocess.PIPE)
    run.says("up")
    with alone.open("w"), shared.open("w"):
        assert run.process.stdin is not None
        run.process.stdin.write(b"\n")
        run.process.stdin.close()
        run.says("attached")
        run.send(signal.SIGTERM)
        assert run.ended() == 143
    assert alone.exists()
    assert shared.exists()
    assert removed(run.report) == set()


def test_what_is_only_inferred_is_named_and_removed_on_request(
    wrap: Callable[..., Wrapped], name: str
) -> None:
    """A file that nobody holds, born during the run by who knows whom."""
    for options, goes in (((), False), (("--remove-inferred",), True)):
        run = wrap(*python("import signal; print('up', flush=True); signal.pause()"),
                   options=options)  # fmt: skip
        run.says("up")
        (SHM / name).touch(0o600)  # by this test, no process of the tree
        run.send(signal.SIGTERM)
        assert run.ended() == 143
        assert (SHM / name).exists() is not goes
        named = {it["path"] for it in run.report["swept"]["removed" if goes else "inferred"]}
        assert str(SHM / name) in named
        (SHM / name).unlink(missing_ok=True)


LISTENS = """
import os, signal, socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
s.listen()
print("up", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("where", ["absolute", "relative"])
def test_a_socket_file_of_the_tree_is_removed(
    wrap: Callable[..., Wrapped], tmp_path: Path, where: str
) -> None:
    path = tmp_path / "socket"
    run = wrap(*python(LISTENS, str(path) if where == "absolute" else "socket"), cwd=tmp_path)
    run.says("up")
    run.send(signal.SIGTERM)
    assert run.ended() == 143
    assert not path.exists()
    assert removed(run.report) == {str(path)}


def test_a_socket_bound_since_the_last_look_is_removed_by_the_keeper(
    wrap: Callable[..., Wrapped], tmp_path: Path
) -> None:
    """The guardian had not proved it yet when it was killed."""
    path = tmp_path / "socket"
    run = wrap(*python(LISTENS, str(path)))
    run.says("up")
    keeper = run.keeper
    assert not run.recorded(path)  # or this would test something else
    run.send(signal.SIGKILL)
    assert run.ended() == -9
    wait_until(lambda: not alive(keeper), Deadline.after(3), "the keeper has left")
    assert not path.exists()


def test_a_socket_that_was_handed_to_a_stranger_is_the_strangers(
    wrap: Callable[..., Wrapped], tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    code = """
        import socket, signal, sys
        with socket.socket(socket.AF_UNIX) as it:
            it.bind(sys.argv[1]); it.listen(); print("up", flush=True)
            socket.send_fds(it.accept()[0], [b"x"], [it.fileno()])
            signal.pause()
    """
    run = wrap(*python(code, str(path)))
    run.says("up")
    wait_until(lambda: run.recorded(path), Deadline.after(5), "it is proved")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        _, (fd,), _, _ = socket.recv_fds(client, 1, 1)
    with socket.socket(fileno=fd):
        run.send(signal.SIGTERM)
        assert run.ended() == 143
        assert path.exists()
    assert removed(run.report) == set()


def test_a_socket_file_on_which_somebody_answers_is_left_alone(
    wrap: Callable[..., Wrapped], tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    run = wrap(*python(LISTENS, str(path)))
    run.says("up")
    wait_until(lambda: run.recorded(path), Deadline.after(5), "it is proved")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(path))
        ours.listen()
        run.send(signal.SIGTERM)
        assert run.ended() == 143
        assert path.exists()
    assert removed(run.report) == set()


def test_a_pid_file_is_named_and_removed_on_request(
    wrap: Callable[..., Wrapped], tmp_path: Path
) -> None:
    code = "import os, signal; open('it.pid', 'w').write(str(os.getpid())); "
    code += "print('up', flush=True); signal.pause()"
    for options, goes in (((), False), (("--remove-inferred",), True)):
        run = wrap(*python(code), options=options, cwd=tmp_path)
        run.says("up")
        run.send(signal.SIGTERM)
        assert run.ended() == 143
        assert (tmp_path / "it.pid").exists() is not goes
        swept = run.report["swept"]["removed" if goes else "kept"]
        assert [it["path"] for it in swept] == [str(tmp_path / "it.pid")]


def test_an_old_lock_file_that_the_tree_opens_is_nobodys_leftover(
    wrap: Callable[..., Wrapped], tmp_path: Path
) -> None:
    (tmp_path / "cache.lock").touch()
    code = "import signal; f = open('cache.lock'); print('up', flush=True); signal.pause()"
    run = wrap(*python(code), options=("--remove-inferred",), cwd=tmp_path)
    run.says("up")
    run.send(signal.SIGTERM)
    assert run.ended() == 143
    assert (tmp_path / "cache.lock").exists()


def test_another_segment_under_the_same_name_is_another(
    wrap: Callable[..., Wrapped], name: str
) -> None:
    run = wrap(*python(HOLDS, name))
    run.says("up")
    wait_until(lambda: run.recorded(SHM / name), Deadline.after(5), "it is proved")
    (SHM / name).unlink()
    with (SHM / name).open("w"):
        (SHM / name).chmod(0o600)  # or another user might hold it, for all that can be seen
        run.send(signal.SIGTERM)
        assert run.ended() == 143
    assert (SHM / name).exists()
    assert removed(run.report) == set()
