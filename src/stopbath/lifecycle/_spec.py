"""What a worker is to be: a description, checked when it is written down."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, get_args

from stopbath.lifecycle._parent_death import PARENT_DEATH, ParentDeath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stopbath.lifecycle._member import Member

__all__ = ["WorkerSpec"]


def _main_can_be_found() -> bool:
    """Whether `__main__` is a file or a module, not a prompt, a notebook or `python -c`."""
    main = sys.modules["__main__"]
    return getattr(main, "__file__", None) is not None or main.__spec__ is not None


def _names_a_module(word: object) -> bool:
    if not isinstance(word, str):
        return False
    module, colon, name = word.partition(":")
    return bool(module) and (bool(name) or not colon)


class WorkerSpec:
    """One worker to be started.

    Args:
        target: `"module:function"`, or a function that pickles by reference. It is called in
            the new process with a `WorkerContext` first, then `args` and `kwargs`.
        args: Positional arguments, picklable. They travel once, to the child, in an anonymous
            file; nothing is ever unpickled on this side.
        kwargs: Keyword arguments, picklable.
        name: The name in reports, errors and stderr prefixes; unique in a group.
        env: Laid over this process's environment.
        fds: Descriptors the worker inherits, by name; it finds its own numbers in `ctx.fds`.
            The caller keeps its copies and closes them after `start()`.
        keeper_access: Whether the worker may start workers of its own through the keeper that
            started it (`ctx.supervisor()`), which end with it.
        prefix: Whether the lines of its stderr are forwarded with its name in front.
        path: Its `sys.path`; by default this process's.
        preload: What it needs and what takes long to import, as `"module"` or `"module:name"`.
            Workers with the same list are forked off one process, the zygote, that has imported
            it once. What a module does when it is imported is done once, for all of them (a
            random state that it seeds, a file that it opens), with the environment of the first,
            and with `OMP_NUM_THREADS=1`: call `torch.set_num_threads`. A module that starts a
            thread or opens a device cannot be forked; workers start without a zygote then.
        parent_death: How it learns that nobody is left to end it, `"kernel"` or `"socket"` (see
            `_parent_death`); by default what suits the platform. A worker that changes its uid
            loses the kernel's way.
    """

    __slots__ = (
        "args",
        "env",
        "fds",
        "keeper_access",
        "kwargs",
        "name",
        "parent_death",
        "path",
        "prefix",
        "preload",
        "target",
    )

    def __init__(
        self,
        target: str | Callable[..., object],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str = "",
        env: Mapping[str, str] | None = None,
        fds: Mapping[str, int] | None = None,
        keeper_access: bool = False,
        prefix: bool = True,
        path: Sequence[str] | None = None,
        preload: Sequence[str] = (),
        parent_death: ParentDeath = PARENT_DEATH,
    ) -> None:
        if isinstance(target, str):
            module, _, function = target.partition(":")
            if not module or not function:
                raise ValueError(f"a target is 'module:function' or a function, not {target!r}")
        elif not callable(target):
            raise TypeError(f"a target is 'module:function' or a function, not {target!r}")
        elif getattr(target, "__module__", "") == "__main__" and not _main_can_be_found():
            name = getattr(target, "__qualname__", repr(target))
            raise ValueError(
                f"{name} is defined in an interactive session, where no other process finds it: "
                "put it into a module"
            )
        if parent_death not in get_args(ParentDeath):
            raise ValueError(f"parent_death is 'kernel' or 'socket', not {parent_death!r}")
        if isinstance(preload, str) or not all(_names_a_module(it) for it in preload):
            raise ValueError(f"preload is a list of 'module' or 'module:name', not {preload!r}")
        self.target = target
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self.name = name
        self.env = dict(env or {})
        self.fds = dict(fds or {})
        self.keeper_access = keeper_access
        self.prefix = prefix
        self.parent_death = parent_death
        self.path = None if path is None else list(path)
        self.preload = tuple(preload)

    def member(self, name: str, rank: int) -> Member:
        """Make the member that brings it to life."""
        from stopbath.lifecycle._worker import Worker

        return Worker(self, name, rank)

    def __repr__(self) -> str:
        target = self.target if isinstance(self.target, str) else self.target.__qualname__
        return f"<WorkerSpec {self.name or '?'}: {target}>"
