"""What HTTP and gRPC answer to one request, in one form, and whether it is the same."""

import asyncio
import json
from typing import Any

import pytest

from jdisagg.client import AsyncClient, Completion
from jdisagg.request import Grammar, GrammarKind
from tests.service.http_doors import HttpDoor, events


def as_http(asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same request of OpenAI's API: its path and its fields."""
    fields = asked | {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if (grammar := fields.pop("grammar", None)) is not None:
        fields["structured_outputs"] = structured(grammar)
    if "messages" not in asked:
        fields["prompt"] = fields.pop("token_ids", None) or asked["prompt"]
        return "/v1/completions", fields
    if "logprobs" in asked:
        fields |= {"logprobs": True, "top_logprobs": asked["logprobs"]}
    fields["max_completion_tokens"] = fields.pop("max_tokens")
    return "/v1/chat/completions", fields


def structured(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"json": json.loads(grammar.text)}
        case GrammarKind.CHOICE:
            return {"choice": json.loads(grammar.text)}
        case GrammarKind.REGEX:
            return {"regex": grammar.text}
        case GrammarKind.LARK:
            return {"grammar": grammar.text}
        case GrammarKind.JSON_OBJECT:
            return {"json_object": True}


# For each choice: ids, text, reason of the end, log-probabilities of the ids. Then the usage.
Answered = tuple[list[tuple[list[int], str, str | None, list[float]]], tuple[int, int, int]]


def of_grpc(done: Completion) -> Answered:
    usage = done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens
    choices = [
        (
            list(choice.token_ids),
            choice.text,
            choice.finish_reason and choice.finish_reason.value,
            [one.logprob for one in choice.logprobs],
        )
        for choice in done.choices
    ]
    return choices, usage


def of_http(objects: list[dict[str, Any]]) -> Answered:
    """Of a whole reply, or of the chunks of a stream."""
    choices: dict[int, tuple[list[int], str, str | None, list[float]]] = {}
    for one in (choice for reply in objects for choice in reply["choices"]):
        ids, text, end, logprobs = choices.get(one["index"], ([], "", None, []))
        said = one.get("message") or one.get("delta")
        rows = one["logprobs"] or {"token_logprobs": []}
        own = rows.get("token_logprobs")
        choices[one["index"]] = (
            ids + one["token_ids"],
            text + (one["text"] if said is None else said.get("content") or ""),
            one["finish_reason"] or end,
            logprobs + ([row["logprob"] for row in rows["content"]] if own is None else own),
        )
    usage = objects[-1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    told = usage["prompt_tokens"], usage["completion_tokens"], cached
    return [choices[index] for index in sorted(choices)], told


async def over_http(door: HttpDoor, asked: dict[str, Any], stream: bool) -> Answered:
    path, fields = as_http(asked)
    if not stream:
        return of_http([(await door.ask(path, fields)).fields])
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events((await door.ask(path, fields)).body)
    assert done == "[DONE]"
    return of_http([json.loads(chunk) for chunk in chunks])


async def both(
    door: HttpDoor, client: AsyncClient, asked: dict[str, Any], stream: bool, within: float = 0.0
) -> None:
    """Asks at both doors and compares. `within`: how far log-probabilities may differ, which a real
    model computes in another batch each time."""
    grpc, http = await asyncio.gather(client.complete(**asked), over_http(door, asked, stream))
    (ours, usage), (theirs, told) = of_grpc(grpc), http
    assert told == usage, asked
    for own, other in zip(ours, theirs, strict=True):
        assert own[:3] == other[:3], asked
        assert own[3] == pytest.approx(other[3], abs=within), asked
