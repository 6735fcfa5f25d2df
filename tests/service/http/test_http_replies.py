"""The OpenAI-compatible door by OpenAI's own client: every reply is what its types say, and holds
what the path made."""

import json
from typing import Any

import openai
import pytest
from openai.types import Completion, Model
from openai.types.responses import Response

from jdisagg.request import FinishReason, StreamEvent, Usage
from jdisagg.service.http.bodies import StreamOptions
from jdisagg.service.http.replies import ChatReply, CompletionReply, Heading, Reply, ReplyChoice
from jdisagg.service.http.token_texts import Pieces
from tests.service.doors import CACHED, FakePath, expected_tokens, text_of
from tests.service.http_doors import HttpDoor

NO_TEXT = Pieces(lambda one: "", lambda one: b"", {})
CHAT: Any = [{"role": "user", "content": "hi"}]


def strict(reply: Any, kind: type) -> None:
    """The client builds its objects of whatever comes; this holds the reply against their types."""
    kind.model_validate(reply.model_dump(warnings=False, by_alias=True), strict=True)


def made(path: FakePath, child: int = 0, request: int = 0) -> str:
    return text_of(expected_tokens(path.requests[request], child))


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("usage", [None, False, True], ids=["unsaid", "at the end", "each"])
@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_a_frame_is_the_same_to_the_byte_whatever_it_has_to_say(
    kind: type[Reply], usage: bool | None, token_ids: bool
) -> None:
    """Held against the object written down as a whole."""
    streaming = StreamOptions(usage is not None, bool(usage))
    reply = kind(Heading("x-1", 7, "tiny", None), streaming, NO_TEXT, token_ids)
    choice = ReplyChoice(2, (3, 4))
    for number, (text, reason) in enumerate(
        [(" a", None), (' "\n\u00e4', None), ("", None), ("z", FinishReason.STOP)]
    ):
        event = StreamEvent(0, number, (5, 6), text, finish_reason=reason)
        frame = reply.chunk(choice, event, number == 0, lambda: Usage(2, 9))
        chat = kind is ChatReply
        said: Any = {"text": text}
        if chat:
            role = {"role": "assistant"} if number == 0 else {}
            said = {"delta": role | ({"content": text} if text else {})}
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": reason and reason.value}
        rest |= {"stop_reason": None} if reason else {}
        rest |= {"token_ids": [5, 6]} if token_ids else {}
        prompt = {"prompt_token_ids": [3, 4]} if token_ids and number == 0 else {}
        used = {
            "prompt_tokens": 2,
            "completion_tokens": 9,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        whole = {
            "id": "x-1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 7,
            "model": "tiny",
            "system_fingerprint": None,
            "choices": [{"index": 2, **said, **rest, **({} if chat else prompt)}],
            **(prompt if chat else {}),
            **({} if usage is None else {"usage": used if usage else None}),
        }
        written = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
        assert frame.decode() == f"data: {written}\n\n"


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
@pytest.mark.parametrize(
    ("ended", "reason"),
    [({"stop_string": "z"}, "z"), ({"stop_token": 0}, 0), ({"stop_token": 9}, 9), ({}, None)],
)
def test_a_choice_says_which_stop_of_the_client_ended_it(
    kind: type[Reply], ended: dict[str, Any], reason: object
) -> None:
    event = StreamEvent(0, 0, (5,), "a", finish_reason=FinishReason.STOP, **ended)
    choice = ReplyChoice(0)
    choice.add(event)
    heading = Heading("x-1", 7, "tiny", None)
    whole = kind(heading, None, NO_TEXT, False).whole([choice], Usage(1, 1))
    streamed = kind(heading, StreamOptions(), NO_TEXT, False)
    chunk = streamed.chunk(choice, event, True, lambda: Usage(1, 1))
    for body in (whole, chunk.removeprefix(b"data: ")):
        assert json.loads(body)["choices"][0]["stop_reason"] == reason


async def test_the_model_that_is_served_is_listed(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]
    strict(models[0], Model)
    assert (await client.models.retrieve("tiny")).model_dump()["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError, match="'tiny', the served model, got 'other'"):
        await client.models.retrieve("other")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97, 98], [99]], [(97, 98), (99,)]),
    ],
)
async def test_a_prompt_is_text_or_ids_or_several_of_a_kind(
    door: HttpDoor, client: openai.AsyncOpenAI, prompt: Any, prompts: list[tuple[int, ...]]
) -> None:
    reply = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=3, n=2, logprobs=1
    )
    strict(reply, Completion)
    requests = door.path.requests
    assert [request.prompt_token_ids for request in requests] == prompts
    texts = [made(door.path, child, number) for number in range(len(prompts)) for child in (0, 1)]
    assert [choice.text for choice in reply.choices] == texts
    assert [choice.index for choice in reply.choices] == list(range(len(texts)))
    logprobs = reply.choices[-1].logprobs
    assert logprobs is not None and logprobs.text_offset == [0, 1, 2]
    assert logprobs.tokens == list(texts[-1]) and logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{letter: -0.5} for letter in texts[-1]]
    assert reply.usage is not None and reply.usage.prompt_tokens == sum(map(len, prompts))
    assert reply.usage.prompt_tokens_details.model_dump(exclude_none=True) == {
        "cached_tokens": len(prompts) * CACHED.total,
        "cached_tokens_by_tier": {
            tier: len(prompts) * tokens for tier, tokens in CACHED.by_tier().items()
        },
    }
    streamed: dict[int, str] = {}
    async for chunk in await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=3, n=2, stream=True
    ):
        choice = chunk.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[index] for index in sorted(streamed)] == texts


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({}, "<user>hi<assistant>he said"),
        ({"add_generation_prompt": False}, "<user>hi<assistant>he said"),
        ({"continue_final_message": True}, "<user>hi<assistant>he said"),
    ],
)
async def test_a_chat_ends_where_the_client_wants(
    door: HttpDoor, how: dict[str, Any], text: str
) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "he said"}]
    tokens = (await door.ask("/tokenize", {"messages": messages, **how})).fields["tokens"]
    assert bytes(tokens).decode() == text + ("<assistant>" if not how else "")
    await door.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **how})
    assert list(door.path.requests[0].prompt_token_ids) == tokens


