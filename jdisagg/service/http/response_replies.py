"""Builds replies of /v1/responses: OpenAI's objects and events.

A response is a list of items (reasoning, a text message, tool calls) in the order in which the
model generates them. Each item is complete before the next begins."""

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from jdisagg.request import FinishReason, StreamEvent, ToolCallDelta, Usage
from jdisagg.service.http.bodies import StreamOptions
from jdisagg.service.http.replies import ChatReply, Heading, Json, ReplyChoice, cached_of
from jdisagg.service.http.response_tools import SentTool
from jdisagg.service.http.token_texts import Pieces

_encode = msgspec.json.encode
# Fields of a response unless the request has other values.
_USUAL: Json = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "user")),
    **dict.fromkeys(("previous_response_id", "prompt_cache_key", "safety_identifier")),
    **{"metadata": {}, "parallel_tool_calls": True, "background": False},
    **{"service_tier": "default", "truncation": "disabled"},  # an input is never truncated
}


class ResponseReply(ChatReply):
    whole_object = chunk_object = "response"
    _number = -1

    def __init__(
        self, heading: Heading, streaming: StreamOptions | None, pieces: Pieces, token_ids: bool
    ) -> None:
        super().__init__(heading, streaming, pieces, token_ids)
        self._told = heading.told
        self._keep = heading.keep
        self._sent = heading.sent_tools
        self._items: list[_Item] = []
        self._open = False  # whether the last item is open
        self._held: list[Json] = []  # entries of tokens without text so far

    def begin(self) -> None:
        if self._keep is not None and self._keep.begun is not None:
            begun = self._response([], "in_progress", None, None)
            self._keep.begun(str(begun["id"]), begun)

    def chunk(
        self, choice: ReplyChoice, event: StreamEvent, first: bool, usage: Callable[[], Usage]
    ) -> bytes:
        """Returns the encoded server-sent events for one stream event. The first stream event opens
        the response, and the last closes it."""
        frames: list[bytes] = []
        if first:
            begun = self._response([], "in_progress", None, None)
            frames += [
                self._frame("response.created", response=begun),
                self._frame("response.in_progress", response=begun),
            ]
        ended = event.finish_reason
        # Order: arguments of the open call, then reasoning and content, then the next call.
        for call in event.tool_calls:
            frames += self._call(call) if not call.name else []
        if event.reasoning:
            frames += self._thought(event.reasoning)
        others = event.tool_calls or event.reasoning
        says = self._open_kind is _Kind.MESSAGE and not others
        answered = any(item.kind is not _Kind.REASONING for item in self._items)
        empty = ended is not None and not answered and not event.tool_calls
        tokens = self._held + self._tokens(choice, event)
        self._held = []
        if event.text or says or empty:
            frames += self._message(event.text, tokens)
        elif not event.tool_calls and not event.reasoning:
            self._held = tokens
        for call in event.tool_calls:
            frames += self._call(call) if call.name else []
        if ended is not None:
            cut = ended is FinishReason.LENGTH
            frames += self._close(cut)
            finished = self._finished(cut, usage())
            frames.append(self._frame(f"response.{finished['status']}", response=finished))
        return b"".join(frames)

    def _message(self, text: str, tokens: list[Json]) -> list[bytes]:
        frames: list[bytes] = []
        if self._open_kind is not _Kind.MESSAGE:
            frames += self._begin(_Item(self._item_id("msg"), _Kind.MESSAGE))
            frames.append(self._of_part("response.content_part.added", part=_text_part("", [])))
        self._items[-1].texts.append(text)
        self._items[-1].tokens += tokens
        frames.append(self._of_part("response.output_text.delta", delta=text, logprobs=tokens))
        return frames

    def _thought(self, text: str) -> list[bytes]:
        frames: list[bytes] = []
        if self._open_kind is not _Kind.REASONING:
            frames += self._begin(_Item(self._item_id("rs"), _Kind.REASONING))
            frames.append(self._of_part("response.content_part.added", part=_thought_part("")))
        self._items[-1].texts.append(text)
        frames.append(self._of_part("response.reasoning_text.delta", delta=text))
        return frames

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        frames = self._begin(self._called(call)) if call.name else []
        if call.arguments:
            item = self._items[-1]
            item.texts.append(call.arguments)
            if not item.custom:
                frames.append(
                    self._of_item("response.function_call_arguments.delta", delta=call.arguments)
                )
        return frames

    def _called(self, call: ToolCallDelta, arguments: Sequence[str] = ()) -> "_Item":
        sent = self._sent.get(call.name) or SentTool(call.name)
        item_id = self._item_id("ctc" if sent.custom else "fc")
        return _Item(item_id, _Kind.CALL, call, [*arguments], sent=sent)

    def _begin(self, item: "_Item") -> list[bytes]:
        frames = self._close(False)
        self._items.append(item)
        self._open = True
        return [*frames, self._added("response.output_item.added", item.shown("in_progress"))]

    def _close(self, cut: bool) -> list[bytes]:
        if not self._open:
            return []
        self._open, item = False, self._items[-1]
        match item.kind:
            case _Kind.CALL if item.custom:
                # The input is known once the arguments are complete.
                kind = "response.custom_tool_call_input"
                frames = [self._of_item(f"{kind}.delta", delta=item.input)] if item.input else []
                frames.append(self._of_item(f"{kind}.done", input=item.input))
            case _Kind.CALL:
                done = "response.function_call_arguments.done"
                frames = [self._of_item(done, arguments=item.text)]
            case _Kind.REASONING:
                frames = [
                    self._of_part("response.reasoning_text.done", text=item.text),
                    self._of_part("response.content_part.done", part=_thought_part(item.text)),
                ]
            case _Kind.MESSAGE:
                said = {"text": item.text, "logprobs": item.tokens}
                part = _text_part(item.text, item.tokens)
                frames = [
                    self._of_part("response.output_text.done", **said),
                    self._of_part("response.content_part.done", part=part),
                ]
        return [*frames, self._added("response.output_item.done", item.shown(_ended(cut)))]

    def end(self, usage: Usage) -> bytes:
        """Returns nothing, because the last event already closed the response."""
        return b""

    def whole(self, choices: Sequence[ReplyChoice], usage: Usage) -> bytes:
        choice = choices[0]
        cut = choice.finish_reason == FinishReason.LENGTH.value
        if choice.reasoning:
            self._items.append(_Item(self._item_id("rs"), _Kind.REASONING, None, choice.reasoning))
        if choice.text or not choice.calls:
            tokens = self._tokens(choice, choice.as_event())
            item = _Item(self._item_id("msg"), _Kind.MESSAGE, None, [choice.text], tokens)
            self._items.append(item)
        for call, arguments in choice.calls:
            self._items.append(self._called(call, arguments))
        return _encode(self._finished(cut, usage))

    def _finished(self, cut: bool, usage: Usage) -> Json:
        *others, last = self._items
        output = [*(item.shown(_ended(False)) for item in others), last.shown(_ended(cut))]
        reason: Json | None = {"reason": "max_output_tokens"} if cut else None
        response = self._response(output, _ended(cut), reason, usage)
        if self._keep is not None:
            self._keep.finished(response, output)
        return response

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
            "completed_at": int(time.time()) if status == "completed" else None,
            **_USUAL,
            "model": heading["model"],
            "output": output,
            "store": self._keep is not None,
            "usage": _usage_of(usage) if usage is not None else None,
            **self._told,
        }

    @property
    def _open_kind(self) -> "_Kind | None":
        return self._items[-1].kind if self._open else None

    def _item_id(self, kind: str) -> str:
        number = f"_{len(self._items)}" if self._items else ""
        return f"{kind}_{str(self._heading['id']).removeprefix('resp_')}{number}"

    def _added(self, kind: str, item: Json) -> bytes:
        return self._frame(kind, output_index=len(self._items) - 1, item=item)

    def _of_item(self, kind: str, **said: object) -> bytes:
        place = {"output_index": len(self._items) - 1, "item_id": self._items[-1].id}
        return self._frame(kind, **place, **said)

    def _of_part(self, kind: str, **said: object) -> bytes:
        return self._of_item(kind, content_index=0, **said)

    def _frame(self, kind: str, **said: object) -> bytes:
        self._number += 1
        event = {"type": kind, "sequence_number": self._number, **said}
        return b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n"


