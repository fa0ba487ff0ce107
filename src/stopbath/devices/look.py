"""`python -m stopbath.devices.look`: one look at the devices, for a guardian.

A process of its own, because a driver that hangs takes whoever asks it along, and because the
guardian is a bare interpreter. Reads what is asked from stdin, prints one line of JSON, and
leaves; it dies with the guardian.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from stopbath.devices.account import look_before, settle
from stopbath.devices.base import LedgerAbsent
from stopbath.devices.nvml import open_ledger
from stopbath.lifecycle import Deadline
from stopbath.lifecycle._process import arm_parent_death, tree_of

__all__ = ["main"]

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, the kernel's own number
_COMMAND_CHARS = 120


def main() -> None:
    """Answer `{"guardian": pid}`, and with `before`, `ours` and `within_s` at the end."""
    asked: dict[str, Any] = json.loads(sys.stdin.read())
    arm_parent_death()
    if os.getppid() != asked["guardian"]:
        return
    try:
        answer = _answer(asked)
    except LedgerAbsent as error:
        answer = {"absent": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    ledger = open_ledger()
    try:
        if "before" not in asked:
            ours = {asked["guardian"], *tree_of(asked["guardian"])}
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251  (the command's own)
            return look_before(ledger, ours, _title, visible)
        all_seen = os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE  # noqa: PTH115
        by = Deadline.after(asked["within_s"])
        dead = set(asked["ours"])
        return {"devices": settle(ledger, asked["before"], dead, _title, by, all_seen=all_seen)}
    finally:
        ledger.close()


def _title(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            words = file.read(4 * _COMMAND_CHARS).replace(b"\0", b" ").strip()
        with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123
            words = words or b"[" + file.read().strip() + b"]"
    except OSError:
        return None
    return words.decode("utf-8", "replace")[:_COMMAND_CHARS]


if __name__ == "__main__":
    main()
