"""Ids of tool calls, in the form that a model's chat template expects."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence

from jdisagg.chat.messages import ChatMessage

CALL_ID_CHARACTERS = 24
MISTRAL_ID_CHARACTERS = 9  # Mistral's templates reject other lengths
MISTRAL, KIMI = "mistral", "kimi_k2"
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def call_id(form: str | None, name: str, number: int, identity: str) -> str:
    """Returns the id of a tool call.

    Args:
        number: Index of the call within the conversation, which Kimi K2's ids contain.
        identity: Text that differs between calls. The ids of other formats are its hash.
    """
    if form == KIMI:
        return f"functions.{name}:{number}"
    drawn = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()
    return (
        drawn[:MISTRAL_ID_CHARACTERS] if form == MISTRAL else f"call_{drawn[:CALL_ID_CHARACTERS]}"
    )


def with_ids(messages: Sequence[ChatMessage], form: str | None) -> Sequence[ChatMessage]:
    """Adds ids to the tool calls of a conversation, for a chat template that requires ids.

    For Mistral, ids in another form are replaced. A tool result without an id gets the id of the
    earliest call without a result. If the template of the format `form` requires no ids, returns
    the messages unchanged."""
    if form not in (MISTRAL, KIMI):
        return messages
    made: list[ChatMessage] = []
    waiting: list[str] = []
    number = 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            waiting.append(_fitting(form, call.id or call_id(form, call.name, number, str(number))))
            calls.append(dataclasses.replace(call, id=waiting[-1]))
            number += 1
        answered = message.tool_call_id and _fitting(form, message.tool_call_id)
        if message.role == "tool":
            answered = answered or (waiting[0] if waiting else "")
            waiting = [one for one in waiting if one != answered]
        made.append(dataclasses.replace(message, tool_calls=tuple(calls), tool_call_id=answered))
    return made


def _fitting(form: str, given: str) -> str:
    if form != MISTRAL or _MISTRAL_ID.fullmatch(given):
        return given
    return call_id(MISTRAL, "", 0, given)
