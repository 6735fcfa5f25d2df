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


Answered = dict[str, Any]


def of_grpc(done: Completion) -> Answered:
    scores = done.prompt_logprobs
    return {
        "prompt": None
        if scores is None
        else [(one.logprob, one.rank, dict(one.top)) for one in scores],
        "usage": done.usage
        and (
            done.usage.prompt_tokens,
            done.usage.completion_tokens,
            done.usage.cached_tokens,
            done.usage.cached_by_tier and done.usage.cached_by_tier.by_tier(),
        ),
        "choices": [
            {
                "ids": list(choice.token_ids),
                "text": choice.text,
                "end": choice.finish_reason and choice.finish_reason.value,
                "logprobs": [(one.logprob, dict(one.top)) for one in choice.logprobs],
            }
            for choice in done.choices
        ],
    }


def of_http(objects: list[dict[str, Any]]) -> Answered:
    """Of a whole reply, or of the chunks of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for one in (choice for reply in objects for choice in reply["choices"]):
        known = choices.setdefault(
            one["index"], {"ids": [], "text": "", "end": None, "logprobs": []}
        )
        said = one.get("message") or one.get("delta")
        known["ids"] += one["token_ids"]
        known["text"] += one["text"] if said is None else said.get("content") or ""
        known["end"] = one["finish_reason"] or known["end"]
        known["logprobs"] += logprobs_of(one["logprobs"])
    whole = {name: value for reply in objects for name, value in reply.items()}
    first = whole | next(one for reply in objects for one in reply["choices"])
    usage = objects[-1]["usage"]
    cached = usage["prompt_tokens_details"]
    return {
        "prompt": scores_of(first),
        "usage": (
            usage["prompt_tokens"],
            usage["completion_tokens"],
            cached["cached_tokens"],
            cached["cached_tokens_by_tier"],
        ),
        "choices": [choices[index] for index in sorted(choices)],
    }


def scores_of(said: dict[str, Any]) -> list[tuple[float, int, dict[int, float]]] | None:
    """Of the prompt's tokens but the first. vLLM's field has a token's own among the likely ones,
    wherever it ranks, so that it is taken out where our client does not name it."""
    if said.get("prompt_logprobs") is None:
        return None
    begins, *others = said["prompt_logprobs"]
    assert begins is None
    found = []
    for token, entries in zip(said["prompt_token_ids"][1:], others, strict=True):
        own = entries[str(token)]
        likely = {int(one): entry["logprob"] for one, entry in entries.items()}
        found.append((own["logprob"], own["rank"], likely))
    return found


def logprobs_of(said: dict[str, Any] | None) -> list[tuple[float, dict[int, float]]]:
    """Those of the likely tokens without the chosen one, which OpenAI's completions add."""
    if said is None:
        return []
    if "content" in said:
        return [
            (one["logprob"], {number(top["token"]): top["logprob"] for top in one["top_logprobs"]})
            for one in said["content"]
        ]
    return [
        (logprob, {number(token): value for token, value in top.items()})
        for logprob, top in zip(said["token_logprobs"], said["top_logprobs"], strict=True)
    ]


def number(token: str) -> int:
    return int(token.removeprefix("token_id:"))


async def over_http(door: HttpDoor, asked: dict[str, Any], stream: bool) -> Answered:
    path, fields = as_http(asked)
    if not stream:
        return of_http([(await door.ask(path, fields)).fields])
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events((await door.ask(path, fields)).body)
    assert done == "[DONE]"
    return of_http([json.loads(chunk) for chunk in chunks])


def with_the_prompts_own(grpc: Answered, http: Answered) -> None:
    """As vLLM's field: a token of the prompt is among its likely ones."""
    if grpc["prompt"] is not None:
        assert len(grpc["prompt"]) == len(http["prompt"])
        for at, (logprob, rank, top) in enumerate(grpc["prompt"]):
            (own,) = http["prompt"][at][2].keys() - top.keys() or [None]
            grpc["prompt"][at] = (logprob, rank, top if own is None else top | {own: logprob})


def with_the_chosen(answered: Answered) -> Answered:
    """As OpenAI's completions: the chosen token is among the likely ones."""
    for choice in answered["choices"]:
        choice["logprobs"] = [
            (logprob, {token: logprob, **top})
            for token, (logprob, top) in zip(choice["ids"], choice["logprobs"], strict=False)
        ]
    return answered


async def both(
    door: HttpDoor, client: AsyncClient, asked: dict[str, Any], stream: bool, within: float = 0.0
) -> None:
    """Asks at both doors and compares. `within`: how far log-probabilities may differ, which a real
    model computes in another batch each time."""
    grpc, http = await asyncio.gather(client.complete(**asked), over_http(door, asked, stream))
    expected = of_grpc(grpc)
    with_the_prompts_own(expected, http)
    expected = expected if "messages" in asked else with_the_chosen(expected)
    if within:
        for ours, theirs in zip(http["choices"], expected["choices"], strict=True):
            near(ours.pop("logprobs"), theirs.pop("logprobs"), within)
    assert http == expected, asked


def near(some: list[Any], others: list[Any], within: float) -> None:
    for (logprob, top), (other, other_top) in zip(some, others, strict=True):
        assert logprob == pytest.approx(other, abs=within)
        assert len(top) == len(other_top)
        for token in top.keys() & other_top.keys():
            assert top[token] == pytest.approx(other_top[token], abs=within)
