"""What a rank asks of a model, and the ways in which a call in it ends early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stopbath.lifecycle import StartRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from PIL.Image import Image
    from torch import Tensor

    from stopbath.messages import GenerationRequest, ModelInfo

    Rows = dict[str, Tensor]
    """Conditioning by the name the family gives it, every tensor with the rows first."""

__all__ = [
    "Cancelled",
    "ModelUnusable",
    "PeerFailed",
    "PeerLost",
    "Pipeline",
    "RequestPipeline",
    "Sample",
    "Split",
    "StepPipeline",
    "Watch",
]

# The names of the next three are `Failure.kind` on the wire: see messages.py.


class Cancelled(Exception):
    """The call was given up at a step boundary, on every rank at the same one."""


class PeerFailed(Exception):
    """Another rank failed in this call; this rank left it with that one, unharmed."""


class PeerLost(Exception):
    """A collective broke: a peer is dead and the replica cannot work again."""


class ModelUnusable(StartRefused):
    """The model cannot be served like this; one line that says what to change."""


class Watch(Protocol):
    """How a call is watched from outside while the model computes."""

    @property
    def call_id(self) -> int:
        """The call's number; all ranks of a replica give the same one."""
        ...

    @property
    def cancelled(self) -> bool:
        """Whether the call should be given up at the next step; read between steps."""
        ...

    def progress(self, step: int, steps: int) -> None:
        """Say that `step` of `steps` (from 1) is done; must not block."""
        ...


class Split(Protocol):
    """How the ranks of a replica compute the steps of one request together."""

    @property
    def rank(self) -> int:
        """This rank's number in the replica."""
        ...

    @property
    def sharing(self) -> bool:
        """Whether the call in hand shares its steps, so that all ranks must leave it together."""
        ...

    def prove(self, run: Callable[[], Tensor]) -> None:
        """Begin to share, on all ranks at the same time; `run` gives the latents of a guided run.

        Raises:
            ModelUnusable: this model cannot be shared like that.
        """
        ...

    def together(self, watch: Watch, rows: int) -> AbstractContextManager[None]:
        """Run one call with the peers; `rows` is the number of its pictures."""
        ...


class RequestPipeline(Protocol):
    """Request mode: one request at a time through the whole model."""

    @property
    def info(self) -> ModelInfo:
        """What the model is and can."""
        ...

    def generate(self, request: GenerationRequest, watch: Watch) -> list[Image]:
        """Make the pictures of one request, `request.n` of them, RGB.

        Picture i is made from the seed `request.seed + i`, so that each can be had again alone;
        the first equals what diffusers makes of
        `pipe(prompt, generator=torch.Generator("cpu").manual_seed(seed), …)`. On a rank that is
        not the first of its replica the list is empty.

        Raises:
            RequestInvalid: the model cannot do this size or count.
            Cancelled: `watch.cancelled` was seen between two steps, or by a peer.
            PeerFailed: another rank of the replica failed in this call.
            PeerLost: another rank of the replica is dead.
        """
        ...


@dataclass(slots=True, eq=False)
class Sample:
    """One request between its prompt and its pictures, at its own place in its own schedule.

    It holds all that its steps need, so that requests share nothing but the model call.
    """

    size: tuple[int, int]  # width, height in pixels
    guidance: float
    positive: Rows
    negative: Rows | None  # None: no guidance by two halves
    latents: Tensor  # a row for every picture
    scheduler: Any  # its own copy: multistep schedulers hold history
    timesteps: Tensor
    extra: dict[str, Any]  # what the scheduler's step takes besides: its own generators, mostly
    steps: int  # asked for; some schedulers call the model more often
    calls: int = 0  # model calls made

    @property
    def pictures(self) -> int:
        """How many pictures it makes."""
        return len(self.latents)

    @property
    def over(self) -> bool:
        """Whether all its steps are done."""
        return self.calls >= len(self.timesteps)

    @property
    def steps_done(self) -> int:
        """How many of `steps` are done."""
        return self.steps * self.calls // len(self.timesteps)

    @property
    def shape(self) -> tuple[Any, ...]:
        """What samples have in common that can share a model call: sizes, length of the text."""
        rows = (tensor.shape[1:] for _, tensor in sorted(self.positive.items()))
        return (self.size, self.latents.shape[1:], *rows)


class Pipeline(Protocol):
    """A family of models taken apart at its stages, for steps of different requests together.

    B is the number of rows, one or two for each picture. Latents are as the family's diffusers
    pipeline holds them between its steps; f below is the VAE's factor.
    """

    def encode(self, texts: Sequence[str]) -> list[Rows]:
        """Turn prompts, positive or negative, into conditioning of one row each."""
        ...

    def prepare(self, request: GenerationRequest, text: Rows, negative: Rows | None) -> Sample:
        """Draw the starting noise, one CPU generator per picture, and make the schedule.

        `negative` None stands for no negative prompt; whether there is guidance is decided here.
        """
        ...

    def denoise(
        self, latents: Tensor, timesteps: Tensor, rows: Rows, size: tuple[int, int]
    ) -> Tensor:
        """Call the model once: the prediction for B rows, each at its own timestep (B,).

        `timesteps` are in the scheduler's own units; `latents` are scaled for the model.
        """
        ...

    def decode(self, latents: Tensor, size: tuple[int, int]) -> list[Image]:
        """Turn finished latents into RGB pictures of `size`, one per row."""
        ...


class StepPipeline(Protocol):
    """Step mode: the steps of several requests in one model call.

    Each method answers for every request by itself: an exception in the list is the end of that
    request only. What a method raises itself is the fault of all it was given.
    """

    @property
    def info(self) -> ModelInfo:
        """What the model is and can."""
        ...

    def begin(self, requests: Sequence[GenerationRequest]) -> list[Sample | Exception]:
        """Make requests ready for their first step; `RequestInvalid` for what cannot be done."""
        ...

    def step(self, samples: Sequence[Sample]) -> list[Exception | None]:
        """Advance samples of one `shape` by one model call."""
        ...

    def finish(self, samples: Sequence[Sample]) -> list[list[Image]]:
        """Give the pictures of samples that are over."""
        ...
