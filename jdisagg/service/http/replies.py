"""Builds the JSON replies of /v1/completions and /v1/chat/completions, whole or in chunks.

Log-probabilities of a prompt are in vLLM's field `prompt_logprobs`. Those of an echoed prompt are
in OpenAI's field `logprobs`. The bytes that all chunks of a stream have in common are built once.
Log-probabilities of prompts are encoded token by token as JSON text, because Python objects for a
long prompt would take too much memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from jdisagg.prompt.experts import ChosenExperts
from jdisagg.prompt.logprobs import PromptLogprobs, PromptToken
from jdisagg.request import FinishReason, StreamEvent, TokenLogprobs, ToolCallDelta, Usage
from jdisagg.service.http.bodies import StreamOptions
from jdisagg.service.http.requests import OfPrompt
from jdisagg.service.http.response_store import Keep
from jdisagg.service.http.response_tools import SentTool
from jdisagg.service.http.token_texts import Pieces, Placed, TextOfTokens

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"

Json = dict[str, object]
_encode = msgspec.json.encode
_FINISHED = {reason: _encode(reason) for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that all objects of one reply share.

    `version` identifies the served weights. `told` has fields that the reply may repeat. `keep`
    stores the reply for later requests, or is None. `sent_tools` has the tools whose name in the
    chat differs from the client's, by the name in the chat."""

    id: str
    created: int
    model: str
    version: str | None
    told: Mapping[str, object] = field(default_factory=dict)
    keep: Keep | None = None
    sent_tools: Mapping[str, SentTool] = field(default_factory=dict)


@dataclass(slots=True)
class EchoedPrompt:
    """Entries of the field `logprobs` for the tokens of an echoed prompt. The entries of the answer
    follow them. Each entry of `top` is JSON text."""

    tokens: list[str]
    offsets: list[int]
    logprobs: list[float | None]
    top: list[msgspec.Raw]


@dataclass(slots=True)
class ReplyChoice:
    """State of one answer (choice) of a reply.

    Attributes:
        echo: Text of the prompt, if it precedes the answer.
        of_prompt: Which log-probabilities of the prompt to report.
        prompt_logprobs: Log-probabilities of the prompt, or None until they arrive.
        placed: Text offsets of the tokens so far, or None until log-probabilities are reported.
    """

    index: int
    prompt: Sequence[int] = ()
    echo: str = ""
    of_prompt: OfPrompt = OfPrompt()
    prompt_logprobs: PromptLogprobs | None = None
    placed: TextOfTokens | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str = ""
    stop_token: int | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCallDelta, list[str]]] = field(default_factory=list)

    def add(self, event: StreamEvent) -> None:
        self.texts.append(event.text)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason.value
            self.stop_string = event.stop_string
            self.stop_token = event.stop_token
        if event.reasoning:
            self.reasoning.append(event.reasoning)
        for call in event.tool_calls:
            if call.name:
                self.calls.append((call, []))
            self.calls[call.index][1].append(call.arguments)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def as_event(self) -> StreamEvent:
        return StreamEvent(
            self.index,
            0,
            tuple(self.token_ids),
            self.text.removeprefix(self.echo),
            logprobs=tuple(self.logprobs),
            finish_reason=FinishReason.STOP,
        )

    def echoed(self, pieces: Pieces) -> EchoedPrompt | None:
        """Returns None if the client did not request them. Must be called before `places`."""
        found, top = self.prompt_logprobs, self.of_prompt.echoed
        if found is None or top is None:
            return None
        self.placed = TextOfTokens(pieces)
        return _echoed_prompt(self.placed.whole(self.prompt, self.echo), found, top, pieces)

    def places(
        self, token_ids: Sequence[int], text: str | None, pieces: Pieces, *, last: bool
    ) -> list[Placed]:
        """Returns names, bytes and text offsets of new tokens, for the `logprobs` of a reply.

        Args:
            text: Text that was delivered with the tokens. None if it may not start at the first of
                these tokens.
        """
        if self.placed is None:
            self.placed = TextOfTokens(pieces)
            self.placed.follow(self.prompt, self.echo)
        return self.placed.add(token_ids, text, last=last)

    def told(self, pieces: Pieces) -> Json:
        """Returns an object with the field `prompt_logprobs`, or an empty object if the client did
        not request the field."""
        found, top = self.prompt_logprobs, self.of_prompt.told
        if found is None or top is None:
            return {}
        return {"prompt_logprobs": _prompt_logprobs_field(self.prompt, found, top, pieces)}

    def routed(self) -> Json:
        """Returns an object with the field `routed_experts`, or an empty object if the client did
        not request it."""
        found = ChosenExperts.joined(one.experts for one in self.logprobs)
        return {} if found is None else {"routed_experts": found.as_json()}


