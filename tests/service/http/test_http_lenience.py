"""What other servers serve is served: forms of fields, paths and headers that clients send, and
histories that hold what a model wrote."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.service.doors import TEMPLATE
from tests.service.http_doors import (
    CHATS,
    COMPLETIONS,
    HI,
    RESPONSES,
    HttpDoor,
    http_door,
    one_answer,
    request,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
# Shows all that a message may hold.
FULL = (
    "{% for t in tools or [] %}[{{ t.function.name }}{{ t.function.return or '' }}]{% endfor %}"
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant', 'tool', 'system', 'critic'] %}"
    "<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}"
    "|{{ p.text }}|{% endfor %}{% elif m.content is none %}~{% endif %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[HttpDoor]:
    async with http_door(template=FULL) as one:
        yield one


STRICT = FULL.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
)


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_a_late_system_message_is_shown_first_where_the_template_refuses_it(
    role: str,
) -> None:
    turns: Any = [("user", "a"), ("assistant", "b"), (role, "c")]
    said: Any = [{"role": one, "content": text} for one, text in turns]
    bodies: dict[str, Any] = {CHATS: {"messages": said}, RESPONSES: {"input": said}}
    if role == "system":
        bodies["/v1/messages"] = {"messages": said, "max_tokens": 1}
    expected = {STRICT: "<system>c<user>a<assistant>b", FULL: "<user>a<assistant>b<system>c"}
    for template, shown in expected.items():
        async with http_door(template=template) as door:
            for path, body in bodies.items():
                await door.served(path, body)
                prompt = door.shown
                assert prompt == f"{shown}<assistant>", path


async def prompt_of(door: HttpDoor, messages: Any, **more: Any) -> str:
    await door.served(CHATS, {"messages": messages, "max_tokens": 1, **more})
    return door.shown


async def test_odd_values_mean_what_they_mean_elsewhere(door: HttpDoor) -> None:
    async def sampled(**odd: Any) -> Any:
        await door.served(COMPLETIONS, {"prompt": "x", "max_tokens": 2, **odd})
        return door.path.requests[-1].sampling

    assert (await sampled(top_p=0)).temperature == 0
    assert (await sampled(max_tokens=-1)).max_tokens == 256
    assert (await sampled(max_completion_tokens=3)).max_tokens == 3
    assert (await sampled(temperature="0.5")).temperature == 0.5
    assert (await sampled(logprobs=True)).logprobs == 1
    assert (await sampled(seed=-1)).seed != (await sampled(seed=-1)).seed
    assert (await sampled(seed=-7)).seed == (await sampled(seed=-7)).seed
    assert (await sampled(seed=-7)).seed != (await sampled(seed=-8)).seed


ARGUMENTS: list[tuple[Any, str]] = [
    ('{"x": 1}', '{"x": 1}'),
    ('{"x": 1, "y": [2, ', '{"x": 1, "y": [2]}'),  # tests/chat/test_history.py has other texts
    ("", "{}"),
    (None, "{}"),
    ({"x": 1}, '{"x": 1}'),
]


async def test_a_call_in_the_history_is_accepted_however_it_ended(door: HttpDoor) -> None:
    for arguments, shown in ARGUMENTS:
        call = {"function": {"name": "f", "arguments": arguments}}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        said = await prompt_of(door, [*HI, called])
        assert said == f"<user>hi<assistant>~<tool_call>f{shown}</tool_call><assistant>"
        items = [
            HI[0],
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        ]
        await door.served(RESPONSES, {"input": items, "max_output_tokens": 1})
        told = door.shown
        assert f"<tool_call>f{shown}</tool_call><tool>ok" in told


THOUGHT = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
OF_ASSISTANT: list[tuple[dict[str, Any], str]] = [
    ({"content": None, "tool_calls": []}, "~"),
    ({"content": "a", "tool_calls": None}, "a"),
    ({}, "~"),
    ({"content": ""}, ""),
    ({"content": [], "refusal": None}, ""),
    ({"content": None, "refusal": "No."}, "No."),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, "|No.|"),
    ({"content": "a", "reasoning_content": None, "reasoning": "hm"}, "<think>hm</think>a"),
    ({"content": "a", "reasoning": "hm", "reasoning_content": "hm"}, "<think>hm</think>a"),
    ({"content": THOUGHT}, "<think>hm</think>|a|"),
    ({"content": "a", "audio": None, "function_call": None}, "a"),
    ({"content": "a", "annotations": [], "index": 0}, "a"),
    (
        {"content": "a", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        'a<tool_call>f{"x": 1}</tool_call>',
    ),
]
OF_OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"role": "tool", "content": "r", "tool_call_id": None, "name": None}, "<tool>r"),
    ({"role": "tool", "content": [{"type": "text", "text": "r"}]}, "<tool>|r|"),
    ({"role": "function", "name": "f", "content": "r"}, "<tool>r"),
    ({"role": "developer", "content": "s"}, "<system>s"),
    ({"role": "critic", "content": "s"}, "<critic>s"),
    ({"role": "user", "content": ["a", {"text": "b"}]}, "<user>|a||b|"),
    ({"role": "user", "content": "a", "name": "Bob"}, "<user>a"),
]


async def test_a_message_may_have_every_form_that_clients_send(door: HttpDoor) -> None:
    rows = [({"role": "assistant"} | row, f"<assistant>{shown}") for row, shown in OF_ASSISTANT]
    for message, shown in [*rows, *OF_OTHERS]:
        said = await prompt_of(door, [*HI, message])
        assert said == f"<user>hi{shown}<assistant>", message


async def test_a_role_that_the_template_does_not_display_is_refused(door: HttpDoor) -> None:
    messages = [*HI, {"role": "king", "content": "obey"}]
    answer = await door.ask(CHATS, {"messages": messages})
    assert answer.status == 400 and "no message of the role 'king'" in answer.error["message"]


async def test_documents_and_a_tools_result_reach_the_template(door: HttpDoor) -> None:
    documents = [{"title": "t", "text": "facts"}]
    assert (await prompt_of(door, HI, documents=documents)).startswith("(facts)<user>")
    described = {**TOOL, "return": {"type": "string"}}
    asked = {"tools": [{"type": "function", "function": described}]}
    assert (await prompt_of(door, HI, **asked)).startswith("[f{'type': 'string'}]<user>")


CHOICES: list[Any] = ["required", "any", {"type": "any"}, {"type": "required"}]
CHOICES += [{"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}]
CHOICES += [{"function": {"name": "f"}}, {"type": "tool", "name": "f"}]


async def test_a_call_may_be_required_in_every_form(door: HttpDoor) -> None:
    for choice in CHOICES:
        for tool in ({"type": "function", "function": TOOL}, {"type": "function", **TOOL}):
            await prompt_of(door, HI, tools=[tool], tool_choice=choice)
            grammar = door.path.requests[-1].sampling.grammar
            assert grammar is not None and '"const": "f"' in grammar.text, (tool, choice)
    await prompt_of(door, HI, tools=[tool], tool_choice={"type": "auto"})
    assert door.path.requests[-1].sampling.grammar is None


REASONING: list[tuple[dict[str, Any], str]] = [
    ({"reasoning": {"effort": "high"}}, "None high"),
    ({"reasoning": {"enabled": False}}, "False None"),
    ({"reasoning": {"effort": "none"}}, "False none"),
    ({"reasoning": {"enabled": True}, "enable_thinking": False}, "False None"),
    ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "None low"),
    ({"reasoning_effort": "none"}, "False none"),
    ({"enable_thinking": False}, "False None"),
    ({"thinking": {"type": "disabled"}}, "False None"),
    ({"thinking": {"type": "adaptive"}}, "None None"),
    (
        {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "enabled"}},
        "False None",
    ),
]


async def test_reasoning_is_asked_of_the_template() -> None:
    shown = "{{ enable_thinking | default(none) }} {{ reasoning_effort | default(none) }}"
    async with http_door(template=TEMPLATE + shown) as door:
        for asked, told in REASONING:
            assert (await prompt_of(door, HI, **asked)).endswith(f"<assistant>{told}"), asked
        answer = await door.ask(RESPONSES, {"input": "hi", "reasoning": {"effort": "low"}})
        assert answer.status == 200
        assert bytes(door.path.requests[-1].prompt_token_ids).endswith(b"None low")


HEALTH = ("/health", "/health/", "/ping", "/ping/", "/healthz", "/livez", "/readyz", "//health")


async def test_health_has_the_paths_of_others(door: HttpDoor) -> None:
    for path in HEALTH:
        for method in ("GET", "HEAD", "POST"):
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            answer = await door.send(f"{head}content-length: 0\r\n\r\n".encode())
            assert answer.status == 200 and (answer.body == b"") == (method == "HEAD"), path


async def test_slashes_too_many_change_no_path(door: HttpDoor) -> None:
    for path in (COMPLETIONS + "/", "/" + COMPLETIONS, "//v1//completions//"):
        await door.served(path, {"prompt": "x", "max_tokens": 1})
    assert (await door.ask("/v1/models/")).fields["object"] == "list"
    assert (await door.ask("/v1/models/tiny/")).fields["id"] == "tiny"


OFFERS: list[dict[str, str]] = [
    {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEA"},
    {"connection": "upgrade", "upgrade": "websocket"},
]


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket"])
async def test_an_offer_of_another_protocol_is_ignored(
    door: HttpDoor, offer: dict[str, str]
) -> None:
    reader, writer = await door.connect()
    for cut in (0, 4):
        for headers in (offer, {}, offer):
            data = request(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **headers)
            at = data.index(b"\r\n\r\n") + cut
            for piece in (data[:at], data[at:]):
                writer.write(piece)
                await asyncio.sleep(0.01)
            assert (await one_answer(reader)).status == 200
    writer.close()


async def test_json_has_many_names(door: HttpDoor) -> None:
    body = b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}'
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        for more in ({}, {"origin": "http://here"}):
            answer = await door.ask(COMPLETIONS, raw=body, content_type=kind, **more)
            assert answer.status == 200


async def test_what_needs_a_model_of_another_kind_is_refused_by_name(door: HttpDoor) -> None:
    for path in ("/classify", "/v1/moderations"):
        answer = await door.ask(path, {"input": "x", "model": "tiny"})
        assert answer.status == 404
        assert f"{path} is not served: the model generates" in str(answer.body)
