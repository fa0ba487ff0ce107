"""Resumable stages: a crash costs the iterations since the last save, and changes no result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from random import Random
    from typing import Any


class Stateful(Protocol):
    """What modules, optimizers and schedules have in common."""

    def state_dict(self) -> Any:
        """Return everything that is needed to go on."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from ``state_dict``."""


class OtherRunError(Exception):
    """The checkpoint belongs to a run with another seed, budget or data."""


class Checkpoint:
    """Saves and resumes named stages of one run in one folder; without a folder, nothing."""

    def __init__(self, directory: Path | None, run: str) -> None:
        """Keep the stages' files in ``directory``; ``run`` says what decides their content."""
        self._directory = directory
        self._run = run

    def resume(
        self,
        stage: str,
        parts: Mapping[str, Stateful],
        chance: torch.Generator,
        captions: Random | None = None,
    ) -> int:
        """Load ``stage`` into ``parts`` and the sources of chance; how many iterations are done.

        Raises `OtherRunError` rather than mixing two runs.
        """
        if self._directory is None or not (file := self._directory / f"{stage}.pt").exists():
            return 0
        # The file is this script's own, and the state of `Random` is a tuple of numbers.
        saved = torch.load(file, weights_only=False)
        if saved["run"] != self._run:
            raise OtherRunError(f"{file} belongs to the run {saved['run']}, this is {self._run}")
        for name, part in parts.items():
            part.load_state_dict(saved["parts"][name])
        chance.set_state(saved["chance"])
        if captions is not None:
            captions.setstate(saved["captions"])
        return int(saved["done"])

    def save(
        self,
        stage: str,
        parts: Mapping[str, Stateful],
        chance: torch.Generator,
        done: int,
        captions: Random | None = None,
    ) -> None:
        """Save ``stage`` after ``done`` iterations, in one step that a crash cannot halve."""
        if self._directory is None:
            return
        state = {
            "run": self._run,
            "parts": {name: part.state_dict() for name, part in parts.items()},
            "chance": chance.get_state(),
            "captions": captions.getstate() if captions is not None else None,
            "done": done,
        }
        self._directory.mkdir(parents=True, exist_ok=True)
        fresh = self._directory / f"{stage}.new"
        torch.save(state, fresh)
        fresh.replace(fresh.with_suffix(".pt"))
