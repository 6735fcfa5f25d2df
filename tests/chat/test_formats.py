"""The format of calls and reasoning is found in the chat template."""

import pytest

from jdisagg.chat.formats import TOOL_PARSERS, AnswerFormat
from tests.chat.transcripts import WRITERS, Answer, cohere, read

# Formats whose templates have the markers of another format too, or that share a parser.
ALIKE = {"ernie45": "hermes", "minimax": "hunyuan_a13b"}


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_the_format_of_calls_is_found_in_a_template_that_shows_a_call(name: str) -> None:
    for write in WRITERS[name]:
        if write.__name__ == "lfm_json":
            continue
        found = AnswerFormat.of("{{ tools }}" + write([("f", {"x": 1}), ("g", {})])).tools
        assert found == ALIKE.get(name, name)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ tools }}<think></think><tool_call><response></response>", "ernie45", "qwen3"),
        ("{{ tools }}<|tool_list_start|>", "lfm2", None),
        ("{{ tools }}<|channel>thought\n<channel|><|tool_call>call:f{}", "gemma4", "gemma4"),
        (
            "{{ tools }}<|START_THINKING|><|END_THINKING|><|START_ACTION|>",
            *("cohere_command3", "cohere_command3"),
        ),
        # MiniMax M3 writes arguments within tags of their own names, which no parser knows.
        ("{{ tools }}]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=", None, None),
        ("{{ tools }} Write 'Action:' and a list with \"parameters\": ...", None, None),
        ("{{ tools }}", None, None),
        ("<tool_call>", None, None),
    ],
)
def test_the_formats_of_a_template(template: str, tools: str | None, reasoning: str | None) -> None:
    form = AnswerFormat.of(template)
    assert (form.tools, form.reasoning) == (tools, reasoning)


def test_markers_around_content_are_dropped_with_and_without_tools() -> None:
    form = AnswerFormat(tools="cohere_command3", reasoning="cohere_command3")
    thought = "<|START_THINKING|>so<|END_THINKING|>"
    for tools in ({}, {"f": {}}):
        parser = form.parser(tools, thinking=False)
        said = read(parser, thought + "<|START_RESPONSE|>Hi<|END_RESPONSE|>")
        assert said == Answer("Hi", "so")
    parser = form.parser({}, thinking=False)
    call = cohere([("f", {})])
    assert read(parser, call) == Answer(call)