async def test_texts_become_tokens_and_back(door: HttpDoor) -> None:
    tokens = (await door.ask("/tokenize", {"prompt": "hé", "return_token_strs": True})).fields
    assert tokens["tokens"] == list("hé".encode()) and tokens["count"] == 3
    assert tokens["token_strs"][0] == "h" and tokens["max_model_len"] == 512
    chat = (await door.ask("/tokenize", {"messages": CHAT})).fields
    assert bytes(chat["tokens"]).decode() == "<user>hi<assistant>"
    back = await door.ask("/detokenize", {"tokens": tokens["tokens"]})
    assert back.fields == {"prompt": "hé"}


async def test_what_is_not_known_is_named_and_passed_over(door: HttpDoor) -> None:
    asked = {"prompt": "x", "max_tokens": 1, "foo": 1, "a\r\nb: c": 2, "user": "me"}
    answer = await door.ask("/v1/completions", asked)
    assert answer.status == 200
    assert answer.headers["jdisagg-ignored-fields"] == "foo, and 1 more"


async def test_a_request_bears_the_clients_name_for_it(door: HttpDoor) -> None:
    asked = {"prompt": "x", "max_tokens": 1}
    answers = [await door.ask("/v1/completions", asked, x_request_id="mine") for _ in range(2)]
    names = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(names)) == 2 and all(name.startswith("mine-") for name in names)
    assert [answer.fields["id"] for answer in answers] == [f"cmpl-{name}" for name in names]
    assert [request.request_id for request in door.path.requests] == names


async def test_a_response_is_answered_whole(door: HttpDoor, client: openai.AsyncOpenAI) -> None:
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": "ho"},
    ]
    reply = await client.responses.create(
        model="tiny",
        instructions="be",
        input=given,
        max_output_tokens=4,
        top_logprobs=1,
        include=["message.output_text.logprobs"],
    )
    strict(reply, Response)
    assert reply.output_text == made(door.path) and reply.status == "incomplete"
    assert reply.incomplete_details and reply.incomplete_details.reason == "max_output_tokens"
    prompt = bytes(door.path.requests[0].prompt_token_ids).decode()
    assert prompt == "<system>be<user>hi<assistant>ho<assistant>"
    usage = reply.usage
    assert usage and (usage.input_tokens, usage.output_tokens) == (len(prompt), 4)
    assert usage.input_tokens_details.cached_tokens == CACHED.total
    extra = usage.input_tokens_details.model_dump()
    assert extra["cached_tokens_by_tier"] == CACHED.by_tier()


async def test_a_response_is_streamed_as_the_events_that_build_it_up(
    door: HttpDoor, client: openai.AsyncOpenAI
) -> None:
    stream = await client.responses.create(
        model="tiny", input="hi", max_output_tokens=3, stream=True
    )
    said = [event async for event in stream]
    for event in said:
        strict(event, type(event))
    assert [event.sequence_number for event in said] == list(range(11))
    deltas = [event.delta for event in said if event.type == "response.output_text.delta"]
    assert "".join(deltas) == made(door.path)
    assert [event.type.removeprefix("response.") for event in said] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    last = said[-1]
    assert last.type == "response.incomplete" and last.response.output_text == made(door.path)
