"""One process that has ffmpeg make and read frames for it, as ComfyUI and its like do."""

from __future__ import annotations

import subprocess
import threading

SOURCE = ["-f", "lavfi", "-re", "-i", "testsrc=size=64x64:rate=25"]


def read(number: int) -> None:
    """Read raw frames; the child inherits stdin, as such programs often let it."""
    argv = ["ffmpeg", "-loglevel", "error", *SOURCE, "-f", "rawvideo", "-"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as ffmpeg:
        assert ffmpeg.stdout is not None
        for count in range(1 << 30):
            if not ffmpeg.stdout.read(64 * 64 * 3):
                break
            if count == 0:
                print("frames", number, flush=True)  # noqa: T201  (what the test waits for)


threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
