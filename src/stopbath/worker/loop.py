"""The serve loop of a rank: one call after another, on the main thread."""

from __future__ import annotations

import math
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

from stopbath.lifecycle import Deadline
from stopbath.messages import PEER_LOST, Failure, Progress, Reply, ToRank
from stopbath.wire import Channel, ChannelClosed
from stopbath.worker.inbox import Inbox
from stopbath.worker.line import Line

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from stopbath.messages import Call
    from stopbath.wire import Blob

__all__ = ["CallWatch", "RankLoop"]

PROGRESS_EVERY_S: Final = 0.05  # from the rank that clients hear
_SIGN_OF_LIFE_S: Final = 1.0  # from the others, and at least so often within the step budget
_SIGNS_PER_BUDGET: Final = 4
_LAST_FLUSH_S: Final = 1.0
_TRACEBACK_CHARS: Final = 16 << 10
# How long a rank that lost its peers leaves the word to them: their death is the first cause.
_LAST_WORD_S: Final = 2.0


class CallWatch:
    """A running call as the method sees it; implements `pipelines.base.Watch`."""

    def __init__(self, call_id: int, inbox: Inbox, line: Line, *, every_s: float) -> None:
        self.call_id = call_id
        self._inbox = inbox
        self._line = line
        self._every_s = every_s
        self._last_s = 0.0

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the call any more."""
        return self._inbox.given_up(self.call_id)

    def progress(self, step: int, steps: int) -> None:
        """Tell the server, at most 20 times a second from rank 0, and at the last step."""
        now = time.monotonic()
        if step == steps or now - self._last_s >= self._every_s:
            self._last_s = now
            self._line.send_if_idle(Progress(id=self.call_id, step=step, steps=steps))


class RankLoop:
    """Answers calls over one data channel until told to stop or nobody is left to answer.

    `methods` are called as `method(params, watch)` and give what a frame can hold. What they
    raise becomes a `Failure` and never ends the rank, with one exception: a rank that lost its
    peers can do nothing more, so it answers and then raises, which ends the replica.
    """

    def __init__(
        self,
        sock: socket.socket,
        methods: Mapping[str, Callable[[Any, CallWatch], Any]],
        *,
        first: bool = True,
        step_budget_s: float = math.inf,
        pack: Callable[[Any], Any] | None = None,
        unpack: Callable[[Blob], Any] | None = None,
        after_failure: Callable[[], None] | None = None,
    ) -> None:
        self._methods = methods
        usual_s = PROGRESS_EVERY_S if first else _SIGN_OF_LIFE_S
        self._every_s = min(usual_s, step_budget_s / _SIGNS_PER_BUDGET)
        self._after_failure = after_failure
        self._inbox = Inbox()
        channel: Channel[ToRank] = Channel(sock, ToRank, pack=pack, unpack=unpack)
        self._line = Line(channel, self._inbox)

    def stop(self) -> None:
        """Have `serve` return when what was accepted is answered; from any thread."""
        self._inbox.stop()
        self._line.nudge()

    def serve(self) -> str | None:
        """Answer calls; None after a stop, else why nobody is left to answer.

        Raises:
            Exception: the method's own PeerLost, when the peers stay silent about it.
        """
        try:
            self._work()
            self._line.flush(Deadline.after(_LAST_FLUSH_S))
            return self._inbox.ended
        finally:
            self._line.close()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            self._answer(call)

    def _next(self) -> Call | None:
        """Wait for the next call; None when there is none and none should come."""
        self._line.wait()
        return self._inbox.next()

    def _watch(self, call: Call) -> CallWatch:
        return CallWatch(call.id, self._inbox, self._line, every_s=self._every_s)

    def _answer(self, call: Call) -> None:
        watch = self._watch(call)
        try:
            self._line.leave()
            value = self._run(call, watch)
            self._line.come_back()
            self._line.send(Reply(id=call.id, value=value))
        except ChannelClosed:
            return  # the reader has seen it too: the loop ends at the next turn
        except Exception as error:
            # Whatever a model, an extension or a bad request raises is this call's affair.
            self._send_failure(call.id, error)
            if type(error).__name__ == PEER_LOST and not self._over_without_peers():
                raise
        finally:
            self._inbox.done(call.id)

    def _over_without_peers(self) -> bool:
        """Leave the first word to the peers that were lost; whether it came, as a stop."""
        self._line.flush(Deadline.after(_LAST_FLUSH_S))
        return self._inbox.wait_over(Deadline.after(_LAST_WORD_S))

    def _run(self, call: Call, watch: CallWatch) -> Any:
        method = self._methods.get(call.method)
        if method is None:
            raise LookupError(f"a rank has no method {call.method!r}")
        return method(call.params, watch)

    def _send_failure(self, call_id: int, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        failure = Failure(
            id=call_id,
            kind=type(error).__name__,
            message=str(error)[:_TRACEBACK_CHARS],
            traceback=text[-_TRACEBACK_CHARS:],
        )
        try:
            self._line.send(failure)
        except ChannelClosed:
            return
        if self._after_failure is not None:
            self._after_failure()
