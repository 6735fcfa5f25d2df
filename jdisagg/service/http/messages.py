"""Reads requests of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

A message is a list of content blocks. Its blocks of text, thinking and tool calls are joined into
one chat message. A tool result becomes a chat message of its own. `message_replies` builds the
reply."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jdisagg.chat.images import ChatImage
from jdisagg.chat.messages import ChatMessage, ChatPrompt, ChatTool, Content, ToolCall, ToolChoice
from jdisagg.errors import InvalidRequestError
from jdisagg.service.http.bodies import MessagesFields, MessagesPrompt, MessagesTool
from jdisagg.service.http.chat import OfferedTools, image_part, template_arguments, without_hosted
from jdisagg.service.http.fields import INTEGER, TEXT, TEXT_OR_JSON, YES, Fields, begins
from jdisagg.service.http.grammar import MESSAGE_OUTPUT, grammar_of_message
from jdisagg.service.http.past_calls import is_past, past_text
from jdisagg.service.http.requests import Asked, asked_from, sampling_options

# Prefixes of the types of hosted tools, which Anthropic's servers run.
_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
_CHOICES = {"auto": ToolChoice.AUTO, "any": ToolChoice.REQUIRED, "none": ToolChoice.NONE}
_KINDS = "text, image, document, search_result, thinking, tool_use or tool_result"


def message_from(fields: Fields) -> Asked:
    """Raises InvalidRequestError, which names the invalid field."""
    own, options = fields.fill(MessagesFields), sampling_options(fields)
    stops = options.get("stop"), own.stop_sequences
    texts = [[one] if isinstance(one, str) else [*one] for one in stops if one is not None]
    options["stop"] = sum(texts, list[str]()) if texts else None
    options["max_tokens"] = own.max_tokens or 1
    options["grammar"] = grammar_of_message(fields) or options.get("grammar")
    asked = asked_from(fields, (message_prompt(fields),), options)
    # With max_tokens 0 the request only fills the prefix cache. One token is generated and omitted.
    told = {"max_tokens": own.max_tokens}
    return replace(asked, answerless=own.max_tokens == 0, told=told, within_context=True)


def message_prompt(fields: Fields) -> ChatPrompt:
    """Reads the chat of a request: messages, tools and template options. If the last message is an
    assistant message with text and without tool calls, the answer continues this message."""
    asked, messages = fields.fill(MessagesPrompt), list[ChatMessage]()
    if system := _text(fields, "system"):
        messages.append(ChatMessage("system", system))
    left_out: list[str] = []
    for one in asked.messages:
        for message in _messages(one, left_out):
            _add(messages, message)
    fields.leave_out(*(f"messages.{kind}" for kind in dict.fromkeys(left_out)))
    last = messages[-1] if messages else None
    goes_on = last is not None and last.role == "assistant" and bool(last.text)
    goes_on = goes_on and last is not None and not last.tool_calls
    _edit(messages, fields.part("context_management"))
    offered, several = _offered(fields, asked.tools)
    fields.part("thinking").ignore("budget_tokens", "display")
    effort = fields.part(MESSAGE_OUTPUT).read("effort", TEXT)
    return ChatPrompt(
        tuple(messages),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        arguments=template_arguments(fields, effort, adaptive=True),
        tools=offered.tools,
        tool_choice=offered.choice,
        parallel_tool_calls=several,
        tool_name=offered.name,
    )


def _edit(messages: list[ChatMessage], management: Fields) -> None:
    for edit in management.parts("edits") or ():
        kind = edit.given("type", TEXT)
        if not kind.startswith("clear_thinking"):
            raise InvalidRequestError(
                f"{edit.path}type={kind[:80]!r} is not supported; shorten the messages yourself"
            )
        left = 1
        if edit.has("keep") and begins(edit.raw("keep"), b"{"):
            left = edit.part("keep").read("value", INTEGER) or len(messages)
        elif edit.read("keep", TEXT) == "all":
            left = len(messages)
        counted = False  # whether the turn that contains the message is already counted
        for at in reversed(range(len(messages))):
            if messages[at].role == "user":
                counted = False
            elif messages[at].reasoning:
                left, counted = left - (not counted), True
                if left < 0:
                    messages[at] = replace(messages[at], reasoning="")


def _add(messages: list[ChatMessage], message: ChatMessage) -> None:
    before = messages[-1] if messages else None
    if before is None or before.role != message.role or message.role == "tool":
        messages.append(message)
        return
    messages[-1] = replace(
        before,
        content=_joined_content(before.content, message.content),
        reasoning=_joined(before.reasoning, message.reasoning),
        tool_calls=before.tool_calls + message.tool_calls,
    )


def _joined(first: str, second: str) -> str:
    return f"{first}\n{second}" if first and second else first or second


def _joined_content(first: Content, second: Content) -> Content:
    if not isinstance(first, tuple) and not isinstance(second, tuple):
        return _joined(first or "", second or "")
    parts: list[str | ChatImage] = []
    for part in (*_parts(first), *_parts(second)):
        if parts and isinstance(part, str) and isinstance(parts[-1], str):
            parts[-1] = _joined(parts[-1], part)
        else:
            parts.append(part)
    return tuple(parts)


def _parts(content: Content) -> tuple[str | ChatImage, ...]:
    return content if isinstance(content, tuple) else (content,) if content else ()


def _messages(message: Fields, left_out: list[str]) -> Iterator[ChatMessage]:
    """Appends the types of blocks that other servers' tools made to `left_out`."""
    role = message.given("role", TEXT)
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(
            f"{message.path}role must be user or assistant, got {role[:64]!r}"
        )
    blocks = _blocks(message, "content")
    if isinstance(blocks, str):
        yield ChatMessage(role, blocks)
        return
    if not blocks:
        yield ChatMessage(role, "")
    for block in blocks:
        if is_past(kind := _kind(block)):
            left_out.append(kind)
            yield ChatMessage(role, past_text(block, kind))
        else:
            yield _message(role, block)