class Reply:
    """Builds the JSON objects of one reply. Subclasses implement chats and completions."""

    whole_object = ""
    chunk_object = ""
    prompt_in_choice = False  # whether the prompt's ids are in each choice, not in the reply
    takes_apart = False  # whether reasoning and tool calls are separate from content
    id_headers: tuple[bytes, ...] = (b"x-request-id",)  # reply headers with the request's id
    waiting = WAITING  # SSE bytes that are sent while the request waits for its first token

    def __init__(
        self, heading: Heading, streaming: StreamOptions | None, pieces: Pieces, token_ids: bool
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
        streaming = streaming or StreamOptions()
        self._says_usage = streaming.include_usage
        self._continuous = streaming.include_usage and streaming.continuous_usage_stats
        self._start = b"data: " + _encode(self._heading)[:-1]
        self._choices = self._start + b',"choices":[{"index":'
        self._end = b'}],"usage":null}\n\n' if streaming.include_usage else b"}]}\n\n"
        # The bytes after the text, for a chunk that has only text.
        self._plain = not token_ids and not self._continuous
        self._rest = b',"logprobs":null,"finish_reason":null' + self._end

    def begin(self) -> None: ...

    def chunk(
        self, choice: ReplyChoice, event: StreamEvent, first: bool, usage: Callable[[], Usage]
    ) -> bytes:
        """Returns the encoded server-sent event for one stream event."""
        reason, some = event.finish_reason, event.logprobs
        if self._plain and not first and not some and reason is None:
            return b"%b%d,%b%b" % (self._choices, choice.index, self._new(event, first), self._rest)
        echoed = choice.echoed(self._pieces) if first else None
        parts = [
            self._choices,
            b"%d," % choice.index,
            self._new(event, first),
            b',"logprobs":',
            _encode(self._logprobs(event, choice, echoed)) if some or echoed else b"null",
            b',"finish_reason":',
            _FINISHED[reason] if reason is not None else b"null",
        ]
        choice.logprobs += [one for one in some if one.experts is not None]
        if reason is not None:
            parts.append(b',"stop_reason":' + _encode(event.stop_string or event.stop_token))
            if routed := choice.routed():
                parts.append(b"," + _encode(routed)[1:-1])
        end = self._end
        if self._continuous:
            end = end.replace(b"null", _encode(usage_of(usage())), 1)
        if self._token_ids:
            parts.append(b',"token_ids":' + _encode(event.token_ids))
        if first and (prompt := self._of_prompt(choice)):
            made = b"," + _encode(prompt)[1:-1]
            end = made + end if self.prompt_in_choice else end.replace(b"}]", b"}]" + made, 1)
        parts.append(end)
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """Returns the encoded server-sent events that end a stream."""
        return (self._usage_chunk(usage) if self._says_usage else b"") + DONE

    def _usage_chunk(self, usage: Usage) -> bytes:
        return self._start + b',"choices":[],"usage":' + _encode(usage_of(usage)) + b"}\n\n"

    def whole(self, choices: Sequence[ReplyChoice], usage: Usage) -> bytes:
        made = [self._choice(choice) for choice in choices]
        also = {} if self.prompt_in_choice else self._of_prompt(choices[0])
        return _encode({**self._heading, "choices": made, "usage": usage_of(usage), **also})

    def _of_prompt(self, choice: ReplyChoice) -> Json:
        ids: Json = {"prompt_token_ids": choice.prompt} if self._token_ids else {}
        return ids | choice.told(self._pieces)

    def _new(self, event: StreamEvent, first: bool) -> bytes:
        raise NotImplementedError

    def _said(self, choice: ReplyChoice) -> Json:
        raise NotImplementedError

    def _logprobs(
        self, event: StreamEvent, choice: ReplyChoice, echoed: EchoedPrompt | None
    ) -> Json:
        raise NotImplementedError

    def _choice(self, choice: ReplyChoice) -> Json:
        some, echoed = choice.logprobs, choice.echoed(self._pieces)
        made: Json = {
            "index": choice.index,
            **self._said(choice),
            "logprobs": (
                self._logprobs(choice.as_event(), choice, echoed) if some or echoed else None
            ),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_string or choice.stop_token,
        }
        made |= choice.routed()
        if self._token_ids:
            made["token_ids"] = choice.token_ids
        return made | self._of_prompt(choice) if self.prompt_in_choice else made


class ChatReply(Reply):
    takes_apart = True
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _new(self, event: StreamEvent, first: bool) -> bytes:
        # The role is sent with the first text, because clients measure the time to first token by
        # the first chunk.
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
        self, event: StreamEvent, choice: ReplyChoice, echoed: EchoedPrompt | None
    ) -> Json:
        return {"content": self._tokens(choice, event), "refusal": None}

    def _tokens(self, choice: ReplyChoice, event: StreamEvent) -> list[Json]:
        """Returns an entry with the log-probability of each token. The joined bytes of all entries
        are the text that the model generated, even if the reply separates it into reasoning,
        content and tool calls."""
        if not event.logprobs:
            return []
        ended = event.finish_reason is not None
        places = choice.places(event.token_ids, None, self._pieces, last=ended)
        return [self._row(*one) for one in zip(places, event.logprobs, strict=False)]

    def _row(self, placed: Placed, one: TokenLogprobs) -> Json:
        def token(token_id: int, logprob: float) -> Json:
            own = token_id == placed.token_id
            name = placed.name if own else self._pieces.name(token_id)
            given = placed.given if own else self._pieces.given(token_id)
            return {"token": name, "logprob": logprob, "bytes": list(given)}

        top = [token(other, value) for other, value in one.top]
        return {**token(placed.token_id, one.logprob), "top_logprobs": top}


