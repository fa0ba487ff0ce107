"""The executor for debugging: ranks as threads of this process, behind the same protocol.

A breakpoint, a profiler or a memory tracer of this process sees the model. What it cannot do:

* a call that hangs cannot be ended. It is found, its requests fail, its stack is in the log, and
  it lives until the process ends;
* a crash of the model (SIGSEGV, SIGBUS, out of memory) is a crash of the server;
* the model holds the interpreter that answers requests, so that everything else is slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stopbath.executor._threads import ThreadGroup
from stopbath.executor.multiproc import MultiprocExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stopbath.lifecycle import Escalation, WorkerSpec

__all__ = ["WARNING", "InprocExecutor"]

WARNING = (
    "the rank is a thread of the server (--executor inproc): a call that hangs cannot be ended, "
    "and a crash of the model is one of the server"
)


class InprocExecutor(MultiprocExecutor):
    """One replica whose ranks are threads; implements `Executor`.

    Calls, deadlines, cancels, late replies and the watch over silent ranks are those of
    `MultiprocExecutor`: the ranks have the same channels, only that both ends are here.
    """

    def _new_group(self, specs: Sequence[WorkerSpec], escalation: Escalation) -> ThreadGroup:
        return ThreadGroup(self._name, specs, escalation=escalation, start_s=self._config.start_s)
