"""Every field of the requests of vLLM's and SGLang's OpenAI servers is honoured, refused by name,
or harmless, and each is shown. The fields are in request_fields.json, with the versions that they
are of; `request_fields.py` writes it."""

import dataclasses
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from tests.service.http.request_fields import TABLE
from tests.service.http_doors import HttpDoor, events, http_door

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# Shows every variable that a request may set.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}{{ x or '' }}"
    "{{ reasoning_effort or '' }}"
    "{% if enable_thinking is false %}quiet{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
USUAL: dict[str, dict[str, Any]] = {
    CHATS: {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        "max_tokens": 2,
        "seed": 5,
    },
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2, "seed": 5},
    RESPONSES: {"input": "hi", "max_output_tokens": 2, "seed": 5},
}


@dataclass(frozen=True)
class Honoured:
    """The value changes what the server makes of the request, or the reply. `beside`: Fields that
    must be there for it."""

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """The value gets an error that names the field."""

    value: Any
    status: int = 400


@dataclass(frozen=True)
class Harmless:
    """The value is accepted, and changes no token."""

    value: Any


Verdict = Honoured | Refused | Harmless
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
FLAT_TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
FORCED = {"tool_choice": "required"}
VERDICTS: dict[str, Verdict] = {
    "add_generation_prompt": Honoured(False),
    "allowed_token_ids": Honoured([65, 66]),
    "background": Refused(True),
    "bad_words": Honoured(["x"]),
    "best_of": Refused(3),
    "cache_salt": Honoured("s"),
    "chat_template": Refused("{{ messages }}"),
    "chat_template_kwargs": Honoured({"x": "y"}),
    "continue_final_message": Honoured(True),
    "documents": Honoured([{"text": "facts"}]),
    "ebnf": Honoured('root ::= "a" | "b"'),
    "extra_key": Honoured("k"),
    "frequency_penalty": Honoured(0.5),
    "ignore_eos": Honoured(True),
    "include": Honoured(["message.output_text.logprobs"]),
    "include_stop_str_in_output": Honoured(True),
    "input": Honoured("other"),
    "instructions": Honoured("be brief"),
    "json_schema": Honoured('{"type": "object"}'),
    "logit_bias": Honoured({"65": 5}),
    "logprobs": Honoured(True),
    "max_completion_tokens": Honoured(3),
    "max_output_tokens": Honoured(3),
    "max_tokens": Honoured(3),
    "messages": Honoured([{"role": "user", "content": "other"}]),
    "min_p": Honoured(0.1),
    "min_tokens": Honoured(1),
    "model": Refused("other", 404),
    "n": Honoured(2),
    "no_stop_trim": Honoured(True),
    "parallel_tool_calls": Honoured(False, TOOLS | FORCED),
    "presence_penalty": Honoured(0.5),
    "previous_response_id": Refused("resp_1"),
    "priority": Honoured(3),
    "prompt": Honoured("other"),
    "prompt_logprobs": Honoured(1),
    "reasoning": Honoured({"effort": "low"}),
    "reasoning_effort": Honoured("low"),
    "regex": Honoured("a+"),
    "repetition_penalty": Honoured(1.5),
    "request_id": Honoured("mine"),
    "response_format": Honoured({"type": "json_object"}),
    "return_token_ids": Honoured(True),
    "return_tokens_as_token_ids": Honoured(True, {"logprobs": True}),
    "rid": Honoured("mine"),
    "seed": Honoured(7),
    "skip_special_tokens": Honoured(False),
    "stop": Honoured("x"),
    "stop_token_ids": Honoured([65]),
    "stream": Honoured(True),
    "stream_options": Honoured({"include_usage": True}, {"stream": True}),
    "structured_outputs": Honoured({"regex": "a"}),
    "temperature": Honoured(0.5),
    "text": Honoured({"format": {"type": "json_object"}}),
    "thinking": Honoured({"type": "disabled"}),
    "tool_choice": Honoured("required", TOOLS),
    "tools": Honoured(TOOLS["tools"]),
    "top_k": Honoured(5),
    "top_logprobs": Honoured(2, {"logprobs": True}),
    "top_p": Honoured(0.5),
    # They would change tokens, or promise what the reply does not have.
    "bootstrap_host": Refused("10.0.0.1"),
    "bootstrap_port": Refused(9000),
    "bootstrap_room": Refused(3),
    "custom_logit_processor": Refused("code"),
    "custom_params": Refused({"a": 1}),
    "ec_transfer_params": Refused({"a": 1}),
    "enable_response_messages": Refused(True),
    "include_reasoning": Refused(False),
    "input_ids": Refused([1, 2]),
    "kv_transfer_params": Refused({"do_remote_decode": True}),
    "length_penalty": Refused(0.5),
    "logprob_token_ids": Refused([1]),
    "lora_path": Refused("adapter"),
    "previous_input_messages": Refused([{"role": "user"}]),
    "prompt_embeds": Refused("AAAA"),
    "repetition_detection": Refused({"max_pattern_size": 3}),
    "return_hidden_states": Refused(True),
    "return_routed_experts": Refused(True),
    "return_sampling_mask": Refused(True),
    "sampling_logprobs_mode": Refused("support"),
    "separate_reasoning": Refused(False),
    "session_params": Refused({"id": "s"}),
    "stop_regex": Refused("a+"),
    "stream_reasoning": Refused(False),
    "suffix": Refused("end"),
    "task": Refused("query"),
    "thinking_token_budget": Refused(10),
    "truncate_prompt_tokens": Refused(3),
    "use_beam_search": Refused(True),
    "vllm_xargs": Refused({"a": 1}),
    "watermark": Refused(True),
    "watermarking": Refused(True),
    # Names, hints of placement and batching, and settings of other media.
    "custom_labels": Harmless({"team": "a"}),
    "data_parallel_rank": Harmless(0),
    "disagg_prefill_dp_rank": Harmless(0),
    "images_config": Harmless({}),
    "max_dynamic_patch": Harmless(1),
    "max_tool_calls": Harmless(3),
    "media_io_kwargs": Harmless({}),
    "metadata": Harmless({"a": "b"}),
    "min_dynamic_patch": Harmless(1),
    "mm_payload": Harmless({}),
    "mm_processor_kwargs": Harmless({}),
    "prompt_cache_key": Harmless("k"),
    "routed_dp_rank": Harmless(0),
    "routed_experts_prompt_start": Harmless(0),
    "routed_experts_start_len": Harmless(0),
    "service_tier": Harmless("auto"),
    "session_id": Harmless("s"),
    "spaces_between_special_tokens": Harmless(False),
    "store": Harmless(True),
    "stream_interval": Harmless(4),
    "truncation": Harmless("auto"),
    "truncation_side": Harmless("left"),
    "use_audio_in_video": Harmless(False),
    "user": Harmless("me"),
    "video_config": Harmless({}),
    # Additions to the reply, without which it is complete. A header names what is ignored.
    **{
        f"return_{name}": Harmless(True)
        for name in (
            *("cached_tokens_details", "flat_raw_output_top_logprobs", "meta_info", "mm_kwargs"),
            *("flat_raw_top_logprobs_b64", "input_ids_in_sglext", "output_ids_in_sglext"),
            *("prompt_text", "prompt_token_ids", "spec_tokens_details", "token_offsets"),
        )
    },
}
# Where an endpoint has the field of another meaning or form.
OWN: dict[tuple[str, str], Verdict] = {
    (CHATS, "add_special_tokens"): Refused(True),
    (COMPLETIONS, "add_special_tokens"): Harmless(False),  # of a tokenizer without BOS
    (CHATS, "echo"): Refused(True),
    (COMPLETIONS, "echo"): Honoured(True),
    (COMPLETIONS, "logprobs"): Honoured(2),
    (RESPONSES, "prompt"): Refused({"id": "pmpt_1"}),
    (RESPONSES, "parallel_tool_calls"): Honoured(False, FLAT_TOOLS | FORCED),
    (RESPONSES, "tool_choice"): Honoured("required", FLAT_TOOLS),
    (RESPONSES, "tools"): Honoured(FLAT_TOOLS["tools"]),
    (RESPONSES, "top_logprobs"): Honoured(2),
}
PEERS: dict[str, Any] = json.loads(TABLE.read_text())
FIELDS = sorted({(path, name) for peer in PEERS.values() for path in USUAL for name in peer[path]})


