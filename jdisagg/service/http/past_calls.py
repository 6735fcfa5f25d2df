"""The history of tools that other servers ran: items of /v1/responses and blocks of /v1/messages.

The server has no such tools, but a thread may contain their calls and results. Their text is shown
to the model as text of the assistant. What has no text, such as an encrypted summary, is left out.
A header of the reply names the types of both."""

import msgspec

from jdisagg.service.http.fields import ANYTHING, Fields

# Items and blocks whose names do not end as in `is_past`.
_OTHERS = frozenset(
    (
        *("server_tool_use", "mcp_tool_use", "mcp_list_tools", "mcp_approval_request"),
        *("mcp_approval_response", "additional_tools", "program", "compaction", "fallback"),
        *("configuration_update", "container_upload", "mcp_tool_listing"),
        *("tool_addition", "tool_removal"),
    )
)
_OF_OURS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
_ASKED = ("input", "action", "operation", "arguments", "queries", "code")
_TEXTS = ("text", "title", "url", "logs", "stdout", "stderr", "output", "result", "tool_name")
_OF_FILES = ("base64", "image", "image_generation_call", "computer_screenshot")


def is_past(kind: str) -> bool:
    """Returns whether an item or block is a call, or the result of a call, of a tool that another
    server ran."""
    ends = kind.endswith(("_call", "_output", "_tool_result"))
    return kind in _OTHERS or (ends and kind not in _OF_OURS)


def past_text(part: Fields, kind: str) -> str:
    """Returns the text of an item or block for the prompt, or "" if it has none."""
    found = [f"{kind}:"]
    for name in part.names:
        value = part.read(name, ANYTHING)
        if name in _ASKED and value:
            shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            found.append(shown)
        elif kind not in _OF_FILES and kind != "tool_search_output":
            found += _texts(name, value)
    return "\n".join(found) if len(found) > 1 else ""


def _texts(name: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [value] if value and name in (*_TEXTS, "content", "data") else []
    if isinstance(value, dict):
        if value.get("type") in _OF_FILES:
            return []
        return [text for key, one in value.items() for text in _texts(str(key), one)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(name, one)]
    return []
