"""The judge: a digit classifier that shares no training digit with the generator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from training import data
from training.progress import Progress
from training.recipe import Phase

if TYPE_CHECKING:
    from pathlib import Path

FULL: Final = Phase(iterations=2500, batch=64, learning_rate=2e-3, warm_up=50)
WEIGHTS_FILE: Final = "digit-classifier.safetensors"
TEST_FILE: Final = "held-out-digits.png"
TURN_RAD: Final = math.radians(12)
SHEAR: Final = 0.15
SCALE: Final = 0.12
SHIFT: Final = 0.12
NOISE: Final = 0.08


class DigitClassifier(nn.Module):  # type: ignore[misc] # mypy does not follow torch
    """Three convolutions and two linear layers."""

    def __init__(self) -> None:
        """Make an untrained classifier."""
        super().__init__()
        self.layers = nn.Sequential(
            *_convolution(1, 16),
            *_convolution(16, 32),
            *_convolution(32, 48),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(48 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, ink: Tensor) -> Tensor:
        """Logits (batch, 10) of (batch, 1, 32, 32) ink in 0..1."""
        return torch.as_tensor(self.layers(ink))


def _convolution(channels: int, out: int) -> list[nn.Module]:
    convolve = nn.Conv2d(channels, out, 3, padding=1)
    return [convolve, nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]


def load(directory: Path) -> DigitClassifier:
    """Load the trained classifier from ``directory``."""
    classifier = DigitClassifier()
    classifier.load_state_dict(load_file(directory / WEIGHTS_FILE))
    classifier.eval()
    return classifier


def accuracy(classifier: DigitClassifier, digits: data.Digits) -> float:
    """Share of ``digits`` that ``classifier`` names correctly."""
    with torch.no_grad():
        named = classifier(digits.images).argmax(1)
    return float((named == digits.labels).float().mean())


def train_and_save(source: Path, out: Path, seed: int, budget: float) -> None:
    """Train on the classifier's part of ``source``; save it and the test part into ``out``."""
    classifier = train(data.load(source, data.CLASSIFIER_SLOTS), FULL.scaled(budget), seed)
    unseen = data.load(source, data.TEST_SLOTS)
    out.mkdir(parents=True, exist_ok=True)
    save_file(classifier.state_dict(), out / WEIGHTS_FILE)
    save_test_digits(unseen, out / TEST_FILE)
    print(f"classifier: {accuracy(classifier, unseen):.4f} of {len(unseen.labels)} unseen digits")


def train(digits: data.Digits, phase: Phase, seed: int) -> DigitClassifier:
    """Train on ``digits``, turned, sheared, scaled, moved and blurred."""
    torch.manual_seed(seed)
    chance = torch.Generator().manual_seed(seed)
    classifier = DigitClassifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=phase.learning_rate)
    schedule = phase.schedule(optimizer)
    progress = Progress("classifier", phase.iterations)
    for iteration in range(phase.iterations):
        rows = torch.randint(len(digits.images), (phase.batch,), generator=chance)
        logits = classifier(_disturbed(digits.images[rows], chance))
        loss = functional.cross_entropy(logits, digits.labels[rows], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.step(iteration + 1, f"loss {float(loss.detach()):.3f}")
    classifier.eval()
    return classifier


def _disturbed(images: Tensor, chance: torch.Generator) -> Tensor:
    """Move each of the (batch, 1, 32, 32) images a little, blur half of them and add noise."""
    batch = len(images)
    turn, shear, scale_x, scale_y, shift_x, shift_y = (
        2 * torch.rand((6, batch), generator=chance) - 1
    )
    cos, sin = torch.cos(TURN_RAD * turn), torch.sin(TURN_RAD * turn)
    scale_x, scale_y = 1 + SCALE * scale_x, 1 + SCALE * scale_y
    top = torch.stack([scale_x * cos, -sin + SHEAR * shear, SHIFT * shift_x], dim=1)
    bottom = torch.stack([sin, scale_y * cos, SHIFT * shift_y], dim=1)
    affine = torch.stack([top, bottom], dim=1)
    grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    blurred = functional.avg_pool2d(moved, 3, stride=1, padding=1)
    share = torch.rand((batch, 1, 1, 1), generator=chance).sub(0.5).clamp_min(0)
    noise = NOISE * torch.randn(images.shape, generator=chance)
    return (torch.lerp(moved, blurred, share) + noise).clamp(0, 1)


def save_test_digits(digits: data.Digits, file: Path) -> None:
    """Save the digits as one grey picture: a row per digit, as many columns as all rows fill."""
    rows = [digits.images[digits.labels == digit] for digit in range(10)]
    columns = min(len(row) for row in rows)
    grid = torch.cat([torch.cat(list(row[:columns, 0]), dim=1) for row in rows])
    Image.fromarray((grid * 255).round().to(torch.uint8).numpy()).save(file, optimize=True)


def load_test_digits(file: Path) -> data.Digits:
    """Load what `save_test_digits` wrote."""
    with Image.open(file) as picture:
        grid = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255)
    tiles = grid.unfold(0, data.PICTURE_PX, data.PICTURE_PX).unfold(
        1, data.PICTURE_PX, data.PICTURE_PX
    )
    columns = tiles.shape[1]
    return data.Digits(
        tiles.reshape(-1, 1, data.PICTURE_PX, data.PICTURE_PX),
        torch.arange(10).repeat_interleave(columns),
    )
