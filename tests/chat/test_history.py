"""A conversation's history is accepted as clients send it back, which is what a model wrote."""

import json
import tracemalloc

import pytest

from jdisagg.chat.call_arguments import arguments_object
from jdisagg.chat.call_ids import with_ids
from jdisagg.chat.messages import ChatMessage, ToolCall, shown_messages

ARGUMENTS: list[tuple[str, dict[str, object]]] = [
    ("", {}),
    ("null", {}),
    ("{}", {}),
    ("  \n", {}),
    ('{"x": 1}', {"x": 1}),
    # cut off by the length limit
    ('{"x": tr', {}),
    ('{"x', {}),
    ("{", {}),
    ('{"x": 1', {"x": 1}),
    ('{"x": 1, "y', {"x": 1}),
    ('{"x": 1, "y": ', {"x": 1}),
    ('{"x": "Par', {"x": "Par"}),
    ('{"x": "a\\', {"x": "a"}),
    ('{"x": "a\\u00', {"x": "a"}),
    ('{"x": [1, {"y": "z', {"x": [1, {"y": "z"}]}),
    ('{"x": {"y": 1}, "z": [tr', {"x": {"y": 1}, "z": []}),
    # text behind them
    ('{"x": 1} and so on', {"x": 1}),
    ('{"x": 1}}', {"x": 1}),
    ('{"x": 1}\n</tool_call>', {"x": 1}),
    ('{"x": 1}{"y": 2}', {"x": 1}),
    # other forms
    ("{'x': True}", {"x": True}),
    ('"{\\"x\\": 1}"', {"x": 1}),
    ('"null"', {}),
    ('{"x": "a\nb"}', {"x": "a\nb"}),
    ("Paris", {"arguments": "Paris"}),
    ('"Paris"', {"arguments": "Paris"}),
    ("[1, 2]", {"arguments": [1, 2]}),
    ("5", {"arguments": 5}),
    ('{"x": "\\ud800"}', {"x": "?"}),
    ("{]", {}),
]


def test_arguments_of_any_form_become_an_object() -> None:
    made = {text: arguments_object(text) for text, _ in ARGUMENTS}
    assert made == dict(ARGUMENTS)


def test_an_object_may_be_cut_anywhere() -> None:
    text = json.dumps({"a": [1, {"b": 'x"y'}], "c": True, "d": "é\n", "e": -1.5e3})
    for at in range(len(text)):
        found = arguments_object(text[:at])
        assert list(found) == ["a", "c", "d", "e"][: len(found)]
    assert arguments_object(text) == json.loads(text)


@pytest.mark.parametrize(
    "text", ["[" * 9999, '{"a":' * 9999, "{" * 9999, '{"a":[' * 5000, "9" * 9999]
)
def test_arguments_of_any_depth_and_length_do_no_harm(text: str) -> None:
    assert isinstance(arguments_object(text), dict)


def test_a_long_object_that_was_cut_is_not_copied_for_each_member() -> None:
    text = '{"x": "' + "a" * 2_000_000 + '", "y": [' + "1, " * 20
    tracemalloc.start()
    try:
        found = arguments_object(text)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found["y"] == [1] * 20
    assert peak_bytes < 5 * len(text)


def test_a_template_that_requires_ids_gets_them() -> None:
    def history(first: str, second: str, *results: str) -> list[ChatMessage]:
        calls = (ToolCall("f", "{}", first), ToolCall("g", "{}", second))
        return [
            ChatMessage("assistant", "", tool_calls=calls),
            *(ChatMessage("tool", "x", tool_call_id=one) for one in results),
        ]

    for form in ("mistral", "kimi_k2"):
        for given in (history("", "", "", ""), history("call_1", "call_2", "call_1", "call_2")):
            calls, *results = with_ids(given, form)
            ids = [call.id for call in calls.tool_calls]
            assert [result.tool_call_id for result in results] == ids and len(set(ids)) == 2
            assert form != "mistral" or all(len(one) == 9 and one.isalnum() for one in ids)
    (kimi, *_) = with_ids(history("", ""), "kimi_k2")
    assert [call.id for call in kimi.tool_calls] == ["functions.f:0", "functions.g:1"]
    ours = history("abcdefgh1", "abcdefgh2", "abcdefgh2", "abcdefgh1")
    assert with_ids(ours, "mistral") == ours
    assert with_ids(history("", ""), "hermes") == history("", "")


@pytest.mark.parametrize("words", ["", "Let me look."])
@pytest.mark.parametrize("calls", [(), (ToolCall("f", "{}"),)])
def test_a_thought_has_the_names_that_templates_give_it(
    words: str, calls: tuple[ToolCall, ...]
) -> None:
    (shown,) = shown_messages([ChatMessage("assistant", words, tool_calls=calls, reasoning="hm")])
    assert shown["reasoning_content"] == shown["reasoning"] == "hm"
    # gpt-oss's template refuses words and a thought beside calls
    assert ("thinking" in shown) == (not (words and calls))
