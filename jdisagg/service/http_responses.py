"""/v1/responses, without state: what is asked for, and OpenAI's objects and events of the answer.

A response is one message of text. Nothing is stored, so that what refers to an earlier response is
refused; the client sends the conversation."""

from collections.abc import Sequence

import msgspec

from jdisagg.chat.messages import ChatMessage, ChatPrompt
from jdisagg.errors import InvalidRequestError
from jdisagg.request import FinishReason, StreamEvent, TokenLogprobs, Usage, at_most
from jdisagg.service.http_chat import chat_message
from jdisagg.service.http_fields import INTEGER, TEXT, TEXTS, FieldKind, Fields
from jdisagg.service.http_grammar import grammar_of_response
from jdisagg.service.http_replies import ChatReply, Json, ReplyChoice
from jdisagg.service.http_requests import Asked, asked_from, sampling_options
from jdisagg.service.wire_chat import MAX_MESSAGES

LOGPROBS = "message.output_text.logprobs"

_encode = msgspec.json.encode
_INPUT = FieldKind(
    "a string or a list of messages",
    msgspec.json.Decoder(str | list[dict[str, msgspec.Raw]]).decode,
)
_STATELESS = "the server keeps nothing; send the whole conversation as input"
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "prompt": ((), _STATELESS),
    "background": ((False,), "wait for the reply"),
    "tools": (([],), "describe the tools in a message"),
    "tool_choice": (("none", "auto"), "the server knows no tools"),
    "truncation": (("disabled",), "leave out what does not fit"),
    "context_management": (([],), "leave out what does not fit"),
    "n": ((1,), "ask again"),
}


def response_from(fields: Fields) -> Asked:
    """A body of /v1/responses. Raises InvalidRequestError naming the field."""
    fields.refuse(_REFUSED)
    fields.ignore("reasoning", "max_tool_calls")
    instructions = fields.read("instructions", TEXT)
    given = fields.given("input", _INPUT)
    messages = [ChatMessage("system", instructions)] if instructions else []
    if isinstance(given, str):
        messages.append(ChatMessage("user", given))
    else:
        at_most("input", len(given), MAX_MESSAGES)
        messages += [_item(Fields(one, f"input[{at}].")) for at, one in enumerate(given)]
    options = sampling_options(fields)
    options["grammar"] = grammar_of_response(fields) or options.get("grammar")
    options["max_tokens"] = fields.read("max_output_tokens", INTEGER)
    top = fields.read("top_logprobs", INTEGER)
    included = fields.read("include", TEXTS) or []
    if LOGPROBS in included or top is not None:
        options["logprobs"] = top or 0
    return asked_from(fields, (ChatPrompt(tuple(messages)),), options)


def _item(item: Fields) -> ChatMessage:
    kind = item.read("type", TEXT) or "message"
    if kind != "message":
        raise InvalidRequestError(
            f"input items must have the type message, got {kind[:80]!r}; the server knows no other"
        )
    return chat_message(item)


class ResponseReply(ChatReply):
    """A response: whole, or as the events that build it up. They are numbered."""

    whole_object = chunk_object = "response"
    _number = -1

    def chunk(self, choice: ReplyChoice, event: StreamEvent, first: bool, usage: Usage) -> bytes:
        """The events of one event: at the first those that begin, at the last those that end."""
        frames: list[bytes] = []
        if first:
            begun = self._response([], "in_progress", None, None)
            frames += [
                self._frame("response.created", response=begun),
                self._frame("response.in_progress", response=begun),
                self._frame("response.output_item.added", item=self._item("in_progress", [])),
                self._frame("response.content_part.added", **self._part(self._text_part("", []))),
            ]
        choice.texts.append(event.text)
        choice.logprobs += event.logprobs
        choice.token_ids += event.token_ids
        frames.append(
            self._frame(
                "response.output_text.delta",
                delta=event.text,
                logprobs=self._tokens(event.token_ids, event.logprobs),
                **self._part(),
            )
        )
        if event.finish_reason is not None:
            choice.finish_reason = event.finish_reason.value
            frames += self._ending(choice, usage)
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """Nothing: the last event has said it."""
        return b""

    def whole(self, choices: Sequence[ReplyChoice], usage: Usage) -> bytes:
        return _encode(self._finished(choices[0], usage))

    def _ending(self, choice: ReplyChoice, usage: Usage) -> list[bytes]:
        tokens, item = self._tokens(choice.token_ids, choice.logprobs), self._done(choice)
        finished = self._finished(choice, usage)
        part = self._part(self._text_part(choice.text, tokens))
        return [
            self._frame(
                "response.output_text.done", text=choice.text, logprobs=tokens, **self._part()
            ),
            self._frame("response.content_part.done", **part),
            self._frame("response.output_item.done", item=item),
            self._frame(f"response.{finished['status']}", response=finished),
        ]

    def _finished(self, choice: ReplyChoice, usage: Usage) -> Json:
        cut = choice.finish_reason == FinishReason.LENGTH.value
        reason: Json | None = {"reason": "max_output_tokens"} if cut else None
        return self._response(
            [self._done(choice)], "incomplete" if cut else "completed", reason, usage
        )

    def _done(self, choice: ReplyChoice) -> Json:
        cut = choice.finish_reason == FinishReason.LENGTH.value
        tokens = self._tokens(choice.token_ids, choice.logprobs)
        part = self._text_part(choice.text, tokens)
        return self._item("incomplete" if cut else "completed", [part])

    def _response(
        self, output: list[Json], status: str, incomplete: Json | None, usage: Usage | None
    ) -> Json:
        heading = self._heading
        return {
            "id": heading["id"],
            "object": "response",
            "created_at": heading["created"],
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": None,
            "metadata": {},
            "model": heading["model"],
            "output": output,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "store": False,
            "usage": _usage_of(usage) if usage is not None else None,
        }

    def _item(self, status: str, content: list[Json]) -> Json:
        return {
            "type": "message",
            "id": self._item_id(),
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _item_id(self) -> str:
        return f"msg_{str(self._heading['id']).removeprefix('resp_')}"

    def _text_part(self, text: str, tokens: list[Json]) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}

    def _part(self, part: Json | None = None) -> Json:
        place: Json = {"item_id": self._item_id(), "content_index": 0}
        return place if part is None else {**place, "part": part}

    def _tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Json]:
        return [
            {
                **self._token(token_id, one.logprob),
                "top_logprobs": [self._token(other, value) for other, value in one.top],
            }
            for token_id, one in zip(token_ids, logprobs, strict=False)
        ]

    def _frame(self, kind: str, **said: object) -> bytes:
        self._number += 1
        place = {} if "response" in said else {"output_index": 0}
        event = {"type": kind, "sequence_number": self._number, **place, **said}
        return b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _usage_of(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
