"""What a rank asks of a model, and the ways in which a call in it ends early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from stopbath.lifecycle import StartRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image
    from torch import Tensor

    from stopbath.messages import GenerationRequest, ModelInfo

__all__ = [
    "Cancelled",
    "ModelUnusable",
    "PeerFailed",
    "PeerLost",
    "Pipeline",
    "RequestPipeline",
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


class Pipeline(RequestPipeline, Protocol):
    """A model taken apart at its stages, for batching steps of different requests.

    B is the number of rows. Latents are (B, C, H / f, W / f) for a picture of H x W pixels, C and
    f (the VAE's factor) being the model's; families that pack their latents do so inside.
    """

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Any:
        """Turn B prompts into conditioning: the family's own structure of tensors, B rows each.

        Rows of different calls can be joined; unconditional and conditional rows are apart.
        """
        ...

    def prepare(self, seeds: Sequence[int], size: tuple[int, int]) -> Tensor:
        """Draw the starting noise: (B, C, H / f, W / f), one CPU generator per seed.

        `size` is (width, height) in pixels, a multiple of `info.size_multiple`.
        """
        ...

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Any) -> Tensor:
        """Predict for each row at its own timestep, guidance applied: shape of `latents`.

        `timesteps` is (B,), in the model's own units, as its scheduler gives them.
        """
        ...

    def decode(self, latents: Tensor) -> list[Image]:
        """Turn finished latents into B RGB pictures."""
        ...
