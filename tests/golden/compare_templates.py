"""Compares our rendering of chat templates with transformers', over a folder of templates.

    python -m tests.golden.compare_templates FOLDER

Needs transformers (not a dependency). FOLDER holds *.jinja files of published models; none are
committed here. Each conversation is rendered by both; where transformers itself displays none of
the words of a message (the template takes the other form of content), ours is compared with
transformers' rendering of the other form. Exits 1 if any differ."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from jdisagg.errors import InvalidRequestError
from models.chat_template import ChatTemplate

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
        "return": {"type": "string", "description": "One sentence."},
    },
}
_AS_DATA = r"""['"]type['"]\s*:\s*['"]text['"]"""  # parts written as Python or JSON writes a list
SPECIAL: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "additional_special_tokens": ["<one>", "<two>"],
}


def _call(arguments: object, number: int = 1) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"type": "function", "id": f"call0000{number}", "function": function}


def conversations() -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """(name, messages, keyword arguments of rendering)"""
    user, system = ({"role": r, "content": f"{r} words {{e}}"} for r in ("user", "system"))
    answer = {"role": "assistant", "content": "an answer"}
    result = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "sunny"}
    begin = {"add_generation_prompt": True}
    tools = {"add_generation_prompt": True, "tools": [TOOL]}
    yield "user", [user], begin
    yield "system", [system, user], begin
    yield "several turns", [system, user, answer, user], begin
    yield "no generation prompt", [user, answer], {}
    yield "tools", [user], tools
    yield "tools and system", [system, user], tools
    calling = {"role": "assistant", "content": "", "tool_calls": [_call({"city": "Bern"})]}
    yield "call in the history", [user, calling, result], tools
    yield "null content", [user, {**calling, "content": None}, result, answer, user], tools
    yield "words and a call", [user, {**calling, "content": "let me look"}, result], tools
    two = {**calling, "tool_calls": [_call({"city": "Bern"}), _call({"city": "Rome"}, 2)]}
    second = {**result, "tool_call_id": "call00002", "content": "rain"}
    yield "two calls", [user, two, result, second], tools
    thought = {**answer, "reasoning_content": "hm"}
    yield "reasoning", [user, thought, user], begin
    for content in ("e", " spaced out ", "an answer\n"):
        last = {"role": "assistant", "content": content}
        yield f"continued {content!r}", [user, last], {"continue_final_message": True}
    yield (
        "documents",
        [user],
        {**begin, "documents": [{"title": "t", "text": "doc", "contents": "doc"}]},
    )


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if isinstance(each.get("content"), str)
        else dict(each)
        for each in messages
    ]


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """None: transformers or the template raises."""
    options = {"add_generation_prompt": False, "continue_final_message": False, **options}
    documents, tools = options.pop("documents", None), options.pop("tools", None)
    try:
        rendered, _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            documents=documents,
            chat_template=source,
            **options,
            **SPECIAL,
        )
    except Exception:
        return None
    return str(rendered[0])


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    options = {"add_generation_prompt": False, **options}
    if documents := options.pop("documents", None):
        options["arguments"] = {"documents": documents}
    try:
        return ChatTemplate({"default": source}, SPECIAL).render(messages, **options)
    except InvalidRequestError:
        return None


def words(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [each["content"].strip() for each in messages if each["role"] == "user"]


def compare(source: str) -> Iterator[tuple[str, str | None, str | None, bool]]:
    """(conversation, transformers', ours, whether they agree)"""
    for name, messages, options in conversations():
        text, parts = (
            theirs(source, messages, **options),
            theirs(source, in_parts(messages), **options),
        )
        shown = [
            all(word in found for word in words(messages)) and not re.search(_AS_DATA, found)
            for found in (text or "", parts or "")
        ]
        for form, given, expected in (
            ("text", messages, text if shown[0] or not shown[1] else parts),
            ("parts", in_parts(messages), parts if shown[1] or not shown[0] else text),
        ):
            got = ours(source, given, **options)
            yield f"{name}, {form}", expected, got, got == expected


def main() -> None:
    files = sorted(Path(sys.argv[1]).glob("*.jinja"))
    cases = failed = raised = 0
    for file in files:
        wrong = []
        for name, expected, got, equal in compare(file.read_text(encoding="utf-8")):
            cases += 1
            raised += expected is None
            if not equal:
                wrong.append((name, expected, got))
        failed += len(wrong)
        print(f"{file.stem}: {'equal' if not wrong else f'{len(wrong)} differ'}", flush=True)
        if "-v" in sys.argv:
            for name, expected, got in wrong:
                print(json.dumps({"case": name, "transformers": expected, "ours": got}, indent=1))
    print(
        f"{len(files)} templates, {cases} renderings, {failed} differ;"
        f" transformers refuses {raised}"
    )
    sys.exit(bool(failed) or not files)


if __name__ == "__main__":
    main()
