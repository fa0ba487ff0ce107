"""What a request may look like: every refusal names the field and is an OpenAI error."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fake_executor import MODEL, FakeExecutor
from stopbath.config import ServeConfig
from stopbath.engine.engine import Engine
from stopbath.server.app import create_app

pytestmark = pytest.mark.anyio
PATH = "/v1/images/generations"
JSON = {"content-type": "application/json"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def client(executor: FakeExecutor, **config: Any) -> httpx.AsyncClient:
    engine = Engine([executor])
    engine.watch()
    engine.ready(MODEL)
    transport = httpx.ASGITransport(create_app(engine, ServeConfig(**config)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def refusal(response: httpx.Response) -> dict[str, Any]:
    """Check the shape that every error has; give its inside."""
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


BAD_FIELDS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": " \n\t"}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": "x" * 4001}, "prompt"),
    ({"prompt": "x" * 100_000}, "prompt"),
    ({"negative_prompt": "x" * 4001}, "negative_prompt"),
    ({"negative_prompt": ["x"]}, "negative_prompt"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1000}, "n"),
    ({"n": "1"}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"size": "64"}, "size"),
    ({"size": "0x64"}, "size"),
    ({"size": "64x63"}, "size"),
    ({"size": "136x64"}, "size"),
    ({"size": "64x104"}, "size"),
    ({"size": "-64x64"}, "size"),
    ({"size": "64x64x64"}, "size"),
    ({"size": "999999999x8"}, "size"),
    ({"size": "\u0666\u0664x64"}, "size"),
    ({"size": 64}, "size"),
    ({"response_format": "url"}, "response_format"),
    ({"response_format": "tiff"}, "response_format"),
    ({"output_format": "gif"}, "output_format"),
    ({"output_compression": 101}, "output_compression"),
    ({"output_compression": -1}, "output_compression"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 2**80}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"num_inference_steps": 1001}, "num_inference_steps"),
    ({"guidance_scale": -0.1}, "guidance_scale"),
    ({"guidance_scale": 1e9}, "guidance_scale"),
    ({"guidance_scale": "high"}, "guidance_scale"),
    ({"priority": 11}, "priority"),
    ({"priority": -11}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"num_inference_step": 3}, "num_inference_step"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
async def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """Nothing of a bad request reaches a replica, and the client hears which field it was."""
    executor = FakeExecutor(instant=True)
    async with client(executor) as http:
        response = await http.post(PATH, json={"prompt": "a seven", **fields})
    assert response.status_code == 400
    error = refusal(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert executor.calls == []


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"7", b'"prompt"', b'{"prompt": "a"} x', b"\xff\xfe", b'{"prompt": "\xff"}',
     b"{}", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": "a", "n": NaN}'],
)  # fmt: skip
async def test_a_body_that_is_no_request_is_refused(raw: bytes) -> None:
    """Whatever the bytes are, the answer is a 400 in OpenAI's shape."""
    async with client(FakeExecutor(instant=True)) as http:
        response = await http.post(PATH, content=raw, headers=JSON)
    assert response.status_code == 400
    refusal(response)


async def test_a_body_of_another_type_is_refused() -> None:
    """A web page of another site cannot post here without asking the browser first."""
    async with client(FakeExecutor(instant=True)) as http:
        response = await http.post(PATH, content=json.dumps({"prompt": "a"}))
    assert response.status_code == 415
    refusal(response)


async def test_another_model_does_not_exist() -> None:
    """The model must be the served one, or absent."""
    executor = FakeExecutor(instant=True)
    async with client(executor, served_name="digits") as http:
        wrong = await http.post(PATH, json={"prompt": "a", "model": "dall-e-3"})
        right = await http.post(PATH, json={"prompt": "a", "model": "digits"})
        listed = (await http.get("/v1/models")).json()
        one = (await http.get("/v1/models/digits")).json()
        none = await http.get("/v1/models/dall-e-3")
    assert (wrong.status_code, refusal(wrong)["code"]) == (404, "model_not_found")
    assert right.status_code == 200
    assert [model["id"] for model in listed["data"]] == ["digits"]
    assert one["object"] == "model"
    assert (none.status_code, refusal(none)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/models/", 404), ("GET", PATH, 405),
     ("DELETE", PATH, 405), ("POST", "/health", 405), ("PUT", "/v1/status", 405),
     ("DELETE", "/v1/requests/unknown", 404)],
)  # fmt: skip
async def test_wrong_paths_and_methods(method: str, path: str, status: int) -> None:
    """The router's own refusals have the shape of all others."""
    async with client(FakeExecutor()) as http:
        response = await http.request(method, path)
    assert response.status_code == status
    refusal(response)


