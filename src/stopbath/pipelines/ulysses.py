"""Ulysses: every rank holds a part of the tokens, and attention has all of them for some heads.

diffusers does the work (`enable_parallelism`); its forward pass makes collectives of its own, two
for every attention. Here stands what makes that safe in a server: the ranks agree before each
pass that all of them make it, sizes that cannot be split are refused before the first collective
of a pass, and the split model is held against the whole one before it serves.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from stopbath.errors import RequestInvalid
from stopbath.pipelines.base import ModelUnusable, PeerLost
from stopbath.pipelines.joint import JointSplit, Peers
from stopbath.pipelines.likeness import check_close
from stopbath.pipelines.loader import denoiser_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from stopbath.pipelines.base import Watch

__all__ = ["UlyssesSplit"]

_INSTEAD: Final = "serve it without --parallel ulysses"


class UlyssesSplit(JointSplit):
    """A denoiser whose tokens are spread over the ranks, once `prove` was called on all of them.

    Not thread-safe: a rank computes one call at a time.

    Raises:
        ModelUnusable: at construction, when this model cannot be split over so many ranks.
    """

    def __init__(self, pipe: Any, peers: Peers) -> None:
        super().__init__(peers)
        self._name = type(pipe).__name__
        self._denoiser = denoiser_of(pipe)
        reason = self._why_not(pipe)
        if reason is not None:
            raise ModelUnusable(f"{self._name} {reason}; {_INSTEAD}")

    def _why_not(self, pipe: Any) -> str | None:
        plan = getattr(self._denoiser, "_cp_plan", None)
        if plan is None:
            return "has no plan for context parallelism in diffusers"
        if getattr(pipe, "transformer_2", None) is not None:
            return "has two denoisers"
        heads = self._denoiser.config.get("num_attention_heads")
        ranks = self._peers.world_size
        if heads is not None and heads % ranks:
            return f"has {heads} attention heads, which cannot be spread over {ranks} ranks"
        return None

    def prove(self, run: Callable[[], Tensor]) -> None:
        """Split the model, all ranks at the same time, and hold what `run` makes against before.

        Raises:
            ModelUnusable: diffusers refuses, or the split model makes something else.
        """
        alone = run()
        self._enable()
        try:
            together = run()
        except RequestInvalid as error:  # the size it makes by default
            raise ModelUnusable(f"{self._name}: {error}, or {_INSTEAD}") from error
        check_close(self._name, alone, together, _INSTEAD)

    def _enable(self) -> None:
        from diffusers import ContextParallelConfig
        from torch.distributed.device_mesh import init_device_mesh

        kind = self._peers.device.partition(":")[0]
        ranks = self._peers.world_size
        mesh = init_device_mesh(kind, (1, ranks), mesh_dim_names=("ring", "ulysses"))
        config = ContextParallelConfig(ulysses_degree=ranks, mesh=mesh)
        try:
            with _some_accelerator():
                self._denoiser.enable_parallelism(config=config)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[0]
            raise ModelUnusable(f"{self._name} cannot be split: {first}; {_INSTEAD}") from error
        # Said at every rank's first pass, and nothing that whoever reads it could change.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"diffusers\.hooks")
        self._refuse_odd_sizes()
        # On the instance, around the hooks of diffusers.
        self._whole = self._denoiser.forward
        self._denoiser.forward = self._forward

    def _refuse_odd_sizes(self) -> None:
        """Look at what each module is about to split, before diffusers does.

        These looks come before the first attention of a pass, on every rank alike, so that all
        ranks leave the pass at the same place and none waits for another.
        """
        from diffusers.hooks.context_parallel import _get_submodule_by_name

        for name, plan in self._denoiser._cp_plan.items():  # noqa: SLF001  (the class's own plan)
            if not isinstance(plan, dict):
                continue
            found = _get_submodule_by_name(self._denoiser, name)
            for module in found if isinstance(found, list) else [found]:
                module.register_forward_pre_hook(self._look(plan), with_kwargs=True)

    def _look(self, plan: dict[Any, Any]) -> Any:
        ranks = self._peers.world_size

        def look(_module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, split in plan.items():
                tensor = kwargs.get(name) if isinstance(name, str) else None
                if not isinstance(tensor, torch.Tensor) or tensor.ndim != split.expected_dims:
                    continue
                tokens = tensor.shape[split.split_dim]
                if tokens % ranks:
                    raise RequestInvalid(_refusal(name, tokens, ranks), "size")

        return look

    @contextmanager
    def together(self, watch: Watch, rows: int) -> Iterator[None]:
        """Run one call with the peers, however many `rows` it has.

        Raises what `JointCall` raises.
        """
        del rows
        with self._joined(watch):
            yield

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if call is not None:
            if call.opened:
                call.share(torch.empty(0))
            else:
                call.open(torch.empty(0))
        try:
            return self._whole(*args, **kwargs)
        except RequestInvalid:
            raise  # every rank's, and none is in a collective
        except Exception as error:
            # The peers may sit in a collective of this pass that this rank will never make.
            if call is not None:
                call.abandon()
            first = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise PeerLost(
                f"rank{self.rank} left its peers in a step: {type(error).__name__}: {first}"
            ) from error


@contextmanager
def _some_accelerator() -> Iterator[None]:
    """Have torch count at least one accelerator.

    diffusers divides by their number to find a device that it has no use for when a mesh is given.
    """
    count = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: max(1, count())
    try:
        yield
    finally:
        torch.accelerator.device_count = count


def _refusal(name: str, tokens: int, ranks: int) -> str:
    what, remedy = (
        ("the prompt has", "lengthen it by a word")
        if name.startswith("encoder")
        else ("the picture has", "choose another size")
    )
    return f"{what} {tokens} tokens, which cannot be spread over {ranks} ranks; {remedy}"
