"""What travels between the server process and its ranks, as typed msgpack frames.

No pickle: a frame is msgpack of the structs below, and a value inside it is made of plain
msgpack types, structs turned to builtins (`msgspec.structs.asdict`, back with
`msgspec.convert`), and blobs (see `stopbath.wire`), which travel as sealed memfds.

Every rank knows the method `GENERATE` (a `GenerationRequest` in, a `GenerationResult` out of rank
0, None out of the others) and `PING` (gives back its params); a worker extension may add more.
"""

from __future__ import annotations

import signal
from typing import Any, Final, Literal

import msgspec

__all__ = [
    "CANCELLED",
    "DUMP_SIGNAL",
    "GENERATE",
    "PEER_FAILED",
    "PEER_LOST",
    "PING",
    "REQUEST_INVALID",
    "Call",
    "Cancel",
    "Dump",
    "Dumped",
    "Failure",
    "FromRank",
    "GenerationRequest",
    "GenerationResult",
    "Hold",
    "ModelInfo",
    "Progress",
    "Reply",
    "Resume",
    "ToRank",
]

GENERATE: Final = "generate"
"""Method: make the pictures of one `GenerationRequest`."""

PING: Final = "ping"
"""Method: give back the params; answered between calls, so it also says that a rank is free."""

CANCELLED: Final = "Cancelled"
"""`Failure.kind` of a call that was given up because somebody asked or its deadline passed."""

REQUEST_INVALID: Final = "RequestInvalid"
"""`Failure.kind` of a request that the model cannot do; the message says why."""

PEER_FAILED: Final = "PeerFailed"
"""`Failure.kind` of a rank that left a call because another rank failed in it."""

PEER_LOST: Final = "PeerLost"
"""`Failure.kind` of a rank whose collective broke: a peer is dead, and the replica with it."""


DUMP_SIGNAL: Final = signal.SIGQUIT
"""Has a rank write its main thread's stack, also while its interpreter cannot run."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for pictures, validated; sizes in pixels."""

    id: str
    prompt: str
    negative_prompt: str = ""
    n: int = 1
    width: int
    height: int
    seed: int
    num_inference_steps: int
    guidance_scale: float
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int = 100


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded pictures of one request, base64 already (made in the rank), one per picture."""

    id: str
    images_b64: list[bytes]
    seconds: float


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of the model it has loaded, with its `ready`."""

    pipeline: str  # class name, e.g. StableDiffusion3Pipeline
    family: str  # e.g. "sd3"
    width: int  # default size, pixels
    height: int
    size_multiple: int  # a size must be a multiple of this many pixels
    max_width: int
    max_height: int
    num_inference_steps: int  # default
    guidance_scale: float  # default
    max_prompt_tokens: int
    device: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Run `method` with `params`; `left_s` is what is left of the caller's deadline."""

    id: int
    method: str
    params: Any
    left_s: float | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Give up call `id` at the next step; unknown ids are ignored."""

    id: int


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Make no step of call `id` until `Resume`, and keep what it has; step mode only."""

    id: int


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Go on with a call on hold where it was."""

    id: int


class Dump(msgspec.Struct, frozen=True, tag="dump"):
    """Write the stacks of all threads to stderr, while the call goes on."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Call `id` has done `step` of `steps`. Every rank says so; clients hear rank 0."""

    id: int
    step: int
    steps: int


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Call `id` returned `value`."""

    id: int
    value: Any


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Call `id` raised; `kind` is the exception's class name."""

    id: int
    kind: str
    message: str
    traceback: str


class Dumped(msgspec.Struct, frozen=True, tag="dumped"):
    """The stacks were written. No progress: the interpreter runs, the call may not."""


ToRank = Call | Cancel | Hold | Resume | Dump
FromRank = Progress | Reply | Failure | Dumped