def verdict(path: str, name: str) -> Verdict | None:
    return OWN.get((path, name), VERDICTS.get(name))


async def test_every_field_of_both_servers_has_a_verdict() -> None:
    assert set(PEERS) == {"vllm", "sglang"} and len(FIELDS) > 200
    assert not [one for one in FIELDS if verdict(*one) is None]
    names = {name for _, name in FIELDS}
    assert set(VERDICTS) <= names and {name for _, name in OWN} <= names


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[HttpDoor]:
    async with http_door(template=TEMPLATE) as one:
        yield one


async def made(door: HttpDoor, path: str, asked: dict[str, Any]) -> tuple[Any, Any]:
    """What the path gets to run, and the reply, both without what is drawn anew."""
    answer = await door.ask(path, asked)
    assert answer.status == 200, answer.body
    request = dataclasses.replace(door.path.requests[-1], life=0)
    if "request_id" not in asked and "rid" not in asked:
        request = dataclasses.replace(request, request_id="")
    reply = events(answer.body) if asked.get("stream") else answer.fields
    return request, _undated(json.loads(json.dumps(reply)), request.request_id)


def _undated(reply: Any, name: str) -> Any:
    if isinstance(reply, list):
        return len(reply)
    drawn = ("id", "created", "created_at", "output", "completed_at", "metadata", "user")
    told = ("service_tier", "truncation", "prompt_cache_key", "store", "max_tool_calls")
    return {key: value for key, value in reply.items() if key not in (*drawn, *told)}


