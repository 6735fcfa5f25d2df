"""Parses a model's answers to a chat into text, reasoning and tool calls.

A parser's state depends only on the text so far. So if a client resumes a stream, the text that it
already received is parsed again."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jdisagg.chat.answer import AnswerDelta, AnswerParser
from jdisagg.chat.call_ids import call_id
from jdisagg.chat.forced_calls import ForcedParser
from jdisagg.chat.formats import AnswerFormat
from jdisagg.chat.messages import ChatPrompt, ToolChoice
from jdisagg.chat.reasoning_count import CountingParser, cut_by_token
from jdisagg.dispatch.token_stream import Detokenizer, TokenStream
from jdisagg.request import FinishReason, Request, StreamEvent, ToolCallDelta, Usage

# Tail of the prompt that is searched for an open reasoning marker.
TAIL_TOKENS = 16
REPLAYED_TOKENS = 64  # tokens replayed before other tasks get a turn


def thinks(
    form: AnswerFormat, chat: ChatPrompt, prompt_ids: Sequence[int], decoder: Detokenizer
) -> bool:
    """Returns whether a chat's prompt ends inside reasoning, because some templates end with the
    marker that begins reasoning."""
    marks = form.marks
    if marks is None:
        return False
    if chat.continue_final_message:
        return marks.open_in(chat.messages[-1].text)
    text = decoder.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return text.rstrip().endswith(marks.begin)


class ChatAnswers:
    """Parsers of all answers to one chat request, one parser per child (parallel sample)."""

    def __init__(
        self, request: Request, chat: ChatPrompt, form: AnswerFormat, decoder: Detokenizer
    ) -> None:
        self._request = request
        self._chat = chat
        self._form = form
        self._decoder = decoder
        self._parsers = [
            None if parser is None else CountingParser(parser)
            for parser in self._new_parsers(decoder)
        ]
        self._called: set[int] = set()  # children with tool calls

    def _new_parsers(self, decoder: Detokenizer) -> list[AnswerParser | None]:
        children = range(self._request.sampling.n)
        if self._chat.tool_choice is ToolChoice.REQUIRED:
            return [ForcedParser() for _ in children]
        prompt = self._request.prompt_token_ids
        tools, thinking = self._chat.callable_tools, thinks(self._form, self._chat, prompt, decoder)
        return [self._form.parser(tools, thinking=thinking) for _ in children]

    async def of(
        self, events: AsyncGenerator[StreamEvent, None]
    ) -> AsyncGenerator[StreamEvent, None]:
        """Closing this iterator closes `events`."""
        async with aclosing(events):
            await self._resume()
            async for event in events:
                yield self._apart(event)

    def _apart(self, event: StreamEvent) -> StreamEvent:
        child, ended = event.child, event.finish_reason
        parser = self._parsers[child]
        if parser is None:
            return event
        delta = parser.push(self._by_token(event) if event.token_ids else [])
        if not event.token_ids and event.text:  # text that was held back
            delta = parser.parser.push(event.text)
        last = parser.parser.finish() if ended is not None else AnswerDelta()
        calls = self._named(child, (*delta.calls, *last.calls))
        # OpenAI reports "stop" for a call that tool_choice names.
        unnamed = not self._chat.tool_name
        if ended is FinishReason.STOP and child in self._called and unnamed:
            ended = FinishReason.TOOL_CALLS
        return dataclasses.replace(
            event,
            text=delta.content + last.content,
            reasoning=delta.reasoning + last.reasoning,
            tool_calls=calls,
            finish_reason=ended,
            usage=event.usage and self._with_reasoning(event.usage),
        )

    def _by_token(self, event: StreamEvent) -> list[str]:
        if len(event.token_ids) == 1:
            return [event.text]
        decode = self._decoder.decode
        pieces = [decode([one], skip_special_tokens=False) for one in event.token_ids]
        return cut_by_token(pieces, event.text)

    def _with_reasoning(self, usage: Usage) -> Usage:
        found = [one.tokens for one in self._parsers if one and one.tokens is not None]
        return dataclasses.replace(usage, reasoning_tokens=sum(found)) if found else usage

    def _named(self, child: int, calls: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
        """If the request allows only one call, drops all later calls."""
        if not calls:
            return ()
        self._called.add(child)
        return tuple(
            dataclasses.replace(call, id=self._call_id(child, call)) if call.name else call
            for call in calls
            if self._chat.parallel_tool_calls or call.index == 0
        )

    def _call_id(self, child: int, call: ToolCallDelta) -> str:
        earlier = sum(len(message.tool_calls) for message in self._chat.messages)
        identity = "/".join(map(repr, (*self._request.identity, child, call.index)))
        return call_id(self._form.tools, call.name, earlier + call.index, identity)

    async def _resume(self) -> None:
        """Other tasks run between blocks of tokens."""
        resumption = self._request.resumption
        for child, had in enumerate(resumption.children if resumption else ()):
            parser, text = self._parsers[child], TokenStream.of(self._decoder, self._request)
            if parser is None:
                continue
            for first in range(0, len(had.token_ids), REPLAYED_TOKENS):
                some = had.token_ids[first : first + REPLAYED_TOKENS]
                if parser.push([text.push((one,)).text for one in some]).calls:
                    self._called.add(child)
                await asyncio.sleep(0)
