"""What the HTTP door answers to generation requests: OpenAI's objects, whole or in chunks.

A chunk is preformatted: all but the text, the tokens and the end of it is bytes that were made once
a request. One frame carries what one event of the stream carries. Knows no connection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from jdisagg.request import FinishReason, StreamEvent, TokenLogprobs, ToolCallDelta, Usage
from jdisagg.service.http_requests import Streaming

DONE = b"data: [DONE]\n\n"
UNREADABLE = "\ufffd"

Json = dict[str, object]
_encode = msgspec.json.encode
_FINISHED = {reason: _encode(reason) for reason in FinishReason}


class Pieces:
    """The text of single tokens, each asked for once. `as_ids`: their ids instead, as vLLM writes
    them."""

    def __init__(self, text_of: Callable[[int], str], known: dict[int, str], as_ids: bool) -> None:
        self._text_of = text_of
        self._known = known
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._text_of(token_id)
        return text


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one reply says."""

    id: str
    created: int
    model: str
    version: str | None


@dataclass(slots=True)
class ReplyChoice:
    """What one answer has come to. `prompt`: the token ids that it follows; `offset`: where its
    next token stands in its text, in characters."""

    index: int
    prompt: Sequence[int] = ()
    offset: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCallDelta, list[str]]] = field(default_factory=list)

    def add(self, event: StreamEvent) -> None:
        self.texts.append(event.text)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason.value
        if event.reasoning:
            self.reasoning.append(event.reasoning)
        for call in event.tool_calls:
            if call.name:
                self.calls.append((call, []))
            self.calls[call.index][1].append(call.arguments)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Reply:
    """The objects of one request. Subclasses say how chats and completions differ."""

    whole_object = ""
    chunk_object = ""
    prompt_in_choice = False  # whether a choice, or the reply, says the prompt's token ids
    takes_apart = False  # whether it tells reasoning and calls of tools from words

    def __init__(
        self, heading: Heading, streaming: Streaming | None, pieces: Pieces, token_ids: bool
    ) -> None:
        self._pieces = pieces
        self._token_ids = token_ids
        self._heading: Json = {
            "id": heading.id,
            "object": self.chunk_object if streaming else self.whole_object,
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.version,
        }
        streaming = streaming or Streaming()
        self._says_usage = streaming.usage
        self._continuous = streaming.usage and streaming.continuous_usage
        self._start = b"data: " + _encode(self._heading)[:-1]
        self._choices = self._start + b',"choices":[{"index":'
        self._end = b'}],"usage":null}\n\n' if streaming.usage else b"}]}\n\n"

    def chunk(self, choice: ReplyChoice, event: StreamEvent, first: bool, usage: Usage) -> bytes:
        """The frame of one event. `first`: of this choice; `usage`: until now."""
        reason, some = event.finish_reason, event.logprobs
        parts = [
            self._choices,
            b"%d," % choice.index,
            self._new(event, first),
            b',"logprobs":',
            _encode(self._logprobs(event.token_ids, some, choice)) if some else b"null",
            b',"finish_reason":',
            _FINISHED[reason] if reason is not None else b"null",
        ]
        end = self._end
        if self._token_ids:
            parts.append(b',"token_ids":' + _encode(event.token_ids))
            if first:
                ids = b',"prompt_token_ids":' + _encode(choice.prompt)
                end = ids + end if self.prompt_in_choice else end.replace(b"}]", b"}]" + ids, 1)
        if self._continuous:
            end = end.replace(b"null", _encode(usage_of(usage)), 1)
        parts.append(end)
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """The last frames of a stream."""
        return (self._usage_chunk(usage) if self._says_usage else b"") + DONE

    def _usage_chunk(self, usage: Usage) -> bytes:
        """Without choices."""
        return self._start + b',"choices":[],"usage":' + _encode(usage_of(usage)) + b"}\n\n"

    def whole(self, choices: Sequence[ReplyChoice], usage: Usage) -> bytes:
        """The reply that is not streamed."""
        made = [self._choice(choice) for choice in choices]
        ids = {"prompt_token_ids": choices[0].prompt} if self._token_ids else {}
        also = {} if self.prompt_in_choice else ids
        return _encode({**self._heading, "choices": made, "usage": usage_of(usage), **also})

    def _new(self, event: StreamEvent, first: bool) -> bytes:
        """What a chunk says of an event. `first`: of its choice."""
        raise NotImplementedError

    def _said(self, choice: ReplyChoice) -> Json:
        raise NotImplementedError

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], choice: ReplyChoice
    ) -> Json:
        raise NotImplementedError

    def _choice(self, choice: ReplyChoice) -> Json:
        some = choice.logprobs
        made: Json = {
            "index": choice.index,
            **self._said(choice),
            "logprobs": self._logprobs(choice.token_ids, some, choice) if some else None,
            "finish_reason": choice.finish_reason,
        }
        if self._token_ids:
            made["token_ids"] = choice.token_ids
            if self.prompt_in_choice:
                made["prompt_token_ids"] = choice.prompt
        return made


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    takes_apart = True
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _new(self, event: StreamEvent, first: bool) -> bytes:
        # The role comes with the first text: clients take the first chunk for the first token.
        start = b'"delta":{"role":"assistant","content":' if first else b'"delta":{"content":'
        if not event.reasoning and not event.tool_calls:
            return start + _encode(event.text) + b"}" if event.text or first else b'"delta":{}'
        delta: Json = {"role": "assistant"} if first else {}
        if event.text:
            delta["content"] = event.text
        delta |= _reasoning(event.reasoning)
        if event.tool_calls:
            delta["tool_calls"] = list(map(_call_delta, event.tool_calls))
        return b'"delta":' + _encode(delta)

    def _said(self, choice: ReplyChoice) -> Json:
        text = choice.text
        message: Json = {
            "role": "assistant",
            "content": None if choice.calls and not text else text,
            "refusal": None,
            **_reasoning("".join(choice.reasoning)),
        }
        if choice.calls:
            message["tool_calls"] = [_call(call, "".join(some)) for call, some in choice.calls]
        return {"message": message}

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], choice: ReplyChoice
    ) -> Json:
        content = [
            {
                **self._token(token_id, one.logprob),
                "top_logprobs": [self._token(other, value) for other, value in one.top],
            }
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._pieces(token_id)
        known = None if UNREADABLE in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": logprob, "bytes": known}


class CompletionReply(Reply):
    """Of /v1/completions."""

    whole_object = chunk_object = "text_completion"
    prompt_in_choice = True

    def _new(self, event: StreamEvent, first: bool) -> bytes:
        return b'"text":' + _encode(event.text)

    def _said(self, choice: ReplyChoice) -> Json:
        return {"text": choice.text}

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], choice: ReplyChoice
    ) -> Json:
        tokens = [self._pieces(token_id) for token_id in token_ids]
        offsets: list[int] = []
        for text in tokens:
            offsets.append(choice.offset)
            choice.offset += len(text)
        # As OpenAI: the chosen token is among the likely ones, be it likely or not. Where two have
        # one text, the likelier one's probability stands.
        top = [
            {text: one.logprob, **{self._pieces(other): value for other, value in one.top[::-1]}}
            for text, one in zip(tokens, logprobs, strict=True)
        ]
        return {
            "text_offset": offsets,
            "token_logprobs": [one.logprob for one in logprobs],
            "tokens": tokens,
            "top_logprobs": top,
        }


def _reasoning(text: str) -> Json:
    """Under the name that clients know, and the one that vLLM gives it now."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: ToolCallDelta, arguments: str) -> Json:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: ToolCallDelta) -> Json:
    if call.name:
        return {"index": call.index, **_call(call, call.arguments)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def usage_of(usage: Usage) -> Json:
    total = usage.prompt_tokens + usage.completion_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
