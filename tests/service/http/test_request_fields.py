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

from tests.service.http.request_fields import TABLE, TEMPLATE
from tests.service.http_doors import CHATS, COMPLETIONS, RESPONSES, HttpDoor, events, http_door

pytestmark = pytest.mark.asyncio(loop_scope="module")

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


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# Values that change what the server makes of a request, or the reply.
HONOURED: dict[str, Any] = {
    **_all("add_generation_prompt skip_special_tokens", False),
    **_all(
        "continue_final_message ignore_eos include_stop_str_in_output logprobs no_stop_trim"
        " return_routed_experts return_token_ids stream",
        True,
    ),
    **_all("frequency_penalty presence_penalty temperature top_p", 0.5),
    **_all("input prompt", "other"),
    **_all("max_completion_tokens max_output_tokens max_tokens priority", 3),
    **_all("min_tokens prompt_logprobs", 1),
    **_all("request_id rid", "mine"),
    "allowed_token_ids": [65, 66],
    "bad_words": ["x"],
    "cache_salt": "s",
    "chat_template_kwargs": {"x": "y"},
    "documents": [{"text": "facts"}],
    "ebnf": 'root ::= "a" | "b"',
    "extra_key": "k",
    "include": ["message.output_text.logprobs"],
    "instructions": "be brief",
    "json_schema": '{"type": "object"}',
    "logit_bias": {"65": 5},
    "messages": [{"role": "user", "content": "other"}],
    "min_p": 0.1,
    "n": 2,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "regex": "a+",
    "repetition_penalty": 1.5,
    "response_format": {"type": "json_object"},
    "seed": 7,
    "stop": "x",
    "stop_token_ids": [65],
    "structured_outputs": {"regex": "a"},
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "disabled"},
    "tools": TOOLS["tools"],
    "top_k": 5,
}
# Values that would change tokens, or promise what the reply does not have.
REFUSED: dict[str, Any] = {
    **_all(
        "background enable_response_messages return_hidden_states return_sampling_mask"
        " use_beam_search watermark watermarking",
        True,
    ),
    **_all("best_of bootstrap_room truncate_prompt_tokens", 3),
    **_all("custom_params ec_transfer_params vllm_xargs", {"a": 1}),
    **_all("include_reasoning separate_reasoning stream_reasoning", False),
    "chat_template": "{{ messages }}",
    "previous_response_id": "resp_1",
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 9000,
    "custom_logit_processor": "code",
    "input_ids": [1, 2],
    "kv_transfer_params": {"do_remote_decode": True},
    "length_penalty": 0.5,
    "logprob_token_ids": [1],
    "lora_path": "adapter",
    "previous_input_messages": [{"role": "user"}],
    "prompt_embeds": "AAAA",
    "repetition_detection": {"max_pattern_size": 3},
    "sampling_logprobs_mode": "support",
    "session_params": {"id": "s"},
    "stop_regex": "a+",
    "suffix": "end",
    "task": "query",
    "thinking_token_budget": 10,
}
# Names, hints of placement and batching, settings of other media, and additions to the reply,
# without which it is complete. A header names what is ignored.
HARMLESS: dict[str, Any] = {
    **_all(
        "data_parallel_rank disagg_prefill_dp_rank routed_dp_rank routed_experts_prompt_start"
        " routed_experts_start_len",
        0,
    ),
    **_all("images_config media_io_kwargs mm_payload mm_processor_kwargs video_config", {}),
    **_all("max_dynamic_patch min_dynamic_patch", 1),
    **_all("service_tier truncation", "auto"),
    **_all("spaces_between_special_tokens use_audio_in_video", False),
    **_all(
        "store return_cached_tokens_details return_flat_raw_output_top_logprobs"
        " return_meta_info return_mm_kwargs return_flat_raw_top_logprobs_b64"
        " return_input_ids_in_sglext return_output_ids_in_sglext return_prompt_text"
        " return_prompt_token_ids return_spec_tokens_details return_token_offsets",
        True,
    ),
    "custom_labels": {"team": "a"},
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "stream_interval": 4,
    "truncation_side": "left",
    "user": "me",
}
VERDICTS: dict[str, Verdict] = {
    **{name: Honoured(value) for name, value in HONOURED.items()},
    **{name: Refused(value) for name, value in REFUSED.items()},
    **{name: Harmless(value) for name, value in HARMLESS.items()},
    "model": Refused("other", 404),
    "parallel_tool_calls": Honoured(False, TOOLS | FORCED),
    "prompt_cache_key": Honoured("k"),
    "return_tokens_as_token_ids": Honoured(True, {"logprobs": True}),
    "session_id": Honoured("s"),
    "stream_options": Honoured({"include_usage": True}, {"stream": True}),
    "tool_choice": Honoured("required", TOOLS),
    "top_logprobs": Honoured(2, {"logprobs": True}),
}
# Where an endpoint has the field of another meaning or form.
OWN: dict[tuple[str, str], Verdict] = {
    (CHATS, "add_special_tokens"): Refused(True),
    (COMPLETIONS, "add_special_tokens"): Harmless(False),  # of a tokenizer without BOS
    (CHATS, "echo"): Refused(True),
    (COMPLETIONS, "echo"): Honoured(True),
    (COMPLETIONS, "logprobs"): Honoured(2),
    (RESPONSES, "prompt"): Refused({"id": "pmpt_1"}),
    (RESPONSES, "return_routed_experts"): Refused(True),
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
    answer = await door.served(path, asked)
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


@pytest.mark.parametrize("path", USUAL)
async def test_a_field_is_what_its_verdict_says(door: HttpDoor, path: str) -> None:
    wrong = []
    for name in [name for of, name in FIELDS if of == path]:
        found = verdict(path, name)
        if isinstance(found, Refused):
            answer = await door.ask(path, USUAL[path] | {name: found.value})
            told = answer.status, answer.error["param"], name in answer.error["message"]
            if told != (found.status, name, True):
                wrong.append((name, answer.body))
            continue
        usual = USUAL[path] | (found.beside if isinstance(found, Honoured) else {})
        before = await made(door, path, usual)
        changed = before != await made(door, path, usual | {name: found.value})
        if changed != isinstance(found, Honoured):
            wrong.append((name, found))
    assert not wrong


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


async def test_what_other_servers_sample_with_is_refused_by_name(door: HttpDoor) -> None:
    for path in USUAL:
        for name, value in OF_OTHERS.items():
            answer = await door.ask(path, USUAL[path] | {name: value})
            assert (answer.status, answer.error["param"]) == (400, name)
    fields = {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}
    assert (await door.ask("/tokenize", fields)).error["param"] == "chat_template"


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
        await door.served(COMPLETIONS, asked)
        made = [list(request.prompt_token_ids) for request in door.path.requests[-2:]]
        assert made == [[*first, ord("a")], [*first, ord("b")]]
        asked |= {"prompt": ["a", ""]}
        assert (await door.ask(COMPLETIONS, asked)).status == (200 if first else 400)
        counted = await door.ask("/tokenize", {"prompt": "a"} | wanted)
        assert counted.fields["tokens"] == [*first, ord("a")]
