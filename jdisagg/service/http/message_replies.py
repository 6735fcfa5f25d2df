"""Builds replies of /v1/messages: Anthropic's objects and events.

A message is a list of content blocks (thinking, text, tool calls) in the order in which the model
generates them. Each block is complete before the next begins."""

import base64
import enum
import hashlib
from collections.abc import Callable, Sequence

import msgspec

from jdisagg.request import FinishReason, StreamEvent, ToolCallDelta, Usage
from jdisagg.service.http.bodies import StreamOptions
from jdisagg.service.http.replies import Heading, Json, Reply, ReplyChoice
from jdisagg.service.http.token_texts import Pieces

_encode = msgspec.json.encode
_an_object = msgspec.json.Decoder(dict[str, object]).decode
# Anthropic's name for arguments that are not a JSON object.
NOT_JSON = "INVALID_JSON"


class _Kind(enum.Enum):
    THINKING = ("thinking_delta", "thinking")
    TEXT = ("text_delta", "text")
    CALL = ("input_json_delta", "partial_json")


class MessageReply(Reply):
    takes_apart = True
    id_headers = (b"x-request-id", b"request-id")
    waiting = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self, heading: Heading, streaming: StreamOptions | None, pieces: Pieces, token_ids: bool
    ) -> None:
        super().__init__(heading, streaming, pieces, token_ids)
        self._most_tokens = int(str(heading.told["max_tokens"]))
        self._open: _Kind | None = None
        self._index = -1
        self._called = False
        self._thoughts: list[str] = []

    def chunk(
        self, choice: ReplyChoice, event: StreamEvent, first: bool, usage: Callable[[], Usage]
    ) -> bytes:
        """Returns the encoded server-sent events for one stream event. The first stream event opens
        the message, and the last closes it."""
        frames: list[bytes] = []
        if first:
            message = self._message([], None, "", usage())
            frames.append(_frame("message_start", message=message))
        # Order: arguments of the open call, then thinking and text, then the next call.
        for call in event.tool_calls:
            frames += [] if call.name else [self._delta(_Kind.CALL, call.arguments)]
        if event.reasoning:
            frames += self._begin(_Kind.THINKING, _thinking(""))
            self._thoughts.append(event.reasoning)
            frames.append(self._delta(_Kind.THINKING, event.reasoning))
        if event.text:
            frames += self._begin(_Kind.TEXT, _text(""))
            frames.append(self._delta(_Kind.TEXT, event.text))
        for call in event.tool_calls:
            frames += self._call(call) if call.name else []
        if event.finish_reason is not None:
            frames += self._close()
            frames += self._ended(event.finish_reason.value, event.stop_string, usage())
        return b"".join(frames)

    def _ended(self, reason: str, stop_string: str, usage: Usage) -> list[bytes]:
        delta = self._stop(reason, stop_string, usage)
        return [
            _frame("message_delta", delta=delta, usage=_usage_of(usage)),
            _frame("message_stop"),
        ]

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        self._called = True
        frames = self._begin(_Kind.CALL, _tool_use(call, {}))
        return [*frames, self._delta(_Kind.CALL, call.arguments)] if call.arguments else frames

    def _begin(self, kind: _Kind, block: Json) -> list[bytes]:
        if self._open is kind and kind is not _Kind.CALL:
            return []
        frames = self._close()
        self._open = kind
        self._index += 1
        start = _frame("content_block_start", index=self._index, content_block=block)
        return [*frames, start]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        frames: list[bytes] = []
        if self._open is _Kind.THINKING:
            signed = {"type": "signature_delta", "signature": _signature("".join(self._thoughts))}
            self._thoughts.clear()
            frames.append(_frame("content_block_delta", index=self._index, delta=signed))
        self._open = None
        return [*frames, _frame("content_block_stop", index=self._index)]

    def _delta(self, kind: _Kind, text: str) -> bytes:
        name, field = kind.value
        delta = {"type": name, field: text}
        return _frame("content_block_delta", index=self._index, delta=delta)

    def end(self, usage: Usage) -> bytes:
        """Returns nothing, because the last event already closed the message."""
        return b""

    def whole(self, choices: Sequence[ReplyChoice], usage: Usage) -> bytes:
        choice = choices[0]
        content: list[Json] = []
        if choice.reasoning:
            content.append(_thinking("".join(choice.reasoning)))
        if choice.text:
            content.append(_text(choice.text))
        self._called = bool(choice.calls)
        content += [_tool_use(call, _input("".join(some))) for call, some in choice.calls]
        reason = choice.finish_reason or FinishReason.STOP.value
        return _encode(self._message(content, reason, choice.stop_string, usage))

    def _message(
        self, content: list[Json], reason: str | None, stop_string: str, usage: Usage
    ) -> Json:
        return {
            "id": self._heading["id"],
            "type": "message",
            "role": "assistant",
            "model": self._heading["model"],
            "content": content,
            "container": None,
            **self._stop(reason, stop_string, usage),
            "usage": _usage_of(usage) | _UNKNOWN_USAGE,
        }

    def _stop(self, reason: str | None, stop_string: str, usage: Usage) -> Json:
        match reason:
            case None:
                named = None
            case FinishReason.LENGTH.value:
                full = usage.completion_tokens < self._most_tokens
                named = "model_context_window_exceeded" if full else "max_tokens"
            case _ if self._called:
                named = "tool_use"
            case _:
                named = "stop_sequence" if stop_string else "end_turn"
        sequence = stop_string if named == "stop_sequence" else None
        return {"stop_reason": named, "stop_sequence": sequence, "stop_details": None}


def _thinking(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": _signature(text)}


def _text(text: str) -> Json:
    return {"type": "text", "text": text, "citations": None}


def _tool_use(call: ToolCallDelta, given: object) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _input(arguments: str) -> object:
    try:
        _an_object(arguments or "{}")
        return msgspec.Raw((arguments or "{}").encode())
    except (msgspec.MsgspecError, RecursionError):
        return {NOT_JSON: arguments}


def _signature(text: str) -> str:
    """Clients send thinking back in later requests only if it has a signature. The server does not
    verify the signature, because it treats thinking as ordinary text."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return base64.b64encode(digest).decode() if text else ""


def _usage_of(usage: Usage) -> Json:
    """Returns the token counts in the form of Anthropic's API, where `input_tokens` does not
    include tokens that are cached or were put into the cache at the client's wish."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.created_tokens,
        "cache_creation_input_tokens": usage.created_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "server_tool_use": None,
    }


_UNKNOWN_USAGE = dict.fromkeys(("cache_creation", "inference_geo", "service_tier"))


def _frame(kind: str, **said: object) -> bytes:
    event = {"type": kind, **said}
    return b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n"
