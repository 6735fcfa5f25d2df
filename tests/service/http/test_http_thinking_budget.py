"""The number of reasoning tokens of an answer is limited under the names of several APIs, over HTTP
and gRPC, in the form of the model's template."""

import json
from typing import Any

import pytest

from jdisagg.client import AsyncClient
from jdisagg.errors import InvalidRequestError
from jdisagg.request import Thought
from tests.chat.reasoning_forms import FORMS, ReasoningForm
from tests.service.chats import WEATHER
from tests.service.http_doors import CHATS, COMPLETIONS, MESSAGES, RESPONSES, USUAL, http_door

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

NAMES: list[tuple[str, dict[str, Any]]] = [
    *((path, {"thinking_token_budget": 17}) for path in USUAL),
    *((path, {"thinking_budget": 17}) for path in USUAL),
    (CHATS, {"thinking_budget": "17", "thinking": True}),
    (CHATS, {"thinking_budget_tokens": 17}),
    (CHATS, {"reasoning_budget": 17}),
    (CHATS, {"reasoning": {"max_tokens": 17}}),
    (CHATS, {"thinking": {"type": "enabled", "budget_tokens": 17}}),
    (CHATS, {"chat_template_kwargs": {"thinking_budget": 17}}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 17}}),
    (RESPONSES, {"reasoning": {"max_tokens": 17}}),
]
WITHOUT: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"thinking_budget": -1}),
    (CHATS, {"thinking_token_budget": None}),
    (MESSAGES, {"thinking": {"type": "disabled", "budget_tokens": 17}}),
    (MESSAGES, {"thinking": {"type": "adaptive"}}),
]


def bytes_of(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@pytest.mark.parametrize("name", FORMS)
async def test_a_budget_arrives_under_all_its_names(name: str) -> None:
    form = FORMS[name]
    marks = form.format.marks
    assert marks is not None
    async with http_door(template=form.template) as door:
        for path, more in NAMES:
            answer = await door.served(path, USUAL[path] | more)
            assert "jdisagg-ignored-fields" not in answer.headers, more
            grammar = door.path.requests[-1].sampling.grammar
            begun, parts = form.begun and path != COMPLETIONS, name == "harmony"
            closing = (bytes_of(form.closing),)
            thought = Thought(17, marks.begin, marks.end, closing, begun, parts)
            assert grammar is not None and grammar.free and grammar.thought == thought, more
        for path, more in WITHOUT:
            await door.served(path, USUAL[path] | more)
            assert door.path.requests[-1].sampling.grammar is None, more


async def test_a_prompt_that_is_no_chat_may_end_within_reasoning() -> None:
    async with http_door(template=FORMS["qwen3"].template) as door:
        for prompt, begun in (("a<think>b", True), ("a<think>b</think>c", False), ("a", False)):
            fields = {"prompt": prompt, "max_tokens": 2, "thinking_budget": 5}
            await door.served(COMPLETIONS, fields)
            grammar = door.path.requests[-1].sampling.grammar
            assert grammar is not None and grammar.thought is not None
            assert grammar.thought.begun == begun


@pytest.mark.parametrize("name", FORMS)
async def test_a_grammar_binds_the_content_and_a_budget_the_reasoning(name: str) -> None:
    form: ReasoningForm = FORMS[name]
    marks = form.format.marks
    assert marks is not None
    async with http_door(template=form.template) as door:
        more = {"thinking_budget": 4, "response_format": FORMAT}
        await door.served(CHATS, USUAL[CHATS] | more)
        request = door.path.requests[-1]
        grammar = request.sampling.grammar
        assert grammar is not None and grammar.thought is not None and not grammar.free
        compiler = door.frontend._grammars
        assert compiler is not None
        said = "" if form.begun else marks.begin
        matcher = compiler.matcher(grammar, request.sampling, request.stop_ids, bytes_of(said))
        matcher.consume(bytes_of("hm, "))
        closing = form.closing.encode()
        assert bytes(matcher.forced(len(closing), 256)) == closing
        rest = bytes(matcher.forced(100, 256))
        matcher.consume(b'{"a":1}'[len(rest) :])
        assert b'{"a":1}'.startswith(rest) and matcher.error == ""


async def test_with_tools_the_first_end_of_reasoning_leaves_the_next_header_open() -> None:
    async with http_door(template="{{ tools }}" + FORMS["harmony"].template) as door:
        await door.served(CHATS, USUAL[CHATS] | {"thinking_budget": 4, "tools": [WEATHER]})
        grammar = door.path.requests[-1].sampling.grammar
        assert grammar is not None and grammar.thought is not None
        closing = FORMS["harmony"].closing
        assert grammar.thought.closings == (
            bytes_of("<|end|><|start|>assistant"),
            bytes_of(closing),
        )
        forced = {"thinking_budget": 4, "tools": [WEATHER], "tool_choice": "required"}
        await door.served(CHATS, USUAL[CHATS] | forced)
        grammar = door.path.requests[-1].sampling.grammar
        assert grammar is not None and grammar.thought is None, "a forced call has no reasoning"


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHATS, {"thinking_budget": 64}, "thinking_budget", "thinking_budget=64 is not supported"),
    (CHATS, {"thinking_token_budget": 64}, "thinking_token_budget", "no reasoning"),
    (CHATS, {"reasoning": {"max_tokens": 64}}, "reasoning", "reasoning.max_tokens=64 is not"),
    (COMPLETIONS, {"thinking_budget": 64}, "thinking_budget", "is not supported"),
    (RESPONSES, {"reasoning": {"max_tokens": 64}}, "reasoning", "reasoning.max_tokens=64 is not"),
    (
        CHATS,
        {"thinking": {"type": "enabled", "budget_tokens": 64}},
        "thinking",
        "thinking.budget_tokens=64 is not supported",
    ),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"thinking_budget": -2}, "thinking_budget must be in [0, 2147483647], got -2"),
    ({"thinking_budget": "many"}, "thinking_budget must be an integer"),
    ({"reasoning": {"max_tokens": 2**40}}, "reasoning.max_tokens must be in"),
    ({"thinking_budget": 5, "ebnf": 'root ::= "a"'}, "cannot be used with this grammar"),
    ({"thinking_budget": 5, "allowed_token_ids": [65]}, "cannot be used with allowed_token_ids"),
]


async def test_a_model_without_reasoning_refuses_a_budget_by_its_name() -> None:
    async with http_door() as door:
        for path, more, param, words in REFUSED:
            answer = await door.ask(path, USUAL[path] | more)
            assert (answer.status, answer.error["param"]) == (400, param)
            assert words in answer.error["message"]
        message = await door.ask(
            MESSAGES, USUAL[MESSAGES] | {"thinking": {"type": "enabled", "budget_tokens": 64}}
        )
        assert message.status == 400
        assert (
            "thinking.budget_tokens=64 is not supported"
            in json.loads(message.body)["error"]["message"]
        )
        async with AsyncClient(door.target) as client:
            with pytest.raises(InvalidRequestError, match="thinking_budget=3 is not"):
                await client.complete("a", thinking_budget=3)


async def test_a_wrong_budget_is_refused() -> None:
    async with http_door(template=FORMS["qwen3"].template) as door:
        for more, words in WRONG:
            answer = await door.ask(CHATS, USUAL[CHATS] | more)
            assert answer.status == 400 and words in answer.error["message"], answer.body
        async with AsyncClient(door.target) as client:
            await client.complete(messages=[{"role": "user", "content": "a"}], thinking_budget=0)
            grammar = door.path.requests[-1].sampling.grammar
            assert grammar is not None and grammar.thought is not None
            assert grammar.thought.budget == 0
