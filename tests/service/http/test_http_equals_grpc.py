"""What one door says the other says, too: ids, text, log-probabilities, ends and usage of random
requests over all parameters, and what a client leaves is freed; over workers on toy meshes."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.client import AsyncClient, Completion
from jdisagg.config import LimitsConfig, ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.options import SamplingOptions
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.token_stream import TokenStream
from jdisagg.errors import InvalidRequestError
from jdisagg.observe.request_log import RequestLog
from jdisagg.request import Grammar, GrammarKind
from jdisagg.service.client.request import GenerateOptions
from jdisagg.service.client.request import asked as client_request
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc.wire_generation import client_request_from_proto, client_request_to_proto
from jdisagg.service.http.chat import chat_prompt
from jdisagg.service.http.fields import Fields
from jdisagg.service.server import GenerationServer
from jdisagg.timeouts import RequestTimeouts, Timeouts
from tests.fakes.cluster import Cluster
from tests.fakes.fake_executor import Costs
from tests.fakes.toy_grammars import GRAMMARS
from tests.fakes.toy_model import VOCABULARY
from tests.service.doors import MODEL, FakePath, byte_tokenizer
from tests.service.http_doors import HttpDoor, events, http_door, running
from tests.time_scale import seconds

COSTS = Costs(prefill_token=1e-6, decode_step=1e-5, pull=1e-5, other=1e-6)
# The toy model knows no small letters.
TEMPLATE = (
    "{% if first %}{{ first }}{% endif %}{% for m in messages %}<{{ m.role | upper }}>"
    "{{ m.content }}{% endfor %}>"
)
# What an answer is held to, as the arguments of our client; few, for each is tried in a process.
RESTRICTIONS: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": [40, 41, 42, 50]},
    {"bad_words": ["A", "BC"]},
    {"grammar": Grammar(GrammarKind.REGEX, "[A-F]{3}-[0-9]{4}")},
    {"grammar": Grammar(GrammarKind.LARK, 'start: ("a" | "b")+')},
    {"grammar": Grammar(GrammarKind.JSON_OBJECT)},
    {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["A", 17, {"B": null}]}')},
    {"grammar": Grammar.of_choices(("ONE DOG", "TWO DOGS", "3"))},
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789.,"


@asynccontextmanager
async def toy_door(costs: Costs = COSTS) -> AsyncIterator[tuple[HttpDoor, Cluster]]:
    async with Cluster(costs=costs) as cluster:
        tokenizer = byte_tokenizer(TEMPLATE)
        path = RequestPath(
            ClusterPorts({"prefill0": cluster.prefill}, {"decode0": cluster.decode}),
            lambda request: TokenStream.of(tokenizer, request),
            cluster.limits,
            cluster.clock,
            new_id=cluster.new_id,
        )
        model = replace(MODEL, vocabulary=VOCABULARY, context_tokens=128)
        for worker in (cluster.prefill, cluster.decode):
            worker.constrain(GRAMMARS)
        patient = Timeouts(request=RequestTimeouts(grammar_seconds=seconds(60)))
        frontend = Frontend(
            path, tokenizer, model, LimitsConfig(timeouts=patient), grammars=GRAMMARS
        )
        server = GenerationServer(
            frontend, ServiceConfig(port=0, http_port=0), log=RequestLog(True)
        )
        async with running(FakePath(), server) as door:
            yield door, cluster


def some_request(draw: random.Random, number: int) -> dict[str, Any]:
    """Arguments of our own client, each parameter set in about half of the requests."""
    text = "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 30)))
    prompts: tuple[dict[str, Any], ...] = (
        {"prompt": text},
        {"token_ids": list(text.encode())},
        {
            "messages": [{"role": "system", "content": "BE"}, {"role": "user", "content": text}],
            "continue_final_message": draw.random() < 0.5 and bool(text.strip()),
            "chat_template_kwargs": draw.choice([{}, {"first": "NOW"}, {"other": [1, None]}]),
        },
    )
    most = draw.randint(1, 24)
    options: dict[str, Any] = {
        "temperature": draw.choice([0.0, 0.5, 1.0, 3.0]),
        "top_k": draw.randint(0, 90),
        "top_p": draw.uniform(0.1, 1.0),
        "min_p": draw.uniform(0.0, 1.0),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.uniform(0.5, 2.0),
        "logit_bias": {draw.randrange(VOCABULARY): draw.uniform(-100, 100)},
        "min_tokens": draw.randint(0, most),
        "stop": draw.sample(LETTERS, draw.randint(1, 3)),
        "stop_token_ids": draw.sample(range(VOCABULARY), 3),
        "ignore_eos": draw.random() < 0.5,
        "include_stop_str_in_output": draw.random() < 0.5,
        "skip_special_tokens": draw.random() < 0.5,
        "logprobs": draw.randint(0, 5),
        "prompt_logprobs": draw.randint(0, 5),
        "n": draw.randint(1, 3),
        "priority": draw.randint(-5, 5),
        "tenant": draw.choice("ab"),
        "cache_salt": draw.choice(["", "salt"]),
        "deadline_seconds": 600.0,
    }
    chosen = {name: value for name, value in options.items() if draw.random() < 0.5}
    if (at := number % (2 * len(RESTRICTIONS))) < len(RESTRICTIONS):
        chosen |= RESTRICTIONS[at]
    return {**prompts[number % 3], "seed": draw.getrandbits(40), "max_tokens": most, **chosen}


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


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.ci)])
async def test_random_requests_get_the_same_at_both_doors(count: int) -> None:
    draw = random.Random(count)
    requests = [some_request(draw, number) for number in range(count)]
    every = SamplingOptions.__annotations__.keys() | {"priority", "tenant", "cache_salt"}
    assert every <= {name for asked in requests for name in asked}
    async with toy_door() as (door, cluster), AsyncClient(door.target) as client:
        for first in range(0, count, 20):
            await asyncio.gather(
                *(
                    both(door, client, asked, stream=number % 2 == 0)
                    for number, asked in enumerate(requests[first : first + 20], first)
                )
            )
        await quiet(cluster)


@pytest.mark.parametrize("stream", [True, False])
async def test_prompts_that_are_sent_together_get_what_each_gets_alone(stream: bool) -> None:
    texts = ["ONE DAY", "A DOG", "THE END"]
    for prompts in (texts, [list(text.encode()) for text in texts]):
        options: dict[str, Any] = {"seed": 5, "max_tokens": 9, "n": 2, "logprobs": 2}
        async with toy_door() as (door, cluster), AsyncClient(door.target) as client:
            answers = await over_http(door, {"prompt": prompts, **options}, stream)
            each = [
                with_the_chosen(of_grpc(await client.complete(one, **options))) for one in texts
            ]
            assert answers["choices"] == [one for answer in each for one in answer["choices"]]
            told = [answer["usage"] for answer in each]
            assert answers["usage"][:3] == tuple(
                map(sum, zip(*(one[:3] for one in told), strict=True))
            )
            await quiet(cluster)


async def test_both_apis_make_one_request_of_the_same_parameters() -> None:
    """Of random ones, and of those that only one field of HTTP has."""
    draw = random.Random(7)
    requests = [some_request(draw, number) for number in range(40)]
    requests += [
        {"prompt": "A", "seed": 1, "max_tokens": 4, "allowed_token_ids": [65, 66, 70]},
        {"prompt": "A", "seed": 1, "max_tokens": 4, "bad_words": ["a b", "é"]},
    ]
    async with http_door(template=TEMPLATE) as door, AsyncClient(door.target) as client:
        for asked in requests:
            asked = asked | {"request_id": "r"}
            await client.complete(**asked)
            path, fields = as_http(asked)
            answer = await door.ask(
                path, fields | {"user": "me", "n": asked.get("n"), "best_of": None}
            )
            assert answer.status == 200, answer.body
            one, other = door.path.requests[-2:]
            assert replace(one, life=0) == replace(other, life=0), asked
        every = {"prompt": "A", "seed": 1, "max_tokens": 1, "top_k": -1, "best_of": 1}
        assert (await door.ask("/v1/completions", every)).status == 200
        assert door.path.requests[-1].sampling.top_k == 0


async def quiet(cluster: Cluster) -> None:
    async with asyncio.timeout(seconds(20)):
        while True:
            with contextlib.suppress(AssertionError):
                return await cluster.check_quiet(0.0)
            await asyncio.sleep(0.02)


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "developer", "content": "c"},
        {"role": "user", "content": ""},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "why",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": tr'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, "e"]},
        {"role": "user", "content": "f", "name": "Ann"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object"},
                "return": {"type": "string"},
            },
        },
        {"name": "g", "description": "of the other API"},
    ],
    "documents": [{"title": "t", "text": "d"}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
}


def test_a_chat_over_grpc_is_the_chat_that_http_reads() -> None:
    over_http = chat_prompt(Fields.of(json.dumps(CHAT).encode()))
    message = client_request_to_proto(client_request(None, GenerateOptions(**CHAT)))
    sent = pb.GenerateRequest.FromString(message.SerializeToString())
    over_grpc = client_request_from_proto(sent).prompt
    assert over_grpc == over_http
    assert over_http.messages[0].content == ("a", "b")
    assert over_http.messages[3].content is None
    assert over_http.tools[0].returns == {"type": "string"}
    assert over_http.arguments["documents"] == CHAT["documents"]
    objects = GenerateOptions(**CHAT | {"messages": over_http.messages, "tools": over_http.tools})
    again = client_request_to_proto(client_request(None, objects))
    assert client_request_from_proto(again).prompt == over_http, (
        "jdisagg's own classes mean the same"
    )


def test_content_and_parts_of_a_message_exclude_each_other() -> None:
    both = pb.ChatMessage(role="user", content="a", parts=["b"])
    request = pb.GenerateRequest(chat=pb.ChatMessages(messages=[both]))
    with pytest.raises(
        InvalidRequestError, match="content, parts and mixed_parts exclude each other"
    ):
        client_request_from_proto(request)
