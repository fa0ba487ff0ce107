#!/usr/bin/env python3
"""Measure on a real GPU how long after a worker's death its memory is back.

    python scripts/gpu_release.py [--gib 8] [--rounds 10] [--json]

Each round a worker group starts one worker that takes memory through libcuda (no torch needed),
the worker is killed, and three moments are taken from that on: the group knows (pidfd), the
worker is reaped, and the driver's ledger has no claim of it and the device's total is back at
the round's baseline. Prints SKIP and exits 0 where there is no GPU or no nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stopbath.devices import LedgerAbsent, holders, open_ledger, wait_released
from stopbath.lifecycle import Deadline, ProcessRef, StartupError, WorkerGroup, WorkerSpec

if TYPE_CHECKING:
    from stopbath.devices import Ledger
    from stopbath.lifecycle import WorkerContext

_BOUND_S = 10.0  # for the memory to come back
_SLACK_BYTES = 64 << 20  # what other processes may take or give meanwhile


def holder(ctx: WorkerContext, gib: float) -> None:
    """Take `gib` GiB of device 0 and touch it, then wait to be killed."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: object) -> None:
        result = getattr(cuda, name)(*args)
        if result != 0:
            raise RuntimeError(f"{name} gave CUDA error {result}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    memory, size = ctypes.c_uint64(), ctypes.c_size_t(int(gib * (1 << 30)))
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    call("cuMemAlloc_v2", ctypes.byref(memory), size)
    call("cuMemsetD8_v2", memory, ctypes.c_ubyte(1), size)
    call("cuCtxSynchronize")
    ctx.ready()
    ctx.wait_stop()


def one_round(ledger: Ledger, gib: float) -> dict[str, object]:
    """Start, kill, and take the times; milliseconds after the SIGKILL."""
    baseline = ledger.devices()[0].used_bytes
    here = str(Path(__file__).resolve().parent)
    spec = WorkerSpec("gpu_release:holder", args=(gib,), name="holder", path=[here, *sys.path])
    group = WorkerGroup("gpu", [spec])
    noticed = threading.Event()
    group.on_failure(lambda _: noticed.set())
    group.start()
    group.wait_ready(Deadline.after(120))
    pid = group.workers[0].pid or 0
    held = ledger.devices()[0].used_bytes - baseline
    claimed = any(claim.pid == pid for claim in ledger.claims())
    ref = ProcessRef.open(pid)
    began = time.monotonic()
    ref.send(signal.SIGKILL)
    dead = ref.dead(wait_s=_BOUND_S)
    dead_ms = (time.monotonic() - began) * 1000
    noticed.wait(_BOUND_S)
    noticed_ms = (time.monotonic() - began) * 1000
    group.shutdown(Deadline.after(_BOUND_S))
    reaped_ms = (time.monotonic() - began) * 1000
    ref.close()
    by = Deadline.after(_BOUND_S)
    release = wait_released(ledger, {pid}, by)
    while (used := ledger.devices()[0].used_bytes) > baseline + _SLACK_BYTES and not by.passed:
        time.sleep(0.002)
    return {
        "held_mib": held >> 20,
        "pid_in_ledger": claimed,
        "dead_ms": round(dead_ms, 2) if dead else None,
        "noticed_ms": round(noticed_ms, 2),
        "reaped_ms": round(reaped_ms, 2),
        "back_ms": round((time.monotonic() - began) * 1000, 2),
        "given_back": release.done and used <= baseline + _SLACK_BYTES,
        "holders_left": [one.pid for one in holders()[0] if one.pid == pid],
    }


def main() -> int:
    """Measure, print, and fail when memory did not come back."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=8.0, help="memory to take, in GiB")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    try:
        ledger = open_ledger()
        devices = ledger.devices()
    except LedgerAbsent as error:
        print(f"SKIP: {error}")
        return 0
    if not devices:
        print("SKIP: NVML lists no device")
        return 0
    try:
        rounds = [one_round(ledger, asked.gib) for _ in range(asked.rounds)]
    except StartupError as error:
        print(f"FAIL: {error}")
        return 1
    finally:
        ledger.close()
    if asked.json:
        print(json.dumps(rounds, indent=2))
    else:
        print(f"{'held MiB':>9} {'dead ms':>9} {'noticed':>9} {'reaped':>9} {'back':>9}")
        for it in rounds:
            print(
                f"{it['held_mib']:>9} {it['dead_ms']:>9} {it['noticed_ms']:>9} "
                f"{it['reaped_ms']:>9} {it['back_ms']:>9}{'' if it['given_back'] else '  NOT BACK'}"
            )
    return 0 if all(it["given_back"] for it in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