class _Kind(enum.Enum):
    REASONING = "reasoning"
    MESSAGE = "message"
    CALL = "function_call"


@dataclass(slots=True)
class _Item:
    id: str
    kind: _Kind
    call: ToolCallDelta | None = None
    texts: list[str] = field(default_factory=list)
    tokens: list[Json] = field(default_factory=list)
    sent: SentTool = SentTool("")

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def custom(self) -> bool:
        return self.sent.custom

    @property
    def input(self) -> str:
        return self.sent.input_of(self.text)

    def shown(self, status: str) -> Json:
        begun = status != "in_progress"
        if self.kind is _Kind.REASONING:
            thoughts = [_thought_part(self.text)] if begun else []
            return {
                "type": "reasoning",
                "id": self.id,
                "status": status,
                "summary": [],
                "content": thoughts,
            }
        if self.call is None:
            return {
                "type": "message",
                "id": self.id,
                "status": status,
                "role": "assistant",
                "content": [_text_part(self.text, self.tokens)] if begun else [],
            }
        given = {"input": self.input if begun else ""} if self.custom else {"arguments": self.text}
        return {
            "type": "custom_tool_call" if self.custom else "function_call",
            "id": self.id,
            "call_id": self.call.id,
            "name": self.sent.name,
            **({"namespace": self.sent.namespace} if self.sent.namespace else {}),
            **given,
            "status": status,
        }


def _ended(cut: bool) -> str:
    return "incomplete" if cut else "completed"


def _text_part(text: str, tokens: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}


def _thought_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _usage_of(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {**cached_of(usage), "cache_write_tokens": usage.created_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
