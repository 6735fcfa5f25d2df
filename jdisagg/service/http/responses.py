"""Reads requests of /v1/responses.

If the server stores responses (`response_store`), a request may continue an earlier response. If it
does not, fields that refer to an earlier response are refused, and the client must send the whole
conversation with each request. `response_replies` builds the reply."""

from dataclasses import dataclass, field, replace

import msgspec

from jdisagg.chat.images import ChatImage
from jdisagg.chat.messages import MAX_MESSAGES, MAX_TOOLS, ChatMessage, ChatPrompt, ToolCall
from jdisagg.errors import InvalidRequestError
from jdisagg.request import at_most
from jdisagg.service.http.bodies import REFUSED_WITHOUT_STORE, ResponseFields
from jdisagg.service.http.chat import (
    OfferedTools,
    chat_message,
    chosen_tools,
    joined_name,
    parts_of,
    template_arguments,
)
from jdisagg.service.http.errors import HttpRefusal
from jdisagg.service.http.fields import ANYTHING, OBJECT, TEXT, TEXT_OR_JSON, YES, Fields
from jdisagg.service.http.grammar import grammar_of_response
from jdisagg.service.http.past_calls import is_past, past_text
from jdisagg.service.http.requests import Asked, asked_from, most_tokens, sampling_options
from jdisagg.service.http.response_store import Begun, Items, Keep, ResponseStore
from jdisagg.service.http.response_tools import (
    response_tools,
    shown_choice,
    shown_tools,
    text_arguments,
)

LOGPROBS = "message.output_text.logprobs"

