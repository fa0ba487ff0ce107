"""Pictures as clients get them; made in the rank, so that the server computes nothing."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["encode"]


def encode(image: Image, output_format: str, compression: int) -> bytes:
    """Give one picture as base64 of a PNG, JPEG or WebP file.

    `compression` is the OpenAI API's 0..100: the quality of JPEG and WebP. PNG is lossless and
    takes it as effort, 100 (the default) being Pillow's own.
    """
    options: dict[str, Any] = {}
    if output_format == "png":
        options["compress_level"] = round(min(max(compression, 0), 100) * 6 / 100)
    else:
        options["quality"] = min(max(compression, 1), 100)
    file = io.BytesIO()
    image.convert("RGB").save(file, output_format.upper(), **options)
    return base64.b64encode(file.getbuffer())
