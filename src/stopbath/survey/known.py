"""Model servers' processes, by how they name themselves: for showing, never for signalling."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Known", "recognise"]


class Known(NamedTuple):
    """What a process is: the product, and whether something launches it (`worker`) or not."""

    product: str
    role: str  # launcher or worker


# Titles a process gives itself (setproctitle). The order is the order of the questions.
_TITLES = (
    (r"VLLM::|vllm::", "vLLM", "worker"),
    (r"vllm[-_]omni::|VLLM_OMNI::|OmniStage|Omni::", "vLLM-Omni", "worker"),
    (r"sglang::|sgl_diffusion::|sglang-diffusion", "SGLang", "worker"),
    (r"ray::", "Ray", "worker"),
    (r"pt_elastic|pt_data_worker", "torchrun", "worker"),
    (r"stopbath::", "Stopbath", "worker"),
)

# What is run: a program's base name, a script's, or a module's (`python -m`).
_PROGRAMS = (
    (r"vllm_omni(\.|$)|vllm-omni$", "vLLM-Omni", "launcher"),
    (r"vllm(\.entrypoints\..*)?$", "vLLM", "launcher"),
    (
        r"sglang(\.launch_server|\.multimodal_gen\..*|\.srt\..*)?$|sgl-.*router$",
        "SGLang",
        "launcher",
    ),
    (r"raylet$|gcs_server$|ray\.(_private|dashboard)\..*", "Ray", "worker"),
    (r"ray$", "Ray", "launcher"),
    (r"trtllm-(serve|llmapi-launch|bench)$|tensorrt_llm(\.|$)", "TensorRT-LLM", "launcher"),
    (r"trtllm-worker$|mgmn_(leader|worker)_node(\.py)?$", "TensorRT-LLM", "worker"),
    (r"tritonserver$", "Triton", "launcher"),
    (r"triton_python_backend_stub$", "Triton", "worker"),
    (r"comfyui(\.main)?$|comfy$", "ComfyUI", "launcher"),
    (r"torchrun$|torch\.distributed\.(run|launch|elastic\..*)$", "torchrun", "launcher"),
)

# Scripts that are told by the folder they lie in.
_PATHS = (
    (r"(^|/)comfyui[^/]*/main\.py$", "ComfyUI", "launcher"),
    (r"/ray/(dashboard|_private|autoscaler)/", "Ray", "worker"),
    (r"/stopbath/lifecycle/_guardian\.py$", "Stopbath", "launcher"),
    (r"/stopbath/lifecycle/_(keeper|child|zygote)\.py$", "Stopbath", "worker"),
    (r"/vllm_omni/", "vLLM-Omni", "launcher"),
)

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*$")
_WITH_VALUE = {"-W", "-X", "-Q"}


def recognise(argv: Sequence[str]) -> Known | None:
    """Say what a command line is; None for what is no model server's.

    Asks what is *run*, so that an editor or a grep with such a name among its arguments is not
    taken for one.
    """
    if not argv or not argv[0]:
        return None
    for pattern, product, role in _TITLES:
        if re.match(pattern, argv[0]):
            return Known(product, role)
    program = _program(argv)
    base = program.rpartition("/")[2]
    for pattern, product, role in _PROGRAMS:
        if re.match(pattern, base):
            omni = product == "vLLM" and "--omni" in argv
            return Known("vLLM-Omni" if omni else product, role)
    for pattern, product, role in _PATHS:
        if re.search(pattern, program, re.IGNORECASE):
            return Known(product, role)
    return None


def _program(argv: Sequence[str]) -> str:
    """Give what runs: the program, or what an interpreter was told to run."""
    if not _INTERPRETER.match(argv[0].rpartition("/")[2]):
        return argv[0]
    words = iter(argv[1:])
    for word in words:
        if word == "-m":
            return next(words, "")
        if word == "-c":
            return ""
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return ""