_raw_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
# Fields of the request that a response repeats.
_TOLD = (
    *("instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "background"),
    *("metadata", "previous_response_id", "prompt_cache_key", "safety_identifier", "user"),
)
# Objects that a response repeats, with their fields that the request may omit.
_TOLD_PARTS: dict[str, dict[str, object]] = {
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
}


def response_from(
    fields: Fields, store: ResponseStore | None = None, begun: Begun | None = None
) -> Asked:
    """Reads the request body of /v1/responses.

    Args:
        store: The stored responses, or None if the server stores none.
        begun: Callback for a response in the background, called when the request is validated.
            None for other responses.
    """
    if store is None:
        fields.refuse(REFUSED_WITHOUT_STORE)
    own = fields.fill(ResponseFields)
    history = _History([ChatMessage("system", own.instructions)] if own.instructions else [])
    items = _items(fields, own, store, history)
    fields.leave_out(*(f"input.{kind}" for kind in dict.fromkeys(history.left_out)))
    keep = None
    if store is not None and fields.read("store", YES) is not False:
        keep = Keep(store, items, begun)
    elif begun is not None:
        raise InvalidRequestError("background needs a stored response; set store to true")
    options = sampling_options(fields)
    options["grammar"] = grammar_of_response(fields) or options.get("grammar")
    most, top, included = own.max_output_tokens, own.top_logprobs, own.include
    options["max_tokens"] = most_tokens(fields) if most is None else most
    fields.leave_out(*(f"include.{name}" for name in included if name != LOGPROBS))
    if LOGPROBS in included or top is not None:
        options["logprobs"] = top or 0
    tools, sent = response_tools(fields, history.tools)
    offered = chosen_tools(fields, tools, nested=False)
    asked = asked_from(fields, (_chat(fields, own, tuple(history.messages), offered),), options)
    told: dict[str, object] = {name: fields.raw(name) for name in _TOLD if fields.has(name)}
    for name, usual in _TOLD_PARTS.items():
        told[name] = usual | (fields.read(name, OBJECT) or {})
    told |= {"tools": shown_tools(fields), "tool_choice": shown_choice(fields, offered)}
    return replace(asked, told=told, keep=keep, sent_tools=sent)


@dataclass(slots=True)
class _History:
    messages: list[ChatMessage]
    tools: list[Fields] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def _items(
    fields: Fields, own: ResponseFields, store: ResponseStore | None, history: _History
) -> Items:
    earlier: Items = ()
    if store is not None and (previous := own.previous_response_id):
        kept = store.find(previous)
        if kept is None or not kept.items:
            raise HttpRefusal(
                f"previous_response_id={previous[:80]!r} is not a finished response that the server"
                " keeps; send the whole conversation as input",
                400,
                "previous_response_not_found",
            )
        earlier = kept.items
        for raw in earlier:
            _add(history, Fields(OBJECT.decode(raw), "previous_response_id: "))
    given = own.input
    if isinstance(given, str):
        history.messages.append(ChatMessage("user", given))
        said = {"type": "message", "role": "user", "content": given}
        return (*earlier, msgspec.Raw(msgspec.json.encode(said)))
    at_most("input", len(earlier) + len(given), MAX_MESSAGES)
    # Copied, because a view of a part of the body would keep the whole body in memory.
    items = [raw.copy() for raw in _raw_items(fields.raw("input"))]
    for at, one in enumerate(given):
        item = Fields(one, f"input[{at}].")
        if item.read("type", TEXT) == "item_reference" or set(one) == {"id"}:
            items[at] = _referred(item, store, earlier)
            item = Fields(OBJECT.decode(items[at]), item.path)
        _add(history, item)
    return (*earlier, *items)


def _referred(reference: Fields, store: ResponseStore | None, earlier: Items) -> msgspec.Raw:
    name = reference.given("id", TEXT)
    made = name.partition("_")[2]
    for response_id in (made, made.rpartition("_")[0]):
        kept = store and store.find(f"resp_{response_id}")
        earlier = (*earlier, *(kept.items if kept else ()))
    for raw in earlier:
        if Fields(OBJECT.decode(raw)).read("id", ANYTHING) == name:
            return raw
    raise InvalidRequestError(
        f"{reference.path}id={name[:80]!r} is not an item of a response that the server keeps; send"
        " the item itself"
    )


def _chat(
    fields: Fields, own: ResponseFields, messages: tuple[ChatMessage, ...], offered: OfferedTools
) -> ChatPrompt:
    effort = own.reasoning and own.reasoning.read("effort", TEXT)
    return ChatPrompt(
        messages,
        arguments=template_arguments(fields, effort),
        tools=offered.tools,
        tool_choice=offered.choice,
        parallel_tool_calls=own.parallel_tool_calls,
        tool_name=offered.name,
    )


def _add(history: _History, item: Fields) -> None:
    """A tool call is added to an assistant message before it. An assistant message is joined with
    reasoning before it. A system message is joined with a system message before it, because many
    chat templates allow only one."""
    kind, messages = item.read("type", TEXT) or "message", history.messages
    if kind in ("additional_tools", "tool_search_output"):
        history.tools.extend(item.parts("tools", MAX_TOOLS) or ())
    if is_past(kind):
        history.left_out.append(kind)
        if text := past_text(item, kind):
            after = messages and messages[-1].role == "assistant"
            before = messages.pop() if after else ChatMessage("assistant", "")
            joined = "\n".join(filter(None, (before.text, text)))
            messages.append(replace(before, content=joined))
    elif kind == "message":
        message = chat_message(item)
        if message.role == "assistant" and messages and _only_thought(messages[-1]):
            message = replace(message, reasoning=messages.pop().reasoning)
        elif messages and _of_system(message) and _of_system(messages[-1]):
            message = replace(message, content=f"{messages.pop().text}\n\n{message.text}")
        messages.append(message)
    elif kind == "reasoning":
        messages.append(ChatMessage("assistant", "", reasoning=_thoughts(item)))
    elif kind in ("function_call", "custom_tool_call"):
        if not messages or messages[-1].role != "assistant":
            messages.append(ChatMessage("assistant", ""))
        calls = (*messages[-1].tool_calls, _call(item, kind))
        messages[-1] = replace(messages[-1], tool_calls=calls)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = parts_of(item, "output")
        called = item.read("call_id", TEXT) or ""
        messages.append(ChatMessage("tool", output, tool_call_id=called))
    else:
        raise InvalidRequestError(
            f"{item.path}type={kind[:80]!r} is not supported; send messages, reasoning, calls and"
            " results of tools"
        )


def _call(item: Fields, kind: str) -> ToolCall:
    custom = kind == "custom_tool_call"
    name = joined_name(item.read("namespace", TEXT) or "", item.given("name", TEXT))
    given = item.read("input" if custom else "arguments", TEXT_OR_JSON) or ""
    called = item.read("call_id", TEXT) or item.read("id", TEXT) or ""
    return ToolCall(name, text_arguments(given) if custom else given, called)


def _of_system(message: ChatMessage) -> bool:
    content = message.content
    images = isinstance(content, tuple) and any(isinstance(one, ChatImage) for one in content)
    return message.role == "system" and not images


def _only_thought(message: ChatMessage) -> bool:
    return message == ChatMessage("assistant", "", reasoning=message.reasoning)


def _thoughts(item: Fields) -> str:
    for name in ("content", "summary"):
        if parts := item.parts(name):
            return "\n".join(part.given("text", TEXT) for part in parts)
    return ""
