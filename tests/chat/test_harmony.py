"""Answers of gpt-oss are taken apart by their channels, however the text is cut."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from jdisagg.chat.formats import AnswerFormat
from jdisagg.chat.harmony import HarmonyParser
from tests.chat.transcripts import Answer, Call, alike, cut, read

TOOLS = ("get_weather", "run")


WORDS = st.text('ab \n"\\{}[]:,<|>é漢😀', max_size=10).map(lambda text: f"w{text}w")
CALLS = st.tuples(st.sampled_from(TOOLS), st.dictionaries(st.sampled_from("xy"), WORDS, max_size=2))
PARTS = st.lists(
    st.tuples(st.sampled_from(("analysis", "final", "commentary")), WORDS | CALLS), max_size=5
)
PATIENT = [HealthCheck.too_slow]  # a busy machine is no fault of the examples


def written(parts: list[tuple[str, str | Call]], recipient_first: bool = False) -> str:
    """As gpt-oss writes them behind <|start|>assistant; the last marker ends the answer, and is no
    text."""
    made = []
    for channel, said in parts:
        if isinstance(said, str):
            made.append(f"<|channel|>{channel}<|message|>{said}<|end|>")
        else:
            name, arguments = said
            head = f"<|channel|>{channel} to=functions.{name} <|constrain|>json"
            if recipient_first:
                head = f" to=functions.{name}<|channel|>{channel} json"
            made.append(f"{head}<|message|>{json.dumps(arguments)}<|call|>")
    text = "<|start|>assistant".join(made)
    return text.removesuffix("<|end|>").removesuffix("<|call|>")


@given(data=st.data(), parts=PARTS, first=st.booleans())
@settings(max_examples=60, suppress_health_check=PATIENT)
def test_each_part_is_what_its_channel_and_recipient_say(
    data: st.DataObject, parts: list[tuple[str, str | Call]], first: bool
) -> None:
    answer = read(HarmonyParser(TOOLS), cut(data, written(parts, first)))
    thoughts = [said for channel, said in parts if channel == "analysis" and isinstance(said, str)]
    words = [said for channel, said in parts if channel != "analysis" and isinstance(said, str)]
    assert answer.parsed() == [said for _, said in parts if not isinstance(said, str)]
    assert (answer.reasoning, answer.content) == ("\n".join(thoughts), "\n".join(words))


FRAGMENTS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|cons"),
    *("assistant", "analysis", "final", "commentary", " to=", "functions.", "run", "json", " "),
    *('{"x": 1}', "é", "\n", "<", "|>", "x" * 600, " " * 300),
)


@given(data=st.data(), thinking=st.booleans(), tools=st.sampled_from([TOOLS, ()]))
@settings(max_examples=100, suppress_health_check=PATIENT)
def test_any_text_is_read_the_same_however_it_is_cut(
    data: st.DataObject, thinking: bool, tools: tuple[str, ...]
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14)))
    whole = alike(lambda: HarmonyParser(tools, thinking=thinking), data, text)
    assert tools or not whole.calls


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("Hello.", "Hello.", "", []),
        ("to be or not", "to be or not", "", []),
        ("to=", "to=", "", []),
        ("<|channel|>final<|message|>Hi<|return|>", "Hi", "", []),
        ("<|start|>assistant<|channel|>final<|message|>Hi", "Hi", "", []),
        # cut off by max_tokens
        ("<|channel|>analysis<|message|>so<|end|><|start|>assis", "", "so", []),
        ("<|channel|>commentary to=functions.run <|con", "", "", []),
        ("<|channel|>commentary to=functions.run<|message|>", "", "", [["run", "{}"]]),
        (' to=functions.run<|channel|>commentary json<|message|>{"x', "", "", [["run", '{"x']]),
        # brackets too few or too many, and no arguments
        (
            '<|channel|>commentary to=functions.run<|message|>{"x": [1<|call|>',
            *("", "", [["run", '{"x": [1]}']]),
        ),
        (
            '<|channel|>commentary to=functions.run<|message|>{"x": 1}}<|call|>',
            *("", "", [["run", '{"x": 1}']]),
        ),
        (
            '<|channel|>commentary to=functions.run<|message|>{"x": [1}<|call|>',
            *("", "", [["run", '{"x": [1]}']]),
        ),
        ("<|channel|>commentary to=functions.run<|message|> <|call|>", "", "", [["run", "{}"]]),
        ("<|channel|>commentary to=functions.run<|call|>", "", "", [["run", "{}"]]),
        # an end that was left out
        (
            "<|channel|>analysis<|message|>so<|start|>assistant<|channel|>final<|message|>Hi",
            *("Hi", "so", []),
        ),
        # without the prefix, where there is such a tool
        ("<|channel|>commentary to=run<|message|>{}<|call|>", "", "", [["run", "{}"]]),
        # tools of gpt-oss itself, which it was not given
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "", "1 + 1", []),
        ("<|channel|>commentary to=browser.open<|message|>{}<|call|>", "{}", "", []),
        # a function that the request does not have
        ("<|channel|>commentary to=functions.f<|message|>{}", "{}", "", []),
        ("<|channel|>commentary to=functions.run_1<|message|>{}", "", "", [["run", "{}"]]),
    ],
)
def test_what_gpt_oss_writes_beside_its_form_is_understood_or_words(
    text: str, content: str, reasoning: str, calls: list[list[str]]
) -> None:
    for pieces in ([text], text):
        assert read(HarmonyParser(TOOLS), pieces) == Answer(content, reasoning, calls)


def test_words_thoughts_and_arguments_come_as_the_model_writes_them() -> None:
    parser = HarmonyParser(TOOLS)
    pieces = ("<|channel|>analysis<|message|>Let", " me<|e", "nd|><|start|>assistant<|channel|>")
    assert [parser.push(piece).reasoning for piece in pieces] == ["Let", " me", ""]
    assert [parser.push(piece).content for piece in ("final<|message|>Once", " upon")] == [
        "Once",
        " upon",
    ]
    calls = [
        [(call.name, call.arguments) for call in parser.push(piece).calls]
        for piece in (
            "<|end|><|start|>assistant to=functions.run<|channel|>commentary json",
            '<|message|>{"x":',
            ' "y',
            '"}<|call|>',
        )
    ]
    assert calls == [[], [("run", '{"x":')], [("", ' "y')], [("", '"}')]]


def test_what_is_held_back_is_bounded() -> None:
    for text in ("<|channel|>" + "x" * 3000, "to=" + "x" * 3000, " " * 3000, "<|channel|>" * 300):
        parser = HarmonyParser(TOOLS)
        said = "".join(parser.push(character).content for character in text)
        assert len(text) - len(said) < 900
        said += parser.finish().content
        assert text.startswith(said) and len(text) - len(said) <= 512, "a header, cut off, at most"


def test_reasoning_may_begin_in_the_prompt() -> None:
    form = AnswerFormat.of(None, "none", "openai_gptoss")
    parser = form.parser({}, thinking=True)
    text = "so<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert read(parser, text) == Answer("Hi", "so")


def test_the_form_is_guessed_from_the_markers_of_the_template() -> None:
    template = "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    form = AnswerFormat.of(template)
    assert (form.tools, form.reasoning) == ("openai", "openai_gptoss")
    assert form.takes_apart({}) and isinstance(form.parser({}, thinking=False), HarmonyParser)
    call = "<|channel|>commentary to=functions.run<|message|>{}"
    for named, found in (("auto", [["run", "{}"]]), ("none", [])):
        parser = AnswerFormat.of(template, named).parser({"run": {}}, thinking=False)
        assert parser is not None and read(parser, [call]).calls == found