class CompletionReply(Reply):
    whole_object = chunk_object = "text_completion"
    prompt_in_choice = True

    def _new(self, event: StreamEvent, first: bool) -> bytes:
        return b'"text":' + _encode(event.text)

    def _said(self, choice: ReplyChoice) -> Json:
        return {"text": choice.text}

    def _logprobs(
        self, event: StreamEvent, choice: ReplyChoice, echoed: EchoedPrompt | None
    ) -> Json:
        ended = event.finish_reason is not None
        places = choice.places(event.token_ids, event.text, self._pieces, last=ended)
        top = [
            _top_by_text(placed, one.logprob, one.top, self._pieces)
            for placed, one in zip(places, event.logprobs, strict=True)
        ]
        before = echoed or EchoedPrompt([], [], [], [])
        return {
            "text_offset": [*before.offsets, *(placed.offset for placed in places)],
            "token_logprobs": [*before.logprobs, *(one.logprob for one in event.logprobs)],
            "tokens": [*before.tokens, *(placed.name for placed in places)],
            "top_logprobs": [*before.top, *top],
        }


def _reasoning(text: str) -> Json:
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: ToolCallDelta, arguments: str) -> Json:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: ToolCallDelta) -> Json:
    if call.name:
        return {"index": call.index, **_call(call, call.arguments)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def cached_of(usage: Usage) -> Json:
    """Returns OpenAI's field with the number of cached tokens. If the numbers per cache tier are
    known, also returns jdisagg's field with them."""
    tiers = usage.cached_by_tier
    ours = {} if tiers is None else {"cached_tokens_by_tier": tiers.by_tier()}
    return {"cached_tokens": usage.cached_tokens, **ours}


def usage_of(usage: Usage) -> Json:
    total = usage.prompt_tokens + usage.completion_tokens
    reasoning = usage.reasoning_tokens
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": total,
        "prompt_tokens_details": cached_of(usage),
        **({"completion_tokens_details": details} if details else {}),
        **weights_of(usage),
    }


def weights_of(usage: Usage) -> Json:
    """Returns jdisagg's fields about updated weights: the version that chose the last token, and
    the number of tokens that each version chose, in order. Returns no fields if the server's
    initial weights chose all tokens."""
    if not usage.weights:
        return {}
    each = [{"version": version, "tokens": tokens} for version, tokens in usage.weights]
    return {"weight_version": each[-1]["version"], "weight_versions": each}


def _prompt_logprobs_field(
    prompt: Sequence[int], found: PromptLogprobs, top: int, pieces: Pieces
) -> msgspec.Raw:
    def entry(token_id: int, text: str, logprob: float, rank: int) -> bytes:
        shown = _encode({"logprob": logprob, "rank": rank, "decoded_token": text})
        return b'"%d":%b' % (token_id, shown)

    def token(placed: Placed, one: PromptToken) -> bytes:
        likely = [
            entry(other, pieces.name(other), logprob, rank)
            for rank, (other, logprob) in enumerate(one.top[:top], 1)
            if other != placed.token_id
        ]
        own = entry(placed.token_id, placed.name, one.logprob, one.rank)
        return b"{%b}" % b",".join([own, *likely])

    places = TextOfTokens(pieces).add(prompt, None, last=True)
    entries = [b"null", *(token(*one) for one in zip(places[1:], found, strict=True))]
    return msgspec.Raw(b"[%b]" % b",".join(entries))


def _echoed_prompt(
    places: Sequence[Placed], found: PromptLogprobs, top: int, pieces: Pieces
) -> EchoedPrompt:
    likely = [
        msgspec.Raw(_encode(_top_by_text(placed, one.logprob, one.top[:top], pieces)))
        for placed, one in zip(places[1:], found, strict=True)
    ]
    return EchoedPrompt(
        [placed.name for placed in places],
        [placed.offset for placed in places],
        [None, *(one.logprob for one in found)],
        [msgspec.Raw(b"null"), *likely],
    )


def _top_by_text(
    own: Placed, logprob: float, top: Sequence[tuple[int, float]], pieces: Pieces
) -> dict[str, float]:
    named = {
        own.name if other == own.token_id else pieces.name(other): value
        for other, value in top[::-1]
    }
    return {own.name: logprob, **named}
