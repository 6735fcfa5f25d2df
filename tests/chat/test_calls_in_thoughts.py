"""A call that begins before the reasoning was closed ends the reasoning."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jdisagg.chat.answer import AnswerParser
from jdisagg.chat.formats import TOOL_PARSERS, AnswerFormat
from tests.chat.transcripts import FORMS, FRAGMENTS, SCHEMAS, Call, alike, read


def parser(name: str, thinking: bool = True) -> AnswerParser:
    made = AnswerFormat(tools=name, reasoning="qwen3").parser(SCHEMAS, thinking=thinking)
    assert made is not None
    return made


@FORMS
def test_a_call_within_a_thought_ends_it(name: str, write: Callable[[list[Call]], str]) -> None:
    if name == "llama3_json" and write.__name__ == "llama":
        return  # without a tag, only a whole answer is a call
    call = write([("run", {"x": 1})])
    for rest, content in (("", ""), ("\n</think>\n\nDone.", "Done."), (" Done.", "Done.")):
        text = "I should run it.\n" + call + rest
        answer = read(parser(name), [text])
        assert (answer.reasoning, answer.parsed()) == ("I should run it.", [("run", {"x": 1})])
        assert answer.content.strip() == content
        for at in range(len(text)):
            assert read(parser(name), [text[:at], text[at:]]) == answer


@FORMS
def test_a_thought_about_a_call_stays_a_thought(
    name: str, write: Callable[[list[Call]], str]
) -> None:
    thought = "Perhaps " + write([("nope", {"x": 1})]) + " or <tool_call> no"
    call = write([("run", {"x": 1})])
    before = "" if name == "llama3_json" else "So:"
    answer = read(parser(name), thought + "\n</think>\n\n" + before + call)
    assert answer.parsed() == [("run", {"x": 1})]
    assert (answer.reasoning, answer.content) == (thought, before)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(data=st.data(), thinking=st.booleans())
@settings(max_examples=15)
def test_any_thought_is_read_the_same_however_it_is_cut(
    name: str, data: st.DataObject, thinking: bool
) -> None:
    pieces = st.sampled_from([*FRAGMENTS[name], "<think>", "</think>", "\n\n"])
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    alike(lambda: parser(name, thinking), data, text)
