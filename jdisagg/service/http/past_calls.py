"""The history of tools that other servers ran: items of /v1/responses and blocks of /v1/messages.

The server has no such tools, but a thread may contain their calls and results. Their text is shown
to the model as text of the assistant. What has no text, such as an encrypted summary, is left out.
A header of the reply names the types of both."""

import re

import msgspec

from jdisagg.service.http.fields import ANYTHING, Fields

_PAST = re.compile(
    r"(?!function_|custom_tool_)\w+_(call|output|tool_result|tool_use)|mcp_\w+|program|compaction"
    r"|additional_tools|configuration_update|container_upload|tool_addition|tool_removal|fallback"
)
_ASKED = ("input", "action", "operation", "arguments", "queries", "code")
_TEXTS = ("text", "title", "url", "logs", "stdout", "stderr", "output", "result", "tool_name")
_TEXTS += ("content", "data")
_WITHOUT_TEXT = ("base64", "image", "image_generation_call", "tool_search_output")


def is_past(kind: str) -> bool:
    return _PAST.fullmatch(kind) is not None


def past_text(part: Fields, kind: str) -> str:
    given = {name: part.read(name, ANYTHING) for name in part.names}
    asked = [given.pop(name) for name in _ASKED if given.get(name)]
    shown = [one if isinstance(one, str) else msgspec.json.encode(one).decode() for one in asked]
    shown += _texts(given)
    return "\n".join((f"{kind}:", *shown)) if shown else ""


def _texts(given: object) -> list[str]:
    texts: list[str] = []
    left = [("", given)]  # in reverse order
    while left:
        name, value = left.pop()
        if isinstance(value, str) and value and name in _TEXTS:
            texts.append(value)
        elif isinstance(value, dict) and value.get("type") not in _WITHOUT_TEXT:
            left += [(str(key), one) for key, one in reversed(value.items())]
        elif isinstance(value, list):
            left += [(name, one) for one in reversed(value)]
    return texts
