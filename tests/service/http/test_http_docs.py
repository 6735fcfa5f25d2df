"""What describes the API: OpenAPI and its page, and a rendered chat."""

import json
from pathlib import Path
from typing import Any

from jdisagg.config import ServiceConfig
from tests.service.doors import MODEL
from tests.service.http_doors import HttpDoor, http_door

# Of other models, or with a folder of batches.
OF_OTHERS = (
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    "/v1/batches",
)
PAGE = ("/", "/docs", "/openapi.json", "/web/", "/api/")


async def described(door: HttpDoor) -> dict[str, Any]:
    return (await door.ask("/openapi.json")).fields


async def test_every_endpoint_is_described_and_no_other(tmp_path: Path) -> None:
    keeps = ServiceConfig(kept_responses_mib=1, batch_folder=str(tmp_path))
    async with http_door(service=keeps) as door:
        found: dict[str, set[str]] = {}
        for route in door.server.http._routes.application().routes:
            path = route.path.replace(":path", "")
            if path not in PAGE[:3] and not path.startswith(PAGE[3:]):
                methods = route.app.method.lower().split(", ")
                found[path] = set(methods)
        spec = await described(door)
        assert {path: set(methods) for path, methods in spec["paths"].items()} == found


async def test_every_described_field_is_read(door: HttpDoor) -> None:
    """Fields without a value change nothing, and unknown ones are named in a header."""
    needed: Any = {
        "prompt": "hi",
        "messages": [{"role": "user", "content": "hi"}],
        "input": "hi",
        "tokens": [1],
        "max_tokens": 2,
    }
    checked = 0
    for path, methods in (await described(door))["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is None or path in (*WEIGHTS, *OF_OTHERS) or "lora_adapter" in path:
            continue
        schema = body["content"]["application/json"]["schema"]
        fields = dict.fromkeys(schema["properties"]) | {
            name: needed[name] for name in schema["required"]
        }
        if path == "/tokenize":
            fields |= {"prompt": "hi"}
        fields |= {"max_tokens": 2} if "max_tokens" in fields else {}
        answer = await door.ask(path, fields)
        assert answer.status == 200, (path, answer.body)
        ignored = answer.headers.get("jdisagg-ignored-fields")
        assert ignored is None or path in NOT_GENERATED, (path, ignored)
        checked += 1
    assert checked == 9


WEIGHTS = ("/update_weights_from_disk", "/sleep", "/wake_up")  # tests/service/test_weights_doors.py
# They read what makes the prompt alone.
NOT_GENERATED = ("/v1/messages/count_tokens", "/tokenize")


async def test_the_page_of_the_api_loads_its_own_files_alone(door: HttpDoor) -> None:
    page = (await door.ask("/docs")).body.decode()
    assert "openapi.json" in page and "http://" not in page and "https://" not in page
    await door.served("/web/docs.js")


async def test_a_chat_is_rendered_without_an_answer(door: HttpDoor) -> None:
    chat: Any = {
        "messages": [{"role": "user", "content": "hé"}],
        "max_tokens": 7,
        "stop": "x",
        "temperature": 0.5,
    }
    shown = (await door.ask("/v1/chat/completions/render", chat)).fields
    assert door.path.requests == []
    assert shown["prompt"] == "<user>hé<assistant>"
    assert bytes(shown["prompt_token_ids"]).decode() == shown["prompt"]
    sampling = shown["sampling_params"]
    assert (sampling["max_tokens"], sampling["stop"]) == (7, ["x"])
    assert (sampling["temperature"], sampling["seed"]) == (0.5, None)
    assert shown["max_model_len"] == MODEL.context_tokens
    await door.ask("/v1/chat/completions", chat)
    assert list(door.path.requests[0].prompt_token_ids) == shown["prompt_token_ids"]
    wrong = await door.ask("/v1/chat/completions/render", chat | {"temperature": -1})
    assert wrong.status == 400 and wrong.error["param"] == "temperature"
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    shown = (
        await door.ask("/v1/chat/completions/render", chat | {"response_format": schema})
    ).fields
    grammar = shown["sampling_params"]["grammar"]
    assert grammar["kind"] == "json_schema" and json.loads(grammar["text"]) == {"type": "object"}
