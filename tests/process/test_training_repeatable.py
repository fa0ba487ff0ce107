"""The training script makes the same bytes again, without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from training import train_digits

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 80

pytestmark = pytest.mark.timeout(110)


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A folder of 28x28 digits, made of scikit-learn's 8x8 ones."""
    folder = tmp_path / "digits"
    folder.mkdir()
    small = load_digits()
    for digit in range(10):
        chosen = small.images[small.target == digit][:30] / 16
        large = np.pad(chosen.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
        (folder / f"{digit}.json").write_text(json.dumps({"data": large.ravel().tolist()}))
    return folder


def train(digits: Path, out: Path, checkpoints: Path) -> subprocess.Popen[str]:
    arguments = {
        "--out": out / "model",
        "--classifier-out": out / "judge",
        "--data": digits,
        "--checkpoints": checkpoints,
        "--seed": 3,
        "--budget": 0.001,
    }
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "training.train_digits"),
            *(str(word) for pair in arguments.items() for word in pair),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(run: subprocess.Popen[str]) -> None:
    try:
        said, _ = run.communicate(timeout=RUN_S)
    finally:
        run.kill()
    assert run.returncode == 0, said


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_equal_seeds_make_equal_files(digits: Path, tmp_path: Path) -> None:
    """Two runs with one seed write the same bytes; so does one that resumes after a crash."""
    first, second, resumed = (tmp_path / name for name in ("first", "second", "resumed"))
    runs = [train(digits, out, out / "checkpoints") for out in (first, second)]
    for run in runs:
        finish(run)
    made = files(first / "model") | files(first / "judge")
    assert {"model_index.json", "digit-classifier.safetensors"} <= made.keys()
    assert made == files(second / "model") | files(second / "judge")

    (resumed / "checkpoints").mkdir(parents=True)
    for stage in ("vae-1.pt", "vae-2.pt", "denoiser-1.pt"):
        shutil.copy(first / "checkpoints" / stage, resumed / "checkpoints")
    finish(train(digits, resumed, resumed / "checkpoints"))
    assert made == files(resumed / "model") | files(resumed / "judge")


def test_missing_digits_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without data the script says which file it wanted, in one line and with status 1."""
    status = train_digits.main(["--out", str(tmp_path), "--data", str(tmp_path / "nowhere")])
    said = capsys.readouterr().err
    assert status == 1
    assert said.count("\n") == 1
    assert "0.json is not a file of 28x28 digits" in said
