"""Calls of tools are found in every form that models write them in, however the text is cut, and
what is no call is words."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jdisagg.chat.answer import LONGEST_SPACE
from jdisagg.chat.formats import TOOL_PARSERS
from jdisagg.chat.tagged_calls import TaggedParser
from tests.chat.transcripts import (
    FORMS,
    FRAGMENTS,
    SCHEMAS,
    WRITERS,
    Call,
    alike,
    cut,
    parsed,
    read,
)
from tests.lanes import given_examples

PARSERS = pytest.mark.parametrize("name", TOOL_PARSERS)
# A value that is no string is told from text by its schema, or by being JSON.
WORDS = st.text('ab \n"\\{}[]:,<é漢😀', max_size=12).map(lambda text: f"w{text}w")
SCALARS = WORDS | st.integers(-9, 999) | st.booleans() | st.none()
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(WORDS, SCALARS, max_size=2)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "x"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(SCHEMAS)), ARGUMENTS), min_size=1, max_size=3)


@given_examples(12, 200, data=st.data(), calls=CALLS)
@FORMS
def test_what_a_model_calls_is_found_however_its_text_is_cut(
    name: str, write: Callable[[list[Call]], str], data: st.DataObject, calls: list[Call]
) -> None:
    before = "" if name == "llama3_json" else data.draw(st.sampled_from(["", "Let me see."]))
    calls = [(called, _as_typed(name, called, given)) for called, given in calls]
    text = before + "\n\n" + write(calls) + data.draw(st.sampled_from(["", "\n"]))
    answer = parsed(name, cut(data, text))
    assert answer.parsed() == calls
    assert answer.content == before


def _as_typed(name: str, called: str, given: dict[str, object]) -> dict[str, object]:
    """Between tags all is text: what the schema calls a string is one."""
    if not issubclass(TOOL_PARSERS[name], TaggedParser):
        return given
    return {
        key: str(value) if called == "get_weather" and key == "city" else value
        for key, value in given.items()
    }


@PARSERS
@given(data=st.data())
@settings(max_examples=30)
def test_any_text_is_read_the_same_however_it_is_cut_and_words_are_not_lost(
    name: str, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=12)))
    whole = alike(lambda: TOOL_PARSERS[name](SCHEMAS), data, text)
    assert parsed(name, text) == whole
    assert whole.calls or whole.content == text


@given_examples(12, 200, data=st.data(), calls=CALLS)
@FORMS
def test_a_damaged_call_is_read_as_what_it_still_is(
    name: str, write: Callable[[list[Call]], str], data: st.DataObject, calls: list[Call]
) -> None:
    text = write(calls)
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, len(text)))
        last = min(len(text), first + data.draw(st.integers(0, 6)))
        instead = data.draw(st.sampled_from([*FRAGMENTS[name], text[first:last] * 2, '"\\ud800"']))
        text = text[:first] + instead + text[last:]
    whole = parsed(name, [text])
    assert parsed(name, cut(data, text)) == whole
    assert whole.calls or whole.content == text
    assert str(whole).encode()


def _end_marks(name: str) -> list[str]:
    return [mark for mark in (TOOL_PARSERS[name].END, TOOL_PARSERS[name].SECTION_END) if mark]


def _behind_the_value(text: str, value: str) -> int:
    """The place behind a value, and behind the mark that ends a string."""
    at = text.index(value) + len(value)
    quote = next((mark for mark in ('"', "'", '<|"|>') if text.startswith(mark, at)), "")
    return at + len(quote)


@FORMS
@pytest.mark.parametrize("between", ["", "\n"])
def test_an_end_mark_outside_a_string_ends_the_call(
    name: str, write: Callable[[list[Call]], str], between: str
) -> None:
    first, second = write([("run", {"x": "yes"})]), write([("run", {"y": "no"})])
    if not first.startswith(TOOL_PARSERS[name].SECTION or TOOL_PARSERS[name].CALL):
        return  # without a marker, what follows an end mark is text
    first = first[: _behind_the_value(first, "yes")]
    for mark in _end_marks(name):
        for rest, calls, content in (
            (second, [("run", {"x": "yes"}), ("run", {"y": "no"})], ""),
            ("", [("run", {"x": "yes"})], ""),
            (mark, [("run", {"x": "yes"})], ""),
        ):
            for pieces in ([first + between + mark + rest], first + between + mark + rest):
                answer = parsed(name, pieces)
                assert (answer.parsed(), answer.content) == (calls, content)
    done = read(
        TOOL_PARSERS[name](SCHEMAS), first + "\n" + "".join(_end_marks(name)[:1]) + "\nDone."
    )
    if _end_marks(name):
        assert (done.parsed(), done.content.strip()) == ([("run", {"x": "yes"})], "Done.")


@FORMS
def test_the_marks_of_another_call_end_a_call_in_json(
    name: str, write: Callable[[list[Call]], str]
) -> None:
    if issubclass(TOOL_PARSERS[name], TaggedParser) or write.__name__ == "llama":
        return
    first, second = write([("run", {"x": "yes"})]), write([("run", {"y": "no"})])
    answer = parsed(name, first[: _behind_the_value(first, "yes")] + second)
    assert answer.parsed() == [("run", {"x": "yes"}), ("run", {"y": "no"})]


@FORMS
def test_marks_within_a_string_are_part_of_it(
    name: str, write: Callable[[list[Call]], str]
) -> None:
    for mark in [TOOL_PARSERS[name].CALL, *_end_marks(name)]:
        calls: list[Call] = [("run", {"x": f"The mark {mark} stands here."}), ("run", {"y": 1})]
        answer = parsed(name, write(calls))
        assert (answer.parsed(), answer.content) == (calls, "")


@FORMS
@pytest.mark.parametrize("extra", ["}", "]", ")", "}}", "}]", "}\n"])
def test_brackets_too_many_are_dropped_with_the_marks_behind_them(
    name: str, write: Callable[[list[Call]], str], extra: str
) -> None:
    if issubclass(TOOL_PARSERS[name], TaggedParser):
        return  # has no brackets
    text, more = write([("run", {"x": "yes"})]), write([("run", {"y": 1})])
    start = _behind_the_value(text, "yes")
    for at in [at + 1 for at in range(start, len(text)) if text[at] in "})]"]:
        for rest, calls in ((more, [("run", {"y": 1})]), ("\nDone.", [])):
            answer = parsed(name, text[:at] + extra + text[at:] + rest)
            assert answer.parsed() == [("run", {"x": "yes"}), *calls]
            assert answer.content.strip() == ("" if calls else "Done.")


@given_examples(12, 200, data=st.data(), calls=CALLS)
@FORMS
def test_what_is_a_call_never_holds_a_mark(
    name: str, write: Callable[[list[Call]], str], data: st.DataObject, calls: list[Call]
) -> None:
    """Wherever the model ends its first call: outside strings, if the form has strings."""
    second = write([("run", {"y": "no"})])
    first = write([("run", {"x": 1, "days": [2, {"z": 3}]}), *calls])
    places = [at + 1 for at in range(first.index("1"), len(first)) if first[at] in "0123456789"]
    at = data.draw(st.sampled_from(places[:3]))
    mark = data.draw(st.sampled_from(_end_marks(name) or [TOOL_PARSERS[name].CALL]))
    if write.__name__ == "llama":
        second, mark = "; " + second, ""
    text = first[:at] + "\n" + mark + "\n" + second
    whole = parsed(name, [text])
    assert parsed(name, cut(data, text)) == whole
    (ran, given), last = whole.parsed()
    assert ran == "run" and given["x"] == 1 and "<" not in whole.calls[0][1]
    assert last == ("run", {"y": "no"})


@PARSERS
def test_what_is_held_back_is_bounded(name: str) -> None:
    kind = TOOL_PARSERS[name]
    markers = [getattr(kind, name, "") for name in ("SECTION", "CALL")]
    flood = 2000
    for marker in ["", *filter(None, markers)]:
        for text in (
            marker + " " * flood,
            marker + "x" * flood,
            marker + "\n" * flood,
            marker * 50,
        ):
            parser = kind(SCHEMAS)
            said = "".join(parser.push(character).content for character in text)
            assert len(text) - len(said) < 3 * LONGEST_SPACE + 50
            assert said + parser.finish().content == text


@pytest.mark.parametrize(
    ("value", "types", "argument"),
    [
        # As the model wrote it, where it is JSON.
        ("1.50", None, "1.50"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ('{"b":1, "a":[ ]}', {"type": "object"}, '{"b":1, "a":[ ]}'),
        ("[" * 100_000, {"type": "array"}, '"' + "[" * 100_000 + '"'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ('"\\ud800"', None, '"\\"\\\\ud800\\""'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_between_tags_has_a_type_of_the_schema(
    value: str, types: object, argument: str
) -> None:
    schemas = {"run": {"properties": {"x": types}}}
    for name in ("glm45", "qwen3_coder"):
        text = WRITERS[name][0]([("run", {"x": value})])
        assert read(TOOL_PARSERS[name](schemas), [text]).calls == [["run", f'{{"x": {argument}}}']]


@FORMS
@pytest.mark.parametrize(
    "called", ["functions_run_1", "functions.run:0", "functions::run", "tools/run", "run_12"]
)
def test_a_name_with_a_models_own_words_around_it_is_that_of_the_tool(
    name: str, write: Callable[[list[Call]], str], called: str
) -> None:
    answer = parsed(name, write([(called, {"x": 1})]))
    untagged = name == "llama3_json"
    assert answer.parsed() == [("run", {"x": 1})] and (untagged or not answer.content)


@FORMS
@pytest.mark.parametrize("called", ["call00003", "functions.nope:0", "runs", "run2", "functions."])
def test_a_call_of_no_tool_stays_text(
    name: str, write: Callable[[list[Call]], str], called: str
) -> None:
    text = "Then: " * (name != "llama3_json") + write([(called, {"x": 1})])
    answer = parsed(name, text)
    assert (answer.content, answer.calls) == (text, [])
    more = write([("run", {"x": 1})])
    if name not in ("llama3_json", "mistral"):
        both = parsed(name, text + more)
        assert both.parsed() == [("run", {"x": 1})] and both.content.startswith(text[:10])


@PARSERS
def test_an_answer_without_calls_is_passed_on_at_once(name: str) -> None:
    parser = TOOL_PARSERS[name](SCHEMAS)
    said = [parser.push(piece).content for piece in ("Once", " upon", " a", " time.")]
    assert said == ["Once", " upon", " a", " time."]
    assert parser.finish().content == ""


def _kimi(call: str) -> str:
    marks = ("<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|>")
    return marks[0] + call + marks[1] + "<|tool_calls_section_end|>"


def _deepseek(call: str) -> str:
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        # Arguments before the name, or as a string, or none.
        (
            "hermes",
            '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
            [["f", '{"a": 1}']],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [["f", '{"a": 1}']],
        ),
        ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', [["f", "{}"]]),
        # A marker that was left out.
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [["f", "{}"]]),
        # Cut off by max_tokens.
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [["f", '{"a": "b']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool', [["f", "{}"]]),
        # JSON that is an answer, and no call of a tool that there is.
        ("llama3_json", '{"name": "Bob", "parameters": {}}', []),
        ("llama3_json", '{"name": "run"}', []),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [["f", "{}"]]),
        ("llama3_json", '{"type": "function", "name": "run", "parameters": {}}', [["run", "{}"]]),
        ("mistral", '[TOOL_CALLS]run{"a": 1}', [["run", '{"a": 1}']]),
        ("mistral", '[TOOL_CALLS]run[CALL_ID]abc[ARGS]{"a": 1}', [["run", '{"a": 1}']]),
        ("mistral", "[TOOL_CALLS] none of this", []),
        ("kimi_k2", "<|tool_call_begin|>odd head<|tool_call_end|>", []),
        # A call without arguments, with and without the marks around them.
        ("kimi_k2", _kimi("functions.f:0<|tool_call_argument_begin|>"), [["f", "{}"]]),
        ("kimi_k2", _kimi("functions.f:0<|tool_call_argument_begin|>null"), [["f", "{}"]]),
        ("kimi_k2", _kimi("functions.f:0"), [["f", "{}"]]),
        ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>", [["f", "{}"]]),
        ("deepseek_v3", _deepseek("f<｜tool▁sep｜>"), [["f", "{}"]]),
        ("deepseek_v3", _deepseek("function<｜tool▁sep｜>f"), [["f", "{}"]]),
        ("deepseek_v3", _deepseek("function<｜tool▁sep｜>f\n```json\n```"), [["f", "{}"]]),
        # A bracket that was left out before a code fence, or before the next call.
        (
            "deepseek_v3",
            _deepseek('function<｜tool▁sep｜>f\n```json\n{"a": [1\n```'),
            [["f", '{"a": [1\n]}']],
        ),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": [1; {"name": "f", "parameters": {}}',
            [["f", '{"a": [1]}'], ["f", "{}"]],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [["f", "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "arguments": }</tool_call>', [["f", "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "arguments":</tool_call>', [["f", "{}"]]),
        ("hermes", '<tool_call>{"name": "f"</tool_call>', [["f", "{}"]]),
        ("mistral", "[TOOL_CALLS]f[ARGS]", [["f", "{}"]]),
        ("mistral", "[TOOL_CALLS]f[TOOL_CALLS]f[ARGS]{}", [["f", "{}"], ["f", "{}"]]),
        ("glm45", "<tool_call>\nf\n</tool_call>", [["f", "{}"]]),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>", [["f", "{}"]]),
        ("qwen3_coder", "<tool_call>\n<function=f\n</tool_call>", [["f", "{}"]]),
        ("hy_v3", "<tool_calls><tool_call>f</tool_call></tool_calls>", [["f", "{}"]]),
        ("minimax_m2", '<invoke name="f">\n</minimax:tool_call>', [["f", "{}"]]),
        ("apertus", '<|tools_prefix|>[{"f": null}]<|tools_suffix|>', [["f", "{}"]]),
        ("lfm2", "<|tool_call_start|>[f(), f(<|tool_call_end|>", [["f", "{}"], ["f", "{}"]]),
        ("olmo3", "<function_calls>\nf\n</function_calls>", [["f", "{}"]]),
        ("gemma4", "<|tool_call>call:f<tool_call|>", [["f", "{}"]]),
        # Strings that Python and Gemma 4 write.
        ("olmo3", "<function_calls>\nf(a='it\\'s \\x41\\n')", [["f", '{"a": "it\'s \\u0041\\n"}']]),
        (
            "lfm2",
            "<|tool_call_start|>[f(a='it's', b=[True])]",
            [["f", '{"a": "it\'s", "b": [true]}']],
        ),
        ("olmo3", '<function_calls>\nf(a="""x"y\n""")', [["f", '{"a": "x\\"y\\n"}']]),
        (
            "gemma4",
            '<|tool_call>call:f{a:<|"|>"\\<|"|>,b:{c:d e}}',
            [["f", '{"a": "\\"\\\\", "b": {"c": "d e"}}']],
        ),
        # DeepSeek states which arguments are strings.
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="b" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>',
            [["f", '{"a": "1", "b": 1}']],
        ),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">\nx\n'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>",
            [["f", '{"a": "\\nx\\n"}']],
        ),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> no", []),
        ("glm45", "<tool_call>run</tool_call>", [["run", "{}"]]),
        ("glm45", "<tool_call>run\n<arg_key>a</arg_key><arg_value>NaN", [["run", '{"a": ']]),
        ("qwen3_coder", "<function=run>\n</function>", [["run", "{}"]]),
        ("qwen3_coder", "<tool_call> or not", []),
        # Tags that a model forgot, and quotation marks around names.
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n"
            "</function>\n</tool_call>",
            [["get_weather", '{"city": "Rome", "days": 3}']],
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome\n</tool_call>",
            [["get_weather", '{"city": "Rome"}']],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="days">3\n'
            "</invoke>\n</minimax:tool_call>",
            [["get_weather", '{"days": 3}']],
        ),
        (
            "qwen3_coder",
            '<tool_call>\n<function="get_weather">\n<parameter="city">\n<parameter=x>\n'
            "</parameter>\n</function>\n</tool_call>",
            [["get_weather", '{"city": "<parameter=x>"}']],
        ),
        # Line breaks and tabs that are not escaped.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty\\\nz"}}\n</tool_call>',
            [["f", '{"a": "x\\n\\ty\\\\\\nz"}']],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{\n"a": "x\ny"}', [["f", '{\n"a": "x\\ny"}']]),
        (
            "kimi_k2",
            '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": "x\ny"}<|tool_call_end|>',
            [["f", '{"a": "x\\ny"}']],
        ),
    ],
)
def test_what_models_write_beside_their_form_is_understood_or_words(
    name: str, text: str, calls: list[list[str]]
) -> None:
    answer = read(TOOL_PARSERS[name]({**SCHEMAS, "f": {}}), text)
    assert answer.calls == calls
    assert answer.content == ("" if calls else text)


