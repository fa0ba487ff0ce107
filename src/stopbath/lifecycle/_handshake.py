"""The frames of a control socket, and the worker's half of the conversation.

worker → supervisor: `hello`, `progress`, `ready`, `failed`, `budget`, `report`
supervisor → worker: `go` (with the target in an anonymous file), `stop`

What a worker that is forked needs to know before its birth goes to the zygote, by the keeper.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from stopbath.lifecycle._channel import Channel, Frame
from stopbath.lifecycle._errors import StartRefused
from stopbath.lifecycle._process import die

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stopbath.lifecycle._context import WorkerContext
    from stopbath.lifecycle._spec import WorkerSpec

__all__ = ["find", "fork_frame", "go_frame", "payload_of", "run_target", "settle", "shake_hands"]


_STDERR = 2


class _Job(NamedTuple):
    ctx: WorkerContext
    payload: bytes
    main: Frame | None


def payload_of(spec: WorkerSpec) -> int:
    """Write target and arguments to an anonymous file; the caller owns the descriptor.

    Pickle, but on no socket and one way only: from the parent, which could run anything in the
    child anyway.
    """
    data = pickle.dumps((spec.target, spec.args, spec.kwargs))
    fd = os.memfd_create("stopbath-target")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def go_frame(spec: WorkerSpec, fds: dict[str, int], keeper: Frame | None) -> Frame:
    """Say what the child needs to know before it runs the target."""
    return {
        "t": "go",
        "name": spec.name,
        "fds": fds,
        **_place_of(spec),
        "main": _main_module(spec),
        "keeper": keeper,
    }


def fork_frame(spec: WorkerSpec, words: Sequence[str]) -> Frame:
    """Say what a zygote is to import, where, and what its child is told as `_child`'s words."""
    return {"preload": list(spec.preload), "words": list(words), **_place_of(spec)}


def _place_of(spec: WorkerSpec) -> Frame:
    return {"path": sys.path if spec.path is None else spec.path, "cwd": os.getcwd()}


def _main_module(spec: WorkerSpec) -> Frame | None:
    """Where the child finds `__main__`, for a target that is defined in the script itself."""
    if isinstance(spec.target, str) or getattr(spec.target, "__module__", "") != "__main__":
        return None
    from multiprocessing.spawn import get_preparation_data

    data = get_preparation_data(spec.name)
    return {key: data[key] for key in ("init_main_from_name", "init_main_from_path") if key in data}


def shake_hands(control: int, name: str, *, forked: bool) -> _Job:
    """Say hello, wait for go, take over path, directory and descriptors."""
    channel = Channel(socket.socket(fileno=control))
    channel.send({"t": "hello", "pid": os.getpid()})
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        poll.poll()  # bounded by the other side: it goes on, or its end is an event here
        frames = channel.receive()
        if frames:
            break
        if channel.eof:
            die()
    go, fds = frames[0]
    if go["t"] != "go":  # asked to stop before anything began; the SIGTERM is on its way
        die()
    with os.fdopen(fds[0], "rb") as file:
        payload = file.read()
    settle(go, with_site=not forked)
    sys.argv[:] = [go["name"]]
    from stopbath.lifecycle._context import WorkerContext

    ctx = WorkerContext(channel, name, go["fds"], go["keeper"])
    for frame, _ in frames[1:]:
        ctx.take(frame)
    return _Job(ctx, payload, go["main"])


def settle(go: Frame, *, with_site: bool) -> None:
    """Become the interpreter the parent is: site (which also finds a virtual environment), path.

    A forked worker has `site` from its zygote: what .pth files run is to be run once.
    """
    if with_site:
        import site

        site.main()
    sys.path[:] = go["path"] or sys.path
    os.chdir(go["cwd"])


def find(word: str) -> Any:
    """Import what `"module"` or `"module:name"` names, and give it."""
    from importlib import import_module

    module, _, path = word.partition(":")
    found: Any = import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    return found


def _resolve(target: str | Callable[..., object]) -> Callable[..., object]:
    if not isinstance(target, str):
        return target
    found = find(target)
    if not callable(found):
        raise TypeError(f"{target} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def run_target(job: _Job) -> None:
    """Run the target on the main thread; leave with its outcome as exit code.

    A target that raises, or returns before it was ready, is reported with its traceback.
    """
    import faulthandler
    import threading

    ctx = job.ctx
    # In C: also while a call holds the interpreter. Asked for by a SIGQUIT to the guardian. Only
    # the main thread's: frames of one that runs meanwhile are read while they change (SIGSEGV
    # seen).
    faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=False, chain=False)
    threading.Thread(target=ctx.listen, name="stopbath-control", daemon=True).start()
    phase = "importing its target"
    try:
        if job.main is not None:
            from multiprocessing.spawn import prepare

            prepare(job.main)
        target, args, kwargs = pickle.loads(job.payload)  # noqa: S301  (our parent wrote it)
        function = _resolve(target)
        phase = "starting"
        function(ctx, *args, **kwargs)
        _check_was_ready(ctx)
    except SystemExit:
        raise
    except StartRefused as refusal:
        ctx.refused(refusal)
        sys.exit(1)
    except BaseException as error:
        try:  # first the traceback, on stderr: the cause that follows quotes the last lines
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        finally:
            ctx.failed(error, "running" if ctx.is_ready else phase)
        sys.exit(1)


def _check_was_ready(ctx: WorkerContext) -> None:
    if not ctx.is_ready and not ctx.stopping.is_set():
        raise RuntimeError("the worker function returned before it was ready")
