"""What people run today: FastAPI and diffusers, one request at a time. For comparison."""

from __future__ import annotations

import base64
import io
import os
import sys
import threading
import time
from typing import Any

import torch
import uvicorn
from diffusers import DiffusionPipeline
from fastapi import FastAPI
from pydantic import BaseModel

READY = "plain: ready "


class Body(BaseModel):
    """A request, or `n` prompts at once for `/batch`."""

    prompt: str
    seed: int = 0
    num_inference_steps: int = 12
    guidance_scale: float = 3.0
    n: int = 1


def app_of(pipe: Any, length: int) -> FastAPI:
    """Make the application."""
    app = FastAPI()
    lock = threading.Lock()

    def make(body: Body) -> list[str]:
        images = pipe(
            [body.prompt] * body.n,
            height=32,
            width=32,
            num_inference_steps=body.num_inference_steps,
            guidance_scale=body.guidance_scale,
            generator=[torch.Generator("cpu").manual_seed(body.seed + i) for i in range(body.n)],
            max_sequence_length=length,
        ).images
        files = [io.BytesIO() for _ in images]
        for image, file in zip(images, files, strict=True):
            image.save(file, "PNG")
        return [base64.b64encode(file.getvalue()).decode() for file in files]

    @app.post("/v1/images/generations")
    def generations(body: Body) -> dict[str, Any]:
        with lock:
            return {"data": [{"b64_json": image} for image in make(body)]}

    @app.post("/batch")
    def batch(body: Body) -> dict[str, float]:
        with lock:
            began, used = time.perf_counter(), time.process_time()
            make(body)
            return {
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - used,
            }

    return app


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()
        print(f"{READY}http://{host}:{port}", flush=True)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    model = DiffusionPipeline.from_pretrained(sys.argv[1], local_files_only=True)
    model.set_progress_bar_config(disable=True)
    application = app_of(model, int(sys.argv[2]))
    _Server(uvicorn.Config(application, port=0, log_level="warning")).run()
