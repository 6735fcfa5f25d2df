"""Histories that contain what tools of other servers did, in all types that the clients of OpenAI
and Anthropic publish: no later turn is refused, text is shown, and a header names the type."""

import json
import re
import typing
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from jdisagg.config import ServiceConfig
from tests.service.chats import TEMPLATE
from tests.service.http_doors import MESSAGES, RESPONSES, HttpDoor, http_door

pytestmark = pytest.mark.asyncio(loop_scope="module")

IGNORED = "jdisagg-ignored-fields"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[HttpDoor]:
    async with http_door(template=TEMPLATE, service=ServiceConfig(kept_responses_mib=1)) as one:
        yield one


def shown(door: HttpDoor) -> str:
    return door.shown


# Items with the text of each that the prompt has, or "" for an item without text.
ITEMS: list[tuple[dict[str, Any], str]] = [
    ({"type": "file_search_call", "queries": ["q"], "results": [{"text": "R1"}]}, "R1"),
    ({"type": "web_search_call", "action": {"type": "search", "query": "Q2"}}, "Q2"),
    ({"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 3}}, "click"),
    (
        {
            "type": "computer_call_output",
            "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"},
        },
        "",
    ),
    ({"type": "tool_search_call", "arguments": {"query": "Q5"}}, "Q5"),
    ({"type": "tool_search_output", "tools": [TOOL]}, "<tool>"),
    ({"type": "additional_tools", "role": "developer", "tools": [TOOL]}, "<tool>"),
    ({"type": "configuration_update", "reasoning": {"effort": "low"}}, ""),
    ({"type": "compaction", "encrypted_content": "AAAA"}, ""),
    ({"type": "image_generation_call", "result": "AAAA", "status": "completed"}, ""),
    (
        {"type": "code_interpreter_call", "code": "C9", "outputs": [{"type": "logs", "logs": "L"}]},
        "C9\nL",
    ),
    ({"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}}, '["ls"]'),
    ({"type": "local_shell_call_output", "output": "O11"}, "O11"),
    ({"type": "shell_call", "action": {"commands": ["pwd"]}}, "pwd"),
    ({"type": "shell_call_output", "output": [{"stdout": "O13", "stderr": ""}]}, "O13"),
    ({"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "P14"}}, "P14"),
    ({"type": "apply_patch_call_output", "output": "O15", "status": "completed"}, "O15"),
    ({"type": "mcp_list_tools", "server_label": "s", "tools": []}, ""),
    ({"type": "mcp_approval_request", "name": "n", "arguments": '{"a":17}'}, '{"a":17}'),
    ({"type": "mcp_approval_response", "approval_request_id": "r", "approve": True}, ""),
    ({"type": "mcp_call", "name": "n", "arguments": "{}", "output": "O19"}, "O19"),
    ({"type": "program", "code": "C20", "call_id": "c", "fingerprint": "x"}, "C20"),
    ({"type": "program_output", "call_id": "c", "result": "R21"}, "R21"),
]
# These are used as they are, or refused.
USED = {
    *("message", "reasoning", "function_call", "function_call_output", "item_reference"),
    *("custom_tool_call", "custom_tool_call_output", "compaction_trigger"),
}


@pytest.mark.parametrize(("item", "text"), ITEMS, ids=[item["type"] for item, _ in ITEMS])
async def test_an_item_of_another_servers_tool_is_history(
    door: HttpDoor, item: dict[str, Any], text: str
) -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c1"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    past = {"id": "x_1", **item}
    said = {"role": "user", "content": "go on"}
    answer = await door.served(
        RESPONSES, {"input": [{"role": "user", "content": "a"}, past, call, result, said]}
    )
    assert answer.headers[IGNORED] == f"input.{item['type']}"
    assert text in shown(door) and "AAAA" not in shown(door)
    assert f"{item['type']}:" in shown(door) or text in ("", "<tool>")
    again = {"input": "more", "previous_response_id": answer.fields["id"]}
    await door.served(RESPONSES, again)
    assert text in shown(door)


async def test_the_text_of_a_deeply_nested_item_is_found(door: HttpDoor) -> None:
    for depth in (10, 600):
        output: Any = "O22"
        for _ in range(depth):
            output = [output]
        await door.served(RESPONSES, {"input": [{"type": "mcp_call", "output": output}]})
        assert "O22" in shown(door)


async def test_every_published_type_of_item_is_known() -> None:
    published = [
        str(one.__annotations__["type"]) for one in typing.get_args(ResponseInputItemParam)
    ]
    types = {re.findall(r"Literal\[\W*(\w+)", one)[0] for one in published}
    assert {"message", "web_search_call"} <= types <= USED | {one["type"] for one, _ in ITEMS}


async def test_an_unknown_type_and_a_request_to_compact_are_refused_by_name(door: HttpDoor) -> None:
    for kind in ("compaction_trigger", "thing"):
        answer = await door.ask(RESPONSES, {"input": [{"type": kind}]})
        assert answer.status == 400 and f"input[0].type='{kind}'" in answer.error["message"]


async def test_a_reference_to_a_kept_item_is_this_item(door: HttpDoor) -> None:
    first = await door.ask(RESPONSES, {"input": "a", "max_output_tokens": 3})
    (item,) = first.fields["output"]
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        said = [{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}]
        await door.served(RESPONSES, {"input": said})
        assert item["content"][0]["text"] in shown(door)
    unknown = [{"type": "item_reference", "id": "msg_unknown"}]
    answer = await door.ask(RESPONSES, {"input": unknown})
    assert answer.status == 400 and "input[0].id='msg_unknown'" in answer.error["message"]


USE: Any = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "Q"}}
BLOCKS: list[tuple[dict[str, Any], str]] = [
    (USE, '{"query":"Q"}'),
    ({"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {"a": 1}}, ":1"),
    (
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "T"}]},
        "T",
    ),
    ({"type": "mcp_tool_result", "tool_use_id": "m", "content": "T"}, "T"),
    (
        {
            "type": "web_search_tool_result",
            "content": [
                {"type": "web_search_result", "title": "T", "url": "U", "encrypted_content": "AAAA"}
            ],
        },
        "T\nU",
    ),
    ({"type": "web_search_tool_result", "content": {"error_code": "unavailable"}}, ""),
    (
        {
            "type": "web_fetch_tool_result",
            "content": {
                "type": "web_fetch_result",
                "url": "U",
                "content": {"type": "document", "source": {"type": "text", "data": "D"}},
            },
        },
        "U\nD",
    ),
    (
        {
            "type": "web_fetch_tool_result",
            "content": {"content": {"source": {"type": "base64", "data": "AAAA"}}, "url": "U"},
        },
        "U",
    ),
    ({"type": "code_execution_tool_result", "content": {"stdout": "O", "stderr": "E"}}, "O\nE"),
    ({"type": "bash_code_execution_tool_result", "content": {"stdout": "O", "content": []}}, "O"),
    ({"type": "text_editor_code_execution_tool_result", "content": {"content": "X"}}, "X"),
    (
        {
            "type": "tool_search_tool_result",
            "content": {"tool_references": [{"type": "tool_reference", "tool_name": "N"}]},
        },
        "N",
    ),
    ({"type": "advisor_tool_result", "content": {"type": "advisor_result", "text": "A"}}, "A"),
    ({"type": "container_upload", "file_id": "file_1"}, ""),
    ({"type": "compaction", "content": "what was said", "encrypted_content": "AAAA"}, "was said"),
    ({"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []}, ""),
    ({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, ""),
]


@pytest.mark.parametrize(("block", "text"), BLOCKS, ids=lambda one: str(one)[:40])
async def test_a_block_of_another_servers_tool_is_history(
    door: HttpDoor, block: dict[str, Any], text: str
) -> None:
    spoken = [block, {"type": "text", "text": "so"}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": spoken},
        {"role": "user", "content": "b"},
    ]
    answer = await door.served(MESSAGES, {"messages": messages, "max_tokens": 1})
    assert answer.headers[IGNORED] == f"messages.{block['type']}"
    assert text in shown(door) and "AAAA" not in shown(door), json.dumps(shown(door))
    assert "so" in shown(door)
