"""How long each stage trains, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Self

import torch


@dataclass(frozen=True)
class Phase:
    """A run of iterations with one batch size and one learning-rate curve."""

    iterations: int
    batch: int
    learning_rate: float
    warm_up: int = 0

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Linear warm-up, then a cosine down to zero."""

        def factor(iteration: int) -> float:
            if iteration < self.warm_up:
                return (iteration + 1) / self.warm_up
            after = (iteration - self.warm_up) / max(1, self.iterations - self.warm_up)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, after)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def scaled(self, budget: float) -> Self:
        """Return the same phase with ``budget`` times the iterations, and at least two."""
        return replace(
            self,
            iterations=max(2, round(budget * self.iterations)),
            warm_up=round(budget * self.warm_up),
        )


@dataclass(frozen=True)
class VaePhase(Phase):
    """A phase of the autoencoder."""

    free_share: float = 0.5
    """Share of pictures in any two colours: without them it would depend on the named ones."""
    legible: bool = False
    """Paint the others in pairs that prompts may ask for, not in any two named colours."""


@dataclass(frozen=True)
class DenoiserPhase(Phase):
    """A phase of the denoiser."""

    terse_share: float = 0.0
    """Share of batches whose captions are short and padded to their own length, for speed."""
    weighted: bool = False
    """Weigh each picture by the inverse contrast of its colours."""
    sigma_shift: float = 0.0
    """Above zero more of the noise levels are high ones, at which the digit is decided."""
    exacting: bool = False
    """Captions with unknown words in more places, and no ambiguous ones."""
    taught: bool = False
    """Also ask the pooled text for digit and colours, so that words are understood sooner."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the size of a training run."""

    vae: tuple[VaePhase, ...]
    denoiser: tuple[DenoiserPhase, ...]
    pool: int
    """Painted digits, encoded once, from which the denoiser's batches are drawn."""

    def scaled(self, budget: float) -> Recipe:
        """Return the recipe with ``budget`` times the work."""
        return Recipe(
            vae=tuple(phase.scaled(budget) for phase in self.vae),
            denoiser=tuple(phase.scaled(budget) for phase in self.denoiser),
            pool=max(256, round(budget * self.pool)),
        )


FULL: Final = Recipe(
    vae=(
        VaePhase(iterations=1800, batch=32, learning_rate=3e-3, warm_up=50),
        # Small batches: many cheap updates, which is what sharp strokes need.
        VaePhase(
            iterations=4000,
            batch=8,
            learning_rate=1.5e-3,
            warm_up=100,
            free_share=0.2,
            legible=True,
        ),
    ),
    denoiser=(
        DenoiserPhase(iterations=4000, batch=64, learning_rate=2e-3, warm_up=200, terse_share=0.75),
        DenoiserPhase(
            iterations=3500,
            batch=64,
            learning_rate=1.5e-3,
            warm_up=100,
            terse_share=0.5,
            weighted=True,
            sigma_shift=0.5,
            taught=True,
        ),
        DenoiserPhase(
            iterations=4500,
            batch=64,
            learning_rate=1.6e-3,
            warm_up=100,
            terse_share=0.5,
            weighted=True,
            sigma_shift=0.4,
            taught=True,
        ),
        DenoiserPhase(
            iterations=3000,
            batch=64,
            learning_rate=1.2e-3,
            warm_up=100,
            terse_share=0.3,
            weighted=True,
            sigma_shift=0.4,
            exacting=True,
            taught=True,
        ),
    ),
    pool=48_000,
)
