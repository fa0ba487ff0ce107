"""Load a diffusers checkpoint from disk and say what it is."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stopbath.config import model_path
from stopbath.messages import ModelInfo
from stopbath.pipelines.base import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "DEFAULTS_FILE",
    "QWEN_IMAGE",
    "ModelDefaults",
    "load_pipeline",
    "model_info",
]

DEFAULTS_FILE: Final = "stopbath.json"
"""A file beside model_index.json with what diffusers has no place for; see `ModelDefaults`."""

QWEN_IMAGE: Final = "qwen-image"
"""The family whose guidance is called `true_cfg_scale`; its `guidance_scale` is another thing."""

_FAMILIES: Final = (
    ("StableDiffusion3", "sd3"),
    ("StableDiffusionXL", "sdxl"),
    ("StableDiffusion", "sd"),
    ("Flux", "flux"),
    ("PixArt", "pixart"),
    ("QwenImage", QWEN_IMAGE),
    ("Sana", "sana"),
)
_LARGEST_OF_DEFAULT: Final = 2  # a model without positions is allowed twice its default side


class ModelDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `stopbath.json` may say; everything it leaves out comes from diffusers."""

    width: int | None = None
    height: int | None = None
    max_width: int | None = None
    max_height: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None


def load_pipeline(model: str, device: str) -> tuple[Any, ModelDefaults]:
    """Load the checkpoint `model` onto `device` ("cpu", "cuda:0" …) and read its defaults.

    float32 on the CPU, bfloat16 on an accelerator. Nothing is ever fetched.

    Raises:
        ModelUnusable: it is no diffusers folder, or diffusers cannot load it.
    """
    path = model_path(model)
    defaults = _read_defaults(path)
    _check_index(path)
    import torch
    from diffusers import DiffusionPipeline

    _hush()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        pipe = DiffusionPipeline.from_pretrained(str(path), local_files_only=True, dtype=dtype)
    except (OSError, ValueError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ModelUnusable(f"{path} cannot be loaded by diffusers: {first}") from error
    if "prompt" not in call_parameters(pipe):
        raise ModelUnusable(f"{path} is a {type(pipe).__name__}, which takes no prompt")
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device), defaults


def _hush() -> None:
    """Keep progress bars and advice off stderr, whose last lines explain a rank's death."""
    import diffusers.utils.logging as of_diffusers
    import transformers.utils.logging as of_transformers

    for module in (of_diffusers, of_transformers):
        module.disable_progress_bar()
        module.set_verbosity_error()


def call_parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    """Give the parameters that calling the pipeline accepts."""
    return inspect.signature(type(pipe).__call__).parameters


def _check_index(path: Path) -> None:
    index = path / "model_index.json"
    if not path.is_dir():
        raise ModelUnusable(f"{path} is not a folder; give a diffusers checkpoint on disk")
    try:
        content = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ModelUnusable(f"{path} is no diffusers checkpoint: no model_index.json") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelUnusable(f"{index} cannot be read: {error}") from error
    if not isinstance(content.get("_class_name"), str):
        raise ModelUnusable(f"{index} names no pipeline (_class_name)")


def _read_defaults(path: Path) -> ModelDefaults:
    file = path / DEFAULTS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=ModelDefaults)
    except (FileNotFoundError, NotADirectoryError):
        return ModelDefaults()
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelUnusable(f"{file} cannot be read: {error}") from error


def model_info(pipe: Any, defaults: ModelDefaults, device: str) -> ModelInfo:
    """Say what a loaded pipeline is: the model's own word, then diffusers' configuration."""
    parameters = call_parameters(pipe)

    def default_of(name: str, fallback: float) -> Any:
        value = parameters[name].default if name in parameters else fallback
        return value if isinstance(value, int | float) else fallback

    denoiser = denoiser_of(pipe)
    name = type(pipe).__name__
    family = next((family for start, family in _FAMILIES if name.startswith(start)), name.lower())
    factor = int(getattr(pipe, "vae_scale_factor", 8))
    patch = 2 if family == "flux" else int(_config(denoiser, "patch_size") or 1)
    multiple = math.lcm(factor * patch, 8)  # most pipelines check for 8 whatever their factor
    side = _default_side(pipe, denoiser, factor)
    positions = _config(denoiser, "pos_embed_max_size")
    largest = positions * patch * factor if positions else side * _LARGEST_OF_DEFAULT
    length = defaults.max_sequence_length or default_of("max_sequence_length", 0)
    tokens = length or getattr(getattr(pipe, "tokenizer", None), "model_max_length", 77)
    scale = "true_cfg_scale" if family == QWEN_IMAGE else "guidance_scale"
    guidance = defaults.guidance_scale
    return ModelInfo(
        pipeline=name,
        family=family,
        width=defaults.width or side,
        height=defaults.height or side,
        size_multiple=multiple,
        max_width=defaults.max_width or largest,
        max_height=defaults.max_height or largest,
        num_inference_steps=defaults.num_inference_steps or default_of("num_inference_steps", 50),
        guidance_scale=float(default_of(scale, 1.0) if guidance is None else guidance),
        max_prompt_tokens=int(min(tokens, 1 << 20)),  # "no limit" is a number with 30 digits
        device=device,
    )


def denoiser_of(pipe: Any) -> Any:
    """Give the network that runs at every step, or None when the pipeline has no usual one."""
    return getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)


def _config(module: Any, key: str) -> Any:
    return module.config.get(key) if module is not None else None


def _default_side(pipe: Any, denoiser: Any, factor: int) -> int:
    """Give the default side in pixels as the pipelines themselves compute it."""
    sample = getattr(pipe, "default_sample_size", None) or _config(denoiser, "sample_size") or 64
    return int(max(sample) if isinstance(sample, list | tuple) else sample) * factor