def test_arguments_come_as_the_model_writes_them() -> None:
    parser = TOOL_PARSERS["hermes"]({})
    pieces = ['<tool_call>{"name": "f", "arg', 'uments": {"text": "Once', " upon a ", 'time"}', "}"]
    deltas = [parser.push(piece).calls for piece in pieces]
    assert [[(call.name, call.arguments) for call in delta] for delta in deltas] == [
        [],
        [("f", '{"text": "Once')],
        [("", " upon a ")],
        [("", 'time"}')],
        [],
    ]
    parser = TOOL_PARSERS["glm45"](SCHEMAS)
    text = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa"
    assert "".join(call.arguments for call in parser.push(text).calls) == '{"city": "Pa'
    assert parser.push("ri").calls[0].arguments == "ri"


def test_a_long_answer_costs_each_character_once() -> None:
    text = "x" * 40_000
    for name, parser in TOOL_PARSERS.items():
        answer = read(parser(SCHEMAS), (text[at : at + 4] for at in range(0, len(text), 4)))
        assert len(answer.content) == len(text), name
    call = '<tool_call>{"name": "f", "arguments": {"x": "' + text + '"}}</tool_call>'
    pieces = (call[at : at + 4] for at in range(0, len(call), 4))
    assert read(TOOL_PARSERS["hermes"]({}), pieces).parsed() == [("f", {"x": text})]
