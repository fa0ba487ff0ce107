"""What a server is told, as frozen data; the only reader of the environment."""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Literal

import msgspec

from stopbath.errors import UsageError

__all__ = ["BUNDLED", "ServeConfig", "environment", "model_path"]

BUNDLED = "bundled"
"""The name that stands for the model that ships in the package."""

Parallel = Literal["none", "cfg", "ulysses"]
Mode = Literal["request", "step"]
ExecutorKind = Literal["multiproc", "inproc"]
OnEngineDeath = Literal["exit", "hold", "restart"]


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `stopbath serve` can be told; graces and budgets in seconds."""

    model: str = BUNDLED  # a path, or BUNDLED
    served_name: str = ""  # the name in /v1/models; by default the folder's name
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    ranks: int = 1  # of one replica
    replicas: int = 1
    replica: int = 0  # which of them, as its ranks are told
    parallel: Parallel = "none"
    mode: Mode = "request"  # one request at a time, or the steps of several in batches
    max_batch: int = 16  # pictures that step mode works on at once
    executor: ExecutorKind = "multiproc"  # ranks as processes, or as threads for debugging
    compile: bool = False  # the denoiser, with torch.compile
    zygote: bool = False  # ranks are forked off a process that has imported once what they need
    device: str = "auto"  # auto, cpu, cuda
    drain_s: float = 5.0
    terminate_s: float = 2.0
    kill_s: float = 2.0
    start_s: float = 600.0  # budget of one start phase, extended by progress
    request_s: float = 600.0  # a request's deadline
    step_budget_s: float = 120.0  # for which a rank in a call may say nothing
    on_engine_death: OnEngineDeath = "exit"
    max_restarts: int = 3  # of one replica, in a row
    restart_window_s: float = 60.0  # of service, after which the row begins anew
    retry_on_death: bool = False
    api_key: str = ""
    worker_extension: str = ""  # module:function
    queue_limit: int = 64
    max_images: int = 16  # n of one request
    max_steps: int = 1000
    max_body_bytes: int = 1 << 20

    @property
    def model_name(self) -> str:
        """The name that clients use for the model."""
        return self.served_name or PurePath(self.model).name

    @property
    def capacity(self) -> int:
        """How many requests a replica takes at a time."""
        return self.max_batch if self.mode == "step" else 1

    @property
    def preempts(self) -> bool:
        """Whether a request may be put on hold for a more urgent one."""
        return self.mode == "step" and self.ranks == 1

    def checked(self) -> ServeConfig:
        """Give itself when it can be, else `UsageError` with one line that says what cannot."""
        _check_counts(self)
        _check_ranks(self)
        _check_seconds(self)
        return self


def _check_counts(config: ServeConfig) -> None:
    for flag, count, least in (
        ("--ranks", config.ranks, 1),
        ("--replicas", config.replicas, 1),
        ("--max-batch", config.max_batch, 1),
        ("--max-restarts", config.max_restarts, 0),
    ):
        if count < least:
            raise UsageError(f"{flag} must be at least {least}, not {count}")
    if not 0 <= config.port <= 65535:  # noqa: PLR2004
        raise UsageError(f"--port must be between 0 and 65535, not {config.port}")


def _check_ranks(config: ServeConfig) -> None:
    if config.parallel == "cfg" and config.ranks != 2:  # noqa: PLR2004
        raise UsageError(f"--parallel cfg runs on 2 ranks, not on {config.ranks}")
    if config.parallel == "ulysses" and config.ranks < 2:  # noqa: PLR2004
        raise UsageError("--parallel ulysses runs on 2 ranks or more, not on 1")
    if config.parallel == "none" and config.ranks > 1:
        raise UsageError(
            f"--ranks {config.ranks} needs a way to share the work: "
            f"--ranks 2 --parallel cfg, or --ranks {config.ranks} --parallel ulysses"
        )

    if config.compile and config.parallel == "ulysses":
        raise UsageError("--compile does not go with --parallel ulysses: use one of them")
    if config.executor == "inproc" and config.ranks > 1:
        raise UsageError(
            f"--executor inproc runs on 1 rank, not on {config.ranks}: "
            "torch.distributed knows one rank per process"
        )


def _check_seconds(config: ServeConfig) -> None:
    for flag, seconds in (
        ("--drain", config.drain_s),
        ("--terminate", config.terminate_s),
        ("--kill", config.kill_s),
    ):
        if not 0 <= seconds < float("inf"):
            raise UsageError(f"{flag} must be a number of seconds >= 0, not {seconds}")
    for flag, seconds in (
        ("--step-budget", config.step_budget_s),
        ("--restart-window", config.restart_window_s),
    ):
        if not 0 < seconds < float("inf"):
            raise UsageError(f"{flag} must be a number of seconds > 0, not {seconds}")


def model_path(model: str) -> Path:
    """Give the folder that `model` (a path, or `BUNDLED`) means."""
    if model == BUNDLED:
        return Path(__file__).parent / "pipelines" / "bundled"
    return Path(model).expanduser()


def environment() -> dict[str, str]:
    """Give a copy of this process's environment, for a process to be started with it."""
    return dict(os.environ)  # noqa: TID251  (this is its home)
