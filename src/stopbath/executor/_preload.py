"""What the ranks of a model import, for a zygote to import it once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from stopbath.config import model_path

if TYPE_CHECKING:
    from stopbath.config import ServeConfig

__all__ = ["preload_of"]

_LOADING: Final = "stopbath.worker.loading"
_LIBRARIES: Final = ("diffusers", "transformers")  # those whose classes are imported on first use


def preload_of(config: ServeConfig) -> tuple[str, ...]:
    """Name a rank's own modules, and the classes that the checkpoint is made of.

    What is wrong with a checkpoint is for the ranks to say, who load it.
    """
    try:
        data = (model_path(config.model) / "model_index.json").read_bytes()
        index = msgspec.json.decode(data, type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return (_LOADING,)
    parts = [["diffusers", index.get("_class_name")], *index.values()]
    classes = {word: None for part in parts if (word := _class_of(part))}  # each once, in order
    return (_LOADING, *classes)


def _class_of(part: Any) -> str:
    match part:
        case [str(library), str(name)] if library in _LIBRARIES and name.isidentifier():
            return f"{library}:{name}"
    return ""