def _message(role: str, block: Fields) -> ChatMessage:
    kind = _kind(block)
    if kind == "text":
        return ChatMessage(role, block.given("text", TEXT))
    if kind == "image" and role == "user":
        return ChatMessage(role, (image_part(block, kind),))
    if kind in _TEXTS_OF and role == "user":
        return ChatMessage(role, _TEXTS_OF[kind](block))
    if kind == "tool_result" and role == "user":
        called = block.read("tool_use_id", TEXT) or ""
        return ChatMessage("tool", _result(block), tool_call_id=called)
    if role == "assistant":
        if kind == "thinking":
            return ChatMessage(role, "", reasoning=block.read("thinking", TEXT) or "")
        if kind == "redacted_thinking":
            return ChatMessage(role, "")
        if kind == "tool_use":
            arguments = block.read("input", TEXT_OR_JSON) or ""
            call = ToolCall(block.given("name", TEXT), arguments, block.read("id", TEXT) or "")
            return ChatMessage(role, "", tool_calls=(call,))
    raise InvalidRequestError(
        f"{block.path}type must be {_KINDS} as the role allows, got {kind[:80]!r} of the role"
        f" {role}; no other type is supported"
    )


def _kind(block: Fields) -> str:
    return block.read("type", TEXT) or "text"


def _document(block: Fields) -> str:
    source = block.part("source")
    kind = source.given("type", TEXT)
    if kind not in ("text", "content"):
        raise InvalidRequestError(
            f"{source.path}type must be text or content, got {kind[:80]!r}; the server reads no"
            " files: send the document's text"
        )
    text = source.given("data", TEXT) if kind == "text" else _text(source, "content")
    return _titled(block, ("title", "context"), text)


def _search_result(block: Fields) -> str:
    return _titled(block, ("title", "source"), _text(block, "content"))


def _titled(block: Fields, names: Sequence[str], text: str) -> str:
    return "\n".join(filter(None, (*(block.read(name, TEXT) for name in names), text)))


# Functions that convert other types of text blocks to the text for the prompt.
_TEXTS_OF: dict[str, Callable[[Fields], str]] = {
    "document": _document,
    "search_result": _search_result,
    "tool_reference": lambda block: block.given("tool_name", TEXT),
}


def _result(block: Fields) -> Content:
    blocks = _blocks(block, "content")
    if isinstance(blocks, str):
        return blocks
    content: Content = ""
    for one in blocks:
        kind = _kind(one)
        text = _TEXTS_OF.get(kind, _block_text)
        part = (image_part(one, kind),) if kind == "image" else text(one)
        content = _joined_content(content, part)
    return content


def _blocks(fields: Fields, name: str) -> str | list[Fields]:
    if fields.has(name) and not begins(fields.raw(name), b"["):
        return fields.given(name, TEXT)
    return fields.parts(name, text_field="text") or []


def _text(fields: Fields, name: str) -> str:
    blocks = _blocks(fields, name)
    if isinstance(blocks, str):
        return blocks
    return "\n".join(map(_block_text, blocks))


def _block_text(block: Fields) -> str:
    kind = _kind(block)
    if kind != "text":
        raise InvalidRequestError(
            f"{block.path}type must be text, got {kind[:80]!r}; no other type is supported here"
        )
    return block.given("text", TEXT)


def _offered(fields: Fields, given: Sequence[Fields]) -> tuple[OfferedTools, bool]:
    tools = tuple(map(_tool, without_hosted(fields, given, _HOSTED)))
    choice = fields.part("tool_choice")
    several = choice.read("disable_parallel_tool_use", YES) is not True
    kind = choice.given("type", TEXT) if choice.names else "auto"
    if kind == "tool":
        name = choice.given("name", TEXT)
        return OfferedTools(tools, ToolChoice.REQUIRED, name), several
    if kind not in _CHOICES:
        raise InvalidRequestError(
            f"tool_choice.type must be {', '.join(_CHOICES)} or tool, got {kind[:80]!r}"
        )
    return OfferedTools(tools, _CHOICES[kind], ""), several


def _tool(tool: Fields) -> ChatTool:
    kind = tool.read("type", TEXT) or "custom"
    if kind != "custom":
        raise InvalidRequestError(
            f"{tool.path}type must be custom, got {kind[:80]!r}; the server runs no tools, and the"
            " model has no schemas of Anthropic's own tools"
        )
    given = tool.fill(MessagesTool)
    return ChatTool(given.name, given.description, given.input_schema, strict=given.strict)
