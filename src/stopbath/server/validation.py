"""From the bytes of a body to a `GenerationRequest`, or a `ClientError` that names the field."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stopbath.messages import GenerationRequest
from stopbath.server.answers import ClientError

if TYPE_CHECKING:
    from stopbath.config import ServeConfig
    from stopbath.messages import ModelInfo

__all__ = ["MAX_PROMPT_CHARS", "ImageBody", "parse_body", "read_priority", "read_request"]

MAX_PROMPT_CHARS = 4000
_MAX_SEED = 2**63 - 1  # leaves room for seed + picture number in 64 bits
_MAX_GUIDANCE = 100.0
_MAX_PRIORITY = 10
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
_FORMATS: dict[str, Literal["png", "jpeg", "webp"]] = {
    "png": "png",
    "jpeg": "jpeg",
    "webp": "webp",
}


class ImageBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/images/generations`; null stands for the default everywhere."""

    prompt: str
    model: str | None = None
    n: int | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    output_compression: int | None = None
    stream: bool | None = None
    # What a diffusion model understands beyond OpenAI's parameters.
    negative_prompt: str | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    priority: int | None = None
    # OpenAI's parameters that mean nothing here: taken, so that its clients work unchanged.
    quality: Any = None
    style: Any = None
    background: Any = None
    moderation: Any = None
    partial_images: Any = None
    user: Any = None


_decoder = msgspec.json.Decoder(ImageBody)


def parse_body(raw: bytes) -> ImageBody:
    """Read a body; `ClientError` 400 says what is wrong with it, and where."""
    try:
        return _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, f"the body is not valid JSON: {error}", code="bad_json") from None


def _wrong_field(message: str) -> ClientError:
    """Name the field in `param`: msgspec says it as a path or in backquotes."""
    unknown = re.search(r"unknown field `([^`]*)`", message)
    if unknown:
        name = unknown.group(1)
        return ClientError(400, f"unknown parameter: {name}", code="unknown_parameter", param=name)
    where = re.search(r"`\$\.([^`]*)`", message) or re.search(r"required field `([^`]*)`", message)
    code = "missing_required_parameter" if "required field" in message else "invalid_type"
    return ClientError(400, message, code=code, param=where.group(1) if where else None)


def read_request(
    body: ImageBody, request_id: str, model: ModelInfo, config: ServeConfig
) -> GenerationRequest:
    """Check `body` against what the model and the server allow, and fill in the defaults.

    Without a seed a random one is chosen, small enough for every JSON reader.
    """
    _check_model(body.model, config)
    if body.response_format not in {None, "b64_json"}:
        raise _refused("response_format", "only b64_json is supported: the server keeps no files")
    width, height = _size(body.size, model)
    output_format = _FORMATS.get(body.output_format or "png")
    if output_format is None:
        raise _refused("output_format", f"must be one of {', '.join(_FORMATS)}")
    steps = model.num_inference_steps
    guidance = model.guidance_scale
    return GenerationRequest(
        id=request_id,
        prompt=_text("prompt", body.prompt, required=True),
        negative_prompt=_text("negative_prompt", body.negative_prompt or ""),
        n=_whole("n", body.n, 1, config.max_images, default=1),
        width=width,
        height=height,
        seed=_whole("seed", body.seed, 0, _MAX_SEED, default=secrets.randbelow(2**32)),
        num_inference_steps=_whole(
            "num_inference_steps", body.num_inference_steps, 1, config.max_steps, default=steps
        ),
        guidance_scale=_guidance(body.guidance_scale, guidance),
        output_format=output_format,
        output_compression=_whole("output_compression", body.output_compression, 0, 100, 100),
    )


def read_priority(body: ImageBody) -> int:
    """Check the priority, between -10 and 10; the higher goes first."""
    return _whole("priority", body.priority, -_MAX_PRIORITY, _MAX_PRIORITY, default=0)


def _check_model(name: str | None, config: ServeConfig) -> None:
    if name is not None and name != config.model_name:
        raise ClientError(
            404,
            f"the model {name!r} does not exist here; this server has {config.model_name!r}",
            code="model_not_found",
            param="model",
        )


def _refused(param: str, why: str) -> ClientError:
    return ClientError(400, f"{param}: {why}", code="invalid_value", param=param)


def _text(param: str, text: str, *, required: bool = False) -> str:
    if required and not text.strip():
        raise _refused(param, "must not be empty")
    if len(text) > MAX_PROMPT_CHARS:
        raise _refused(param, f"has {len(text)} characters, at most {MAX_PROMPT_CHARS} are allowed")
    return text


def _whole(param: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise _refused(param, f"must be between {low} and {high}, not {value}")
    return value


def _guidance(value: float | None, default: float) -> float:
    if value is None:
        return default
    if not 0 <= value <= _MAX_GUIDANCE:
        raise _refused("guidance_scale", f"must be between 0 and {_MAX_GUIDANCE:g}, not {value}")
    return value


def _size(size: str | None, model: ModelInfo) -> tuple[int, int]:
    if size in {None, "auto"}:
        return model.width, model.height
    match = _SIZE.fullmatch(size or "")
    if match is None:
        raise _refused("size", "must be WIDTHxHEIGHT in pixels, such as 64x64, or auto")
    width, height = int(match[1]), int(match[2])
    multiple = model.size_multiple
    if width % multiple or height % multiple:
        raise _refused("size", f"the model makes multiples of {multiple} pixels, not {size}")
    if width > model.max_width or height > model.max_height:
        largest = f"{model.max_width}x{model.max_height}"
        raise _refused("size", f"the model makes at most {largest}, not {size}")
    return width, height
