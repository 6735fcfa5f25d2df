"""Chats with tools and reasoning: a model that says a given text, and its answers however they
come, whole and streamed, over HTTP and gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from jdisagg.client import AsyncClient
from jdisagg.request import FinishReason, Request, StreamEvent, Usage
from tests.service.doors import FakePath
from tests.service.http_doors import HttpDoor, http_door

# As Qwen 3 writes it, in small.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{"
    " m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments.city }} {{ c.id }}</tool_call>"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>\n{% endif %}"
    "{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA},
}
CHAT: Any = [{"role": "user", "content": "hi"}]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


@dataclass
class Script(FakePath):
    """Says `text`, some characters an event, and stops; a resumed request goes on where it was. Cut
    off, it ends by its length. The last child waits at character `held_at` for the gate."""

    text: str = ""
    characters: int = 3
    cut: bool = False
    held_at: int | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        had = request.resumption.children if request.resumption is not None else ()
        data, end = self.text.encode(), FinishReason.LENGTH if self.cut else FinishReason.STOP
        for child in range(request.sampling.n):
            first = len(had[child].token_ids) if had else 0
            while not had or had[child].finish_reason is None:
                if child + 1 == request.sampling.n and first == self.held_at:
                    self.held.set()
                    await self.gate.wait()
                some = tuple(data[first : first + self.characters])
                last = first + len(some) >= len(data)
                shown = data[: first + len(some)].decode("utf-8", "ignore")
                before = data[:first].decode("utf-8", "ignore")
                usage = Usage(len(request.prompt_token_ids), len(data))
                yield StreamEvent(
                    child=child,
                    first_index=first,
                    token_ids=some,
                    text=shown[len(before) :],
                    finish_reason=end if last else None,
                    usage=usage if last and child + 1 == request.sampling.n else None,
                )
                first += len(some)
                if last:
                    break


@dataclass
class Said:
    """An answer, however it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    end: str | None = None


async def whole(client: openai.AsyncOpenAI, **asked: Any) -> list[Said]:
    reply = await client.chat.completions.create(model="tiny", messages=CHAT, **asked)
    ChatCompletion.model_validate(reply.model_dump(warnings=False), strict=True)
    return [
        Said(
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", ""),
            [
                (call.id, call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
                if call.type == "function"
            ],
            choice.finish_reason,
        )
        for choice in reply.choices
    ]


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> list[Said]:
    said: dict[int, Said] = {}
    async for chunk in await client.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, **asked
    ):
        ChatCompletionChunk.model_validate(chunk.model_dump(warnings=False), strict=True)
        for choice in chunk.choices:
            one, delta = said.setdefault(choice.index, Said()), choice.delta
            one.content += delta.content or ""
            one.reasoning += getattr(delta, "reasoning_content", None) or ""
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            one.end = choice.finish_reason or one.end
            for call in delta.tool_calls or ():
                assert call.function
                if call.function.name:
                    assert call.id and call.index == len(one.calls) and call.type == "function"
                    one.calls.append((call.id, call.function.name, ""))
                called, name, arguments = one.calls[call.index]
                arguments += call.function.arguments or ""
                one.calls[call.index] = called, name, arguments
    return [said[index] for index in sorted(said)]


async def over_grpc(door: HttpDoor, **asked: Any) -> list[Said]:
    async with AsyncClient(door.target) as ours:
        done = await ours.complete(messages=CHAT, **asked)
    return [
        Said(
            choice.text,
            choice.reasoning,
            [(call.id, call.name, call.arguments) for call in choice.tool_calls],
            choice.finish_reason and choice.finish_reason.value,
        )
        for choice in done.choices
    ]


THOUGHT = "<think>\nhmm\n</think>\n\nLet me see.\n" + CALLS
FLAT: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": SCHEMA,
}
ROUND: Any = [
    {"role": "user", "content": "hi"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rom"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "wet"},
]


async def responses(client: openai.AsyncOpenAI, **asked: Any) -> tuple[Response, list[Any]]:
    """A response as it comes whole, and the events of the same one; both as their types say."""
    reply = await client.responses.create(**asked)
    Response.model_validate(reply.model_dump(warnings=False), strict=True)
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    for event in events:
        type(event).model_validate(event.model_dump(warnings=False), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return reply, events


def script_door() -> AbstractAsyncContextManager[HttpDoor]:
    return http_door(Script(), template=TEMPLATE)


def say(door: HttpDoor, text: str, characters: int = 3, cut: bool = False) -> None:
    """What the model of `script_door` says from now on."""
    assert isinstance(door.path, Script)
    door.path.text, door.path.characters, door.path.cut = text, characters, cut


def prompts(door: HttpDoor) -> list[str]:
    """The texts that the model was shown."""
    return [bytes(request.prompt_token_ids).decode() for request in door.path.requests]