async def test_what_the_replica_gets() -> None:
    """Defaults come from the model, everything given is passed on, OpenAI's extras are ignored."""
    executor = FakeExecutor(instant=True)
    ignored = {"quality": "hd", "style": "vivid", "background": "auto", "moderation": "low"}
    given = {
        "n": 2, "size": "128x96", "seed": 2**63 - 1, "num_inference_steps": 1000,
        "guidance_scale": 0, "negative_prompt": "blue", "output_format": "webp",
        "output_compression": 50, "user": "u1", "response_format": "b64_json",
    }  # fmt: skip
    async with client(executor) as http:
        first = await http.post(PATH, json={"prompt": "a seven", "size": "auto", "n": None})
        second = await http.post(
            PATH, json={"prompt": "x" * 4000, **given, **ignored}, headers={"x-request-id": "r/2"}
        )
    assert (first.status_code, second.status_code) == (200, 200)
    plain, full = (call.params for call in executor.calls)
    assert (plain["width"], plain["height"], plain["n"]) == (MODEL.width, MODEL.height, 1)
    assert plain["num_inference_steps"] == MODEL.num_inference_steps
    assert plain["guidance_scale"] == MODEL.guidance_scale
    assert 0 <= plain["seed"] < 2**32
    assert first.json()["data"][0]["seed"] == first.json()["seed"] == plain["seed"]
    assert (full["width"], full["height"], full["id"]) == (128, 96, "r/2")
    assert {key: full[key] for key in given if key in full} == {
        key: value for key, value in given.items() if key in full
    }
    assert second.headers["x-request-id"] == "r/2"
    assert len(second.json()["data"]) == 2


async def test_a_seed_is_chosen_for_each_request() -> None:
    """Two requests without a seed do not give the same picture."""
    executor = FakeExecutor(instant=True)
    async with client(executor) as http:
        for _ in range(2):
            await http.post(PATH, json={"prompt": "a"})
    assert executor.calls[0].params["seed"] != executor.calls[1].params["seed"]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "caf\u00e9"])
async def test_a_request_id_that_cannot_be_used_is_refused(given: str) -> None:
    """Taking another one instead would make `DELETE /v1/requests/{id}` miss."""
    async with client(FakeExecutor(instant=True)) as http:
        response = await http.post(
            PATH, json={"prompt": "a"}, headers={"x-request-id": given.encode()}
        )
    assert response.status_code == 400
    assert refusal(response)["param"] == "x-request-id"


async def test_the_key_guards_everything_but_health() -> None:
    """Probes have no key; everybody else needs it."""
    async with client(FakeExecutor(instant=True), api_key="s3cret") as http:
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await http.get(path)).status_code == 200
        wrong = ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"},
                 {"authorization": "Basic s3cret"}, {"authorization": "Bearer"})  # fmt: skip
        for headers in wrong:
            for method, path in (("POST", PATH), ("GET", "/v1/status"), ("GET", "/v1/models")):
                response = await http.request(
                    method,
                    path,
                    headers=headers,
                    json={"prompt": "a"} if method == "POST" else None,
                )
                assert response.status_code == 401, (path, headers)
                assert refusal(response)["code"] == "invalid_api_key"
        good = {"authorization": "Bearer s3cret"}
        assert (await http.post(PATH, json={"prompt": "a"}, headers=good)).status_code == 200


async def test_a_rank_that_raises_gives_its_words() -> None:
    """The rank's own refusal is the client's fault; anything else is ours."""
    executor = FakeExecutor()
    real_call = executor.call

    def failing(kind: str) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            handle = real_call(*args, **kwargs)
            executor.calls[-1].fail(kind, "the words of the rank")
            return handle

        executor.call = call  # type: ignore[method-assign]

    async with client(executor) as http:
        failing("RequestInvalid")
        invalid = await http.post(PATH, json={"prompt": "a"})
        failing("OutOfMemoryError")
        broken = await http.post(PATH, json={"prompt": "a"})
    assert (invalid.status_code, broken.status_code) == (400, 500)
    assert "the words of the rank" in refusal(invalid)["message"]
    assert "OutOfMemoryError: the words of the rank" in refusal(broken)["message"]
    assert refusal(broken)["type"] == "engine_error"
