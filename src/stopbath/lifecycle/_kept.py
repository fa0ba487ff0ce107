"""What the keeper keeps account of: who asks, what was asked for, what was born."""

from __future__ import annotations

import os

from stopbath.lifecycle._process import dup_high

TYPE_CHECKING = False  # as `typing` has it, which this process does without
if TYPE_CHECKING:
    from collections.abc import Sequence

    from stopbath.lifecycle._channel import Channel, Frame
    from stopbath.lifecycle._containment import Leaf
    from stopbath.lifecycle._errors import Exit
    from stopbath.lifecycle._process import ProcessRef

__all__ = ["Child", "Client", "Order"]


class Client:
    """Who may ask for workers, and loses them when it ends."""

    __slots__ = ("channel", "ref", "root", "said_bye")

    def __init__(self, channel: Channel, ref: ProcessRef | None, *, root: bool) -> None:
        self.channel, self.ref, self.root = channel, ref, root
        self.said_bye = False  # it leaves of its own will, and gives the account itself


class Order:
    """A process that a client has asked for, and that is not born yet.

    `fds` are the asker's; they are open for as long as the frame is looked at. Who needs them for
    longer `keep`s copies, and closes those.
    """

    __slots__ = ("client", "env", "fds", "frame", "id", "mark", "name")

    def __init__(
        self, client: Client, frame: Frame, fds: Sequence[int], env: dict[str, str], mark: str
    ) -> None:
        self.client, self.frame, self.fds = client, frame, list(fds)
        self.id, self.name = int(frame["id"]), str(frame["name"])
        self.env, self.mark = env, mark

    def keep(self) -> None:
        """Own copies of the descriptors from now on; `OSError` when there are none left."""
        copies: list[int] = []
        try:
            copies.extend(map(dup_high, self.fds))
        except OSError:
            _close(copies)
            raise
        self.fds = copies

    def close(self) -> None:
        """Close the copies."""
        _close(self.fds)
        self.fds = []


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class Child:
    """A process that the keeper is the parent of, and that somebody has asked for."""

    __slots__ = (
        "client",
        "exit",
        "id",
        "leaf",
        "mark",
        "name",
        "number",
        "ref",
        "strays",
        "suspendable",
    )

    def __init__(self, order: Order, ref: ProcessRef, leaf: Leaf | None, number: int) -> None:
        self.client, self.id, self.name, self.mark = order.client, order.id, order.name, order.mark
        self.ref, self.leaf = ref, leaf
        self.number = number  # what the clients know it by
        # It has a terminal, and its client wants to hear of a Ctrl-Z.
        self.suspendable = not order.frame["new_session"]
        self.exit: Exit | None = None  # known once dead; it stays here until its strays have ended
        self.strays: list[Frame] = []  # those of which its client was told last