@pytest.mark.parametrize(("path", "name"), FIELDS)
async def test_a_field_is_what_its_verdict_says(door: HttpDoor, path: str, name: str) -> None:
    found = verdict(path, name)
    assert found is not None
    if isinstance(found, Refused):
        answer = await door.ask(path, USUAL[path] | {name: found.value})
        assert (answer.status, answer.error["param"]) == (found.status, name), answer.body
        assert name in answer.error["message"]
        return
    usual = USUAL[path] | (found.beside if isinstance(found, Honoured) else {})
    before, after = (
        await made(door, path, usual),
        await made(door, path, usual | {name: found.value}),
    )
    if isinstance(found, Honoured):
        assert before != after
    else:
        assert before == after


OF_OTHERS = {
    "max_new_tokens": 5,
    "n_predict": 5,
    "repeat_penalty": 1.1,
    "typical_p": 0.9,
    "mirostat": 2,
    "xtc_probability": 0.1,
    "dry_multiplier": 0.8,
    "do_sample": False,
    "num_beams": 4,
    "no_repeat_ngram_size": 3,
    "guidance_scale": 2.0,
}


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("path", USUAL)
async def test_what_other_servers_sample_with_is_refused_by_name(
    door: HttpDoor, path: str, name: str
) -> None:
    answer = await door.ask(path, USUAL[path] | {name: OF_OTHERS[name]})
    assert (answer.status, answer.error["param"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"})],
)
async def test_a_field_that_changes_what_is_tokenized_is_refused(
    door: HttpDoor, path: str, fields: dict[str, Any]
) -> None:
    assert (await door.ask(path, fields)).error["param"] in fields


async def test_a_text_gets_no_bos_token_where_the_client_wants_none(
    door: HttpDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, bos = door.frontend.prompts.codec, 7
    plain = codec.encode

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [bos] * add_special_tokens + plain(text)

    monkeypatch.setattr(codec, "encode", encode)
    for wanted, first in (({}, [bos]), ({"add_special_tokens": False}, [])):
        asked = {"prompt": ["a", "b"], "max_tokens": 1} | wanted
        assert (await door.ask(COMPLETIONS, asked)).status == 200
        made = [list(request.prompt_token_ids) for request in door.path.requests[-2:]]
        assert made == [[*first, ord("a")], [*first, ord("b")]]
        counted = await door.ask("/tokenize", {"prompt": "a"} | wanted)
        assert counted.fields["tokens"] == [*first, ord("a")]


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object", "schema": {"type": "object", "required": ["a"]}},
        {"type": "json_schema", "schema": {"type": "object", "required": ["a"]}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": ["a"]}}},
    ],
    ids=str,
)
async def test_a_schema_is_followed_wherever_it_stands(door: HttpDoor, wanted: Any) -> None:
    await made(door, CHATS, USUAL[CHATS] | {"response_format": wanted})
    grammar = door.path.requests[-1].sampling.grammar
    assert grammar is not None and '"required"' in grammar.text


async def test_thinking_is_switched_by_the_fields_of_several_apis(door: HttpDoor) -> None:
    for switch in (
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "enabled"}},
    ):
        request, _ = await made(door, CHATS, USUAL[CHATS] | switch)
        assert b"quiet" in bytes(request.prompt_token_ids)
    request, _ = await made(door, CHATS, USUAL[CHATS] | {"thinking": {"type": "adaptive"}})
    assert b"quiet" not in bytes(request.prompt_token_ids)
