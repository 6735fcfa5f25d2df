"""How models write calls, by hand: writers of each form, made from the models' own chat templates,
and what a parser made of a text."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest

from jdisagg.chat.answer import AnswerDelta, AnswerParser
from jdisagg.chat.formats import TOOL_PARSERS

Call = tuple[str, dict[str, object]]


@dataclass
class Answer:
    """All that a parser gave out."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, delta: AnswerDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.index == len(self.calls):
                assert call.name, "a call begins with its name"
                self.calls.append([call.name, ""])
            else:
                assert not call.name and call.index == len(self.calls) - 1, call
            self.calls[call.index][1] += call.arguments

    def parsed(self) -> list[Call]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(parser: AnswerParser, pieces: Iterable[str]) -> Answer:
    answer = Answer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return answer


def hermes(calls: list[Call]) -> str:
    return "\n".join(
        "<tool_call>\n" + json.dumps({"name": name, "arguments": given}) + "\n</tool_call>"
        for name, given in calls
    )


def llama(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def llama_tagged(calls: list[Call]) -> str:
    return "<|python_tag|>" + llama(calls)


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": given} for n, given in calls])


def mistral_named(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def deepseek(calls: list[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(given)}\n```"
        "<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_3_1(calls: list[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def kimi(calls: list[Call]) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{json.dumps(given)}"
        "<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def glm(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in given.items()
        )
        + "</tool_call>"
        for name, given in calls
    )


def qwen_coder(calls: list[Call], outer: str = "tool_call") -> str:
    return "\n".join(
        f"<{outer}>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in given.items()
        )
        + f"</function>\n</{outer}>"
        for name, given in calls
    )


def seed(calls: list[Call]) -> str:
    return qwen_coder(calls, "seed:tool_call")


def minimax(calls: list[Call]) -> str:
    each = [
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in given.items()
        )
        + "</invoke>\n"
        for name, given in calls
    ]
    return "<minimax:tool_call>\n" + "".join(each) + "</minimax:tool_call>"


def deepseek_3_2(calls: list[Call]) -> str:
    mark = "｜DSML｜"
    each = [
        f'<{mark}invoke name="{name}">\n'
        + "".join(
            f'<{mark}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{_plain(value)}</{mark}parameter>\n"
            for key, value in given.items()
        )
        + f"</{mark}invoke>\n"
        for name, given in calls
    ]
    return f"<{mark}function_calls>\n" + "".join(each) + f"</{mark}function_calls>"


def hunyuan_3(calls: list[Call]) -> str:
    each = [
        f"<tool_call>{name}<tool_sep>\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in given.items()
        )
        + "</tool_call>\n"
        for name, given in calls
    ]
    return "<tool_calls>\n" + "".join(each) + "</tool_calls>"


def _listed(calls: list[Call], name: str = "name", arguments: str = "arguments") -> str:
    return json.dumps([{name: called, arguments: given} for called, given in calls])


def granite(calls: list[Call]) -> str:
    return "<|tool_call|>" + _listed(calls)


def phi(calls: list[Call]) -> str:
    each = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return "".join(f"<|tool_call|>{call}<|/tool_call|>" for call in each)


def phi_listed(calls: list[Call]) -> str:
    return "functools" + _listed(calls)


def nemotron(calls: list[Call]) -> str:
    return f"<TOOLCALL>{_listed(calls)}</TOOLCALL>"


def hunyuan(calls: list[Call]) -> str:
    return f"<tool_calls>{_listed(calls)}</tool_calls>"


def minimax_1(calls: list[Call]) -> str:
    each = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return "<tool_calls>\n" + "\n".join(each) + "\n</tool_calls>"


def cohere(calls: list[Call]) -> str:
    each = [
        json.dumps({"tool_call_id": str(at), "tool_name": name, "parameters": given})
        for at, (name, given) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(each) + "\n]<|END_ACTION|>"


def apertus(calls: list[Call]) -> str:
    listed = json.dumps([{name: given} for name, given in calls])
    return f"<|tools_prefix|>{listed}<|tools_suffix|>"


def _python(calls: list[Call], between: str) -> str:
    return between.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    )


def lfm(calls: list[Call]) -> str:
    return f"<|tool_call_start|>[{_python(calls, ', ')}]<|tool_call_end|>"


def lfm_json(calls: list[Call]) -> str:
    return f"<|tool_call_start|>{_listed(calls)}<|tool_call_end|>"


def olmo(calls: list[Call]) -> str:
    return "<function_calls>\n" + _python(calls, "\n") + "\n</function_calls>"


def _gemma_value(value: object) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            pairs = [f"{_gemma_value(key)}:{_gemma_value(one)}" for key, one in value.items()]
            return "{" + ",".join(pairs) + "}"
        case list():
            return "[" + ",".join(map(_gemma_value, value)) + "]"
    return json.dumps(value)


def gemma(calls: list[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{name}{{"
        + ",".join(f"{key}:{_gemma_value(value)}" for key, value in given.items())
        + "}<tool_call|>"
        for name, given in calls
    )


WRITERS = {
    "apertus": [apertus],
    "cohere_command3": [cohere],
    "hermes": [hermes],
    "llama3_json": [llama, llama_tagged],
    "mistral": [mistral, mistral_named],
    "deepseek_v3": [deepseek, deepseek_3_1],
    "deepseek_v32": [deepseek_3_2],
    "ernie45": [hermes],
    "gemma4": [gemma],
    "granite": [granite],
    "hunyuan_a13b": [hunyuan],
    "hy_v3": [hunyuan_3],
    "kimi_k2": [kimi],
    "glm45": [glm],
    "lfm2": [lfm, lfm_json],
    "minimax": [minimax_1],
    "nemotron_json": [nemotron],
    "olmo3": [olmo],
    "phi4_mini_json": [phi, phi_listed],
    "qwen3_coder": [qwen_coder],
    "seed_oss": [seed],
    "minimax_m2": [minimax],
}


FORMS = pytest.mark.parametrize(
    ("name", "write"),
    [(name, write) for name, writers in WRITERS.items() for write in writers],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)


SCHEMAS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "f-2.x": {"properties": {}},
    "run": {},
}


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


FRAGMENTS = {
    name: sorted(
        {piece for write in writers for piece in re.split(r"(\W)", write([("run", {"x": "y"})]))}
        | {'{"name": "run", "arguments": {', "}}", '"', "\\", "<", "[", "{", "```", "\n", "é"}
        | {write([("run", {"x": 1})]) for write in writers}
        | {
            marker
            for marker in vars(TOOL_PARSERS[name]).values()
            if isinstance(marker, str) and 0 < len(marker) < 40
        }
    )
    for name, writers in WRITERS.items()
}


def parsed(name: str, pieces: Iterable[str]) -> Answer:
    """What the parser of a format makes of a text, with the tools of SCHEMAS."""
    return read(TOOL_PARSERS[name](SCHEMAS), pieces)


def alike(make: Callable[[], AnswerParser], data: st.DataObject, text: str) -> Answer:
    """A text is read the same however it is cut, and what was given out after some text is a
    function of that text."""
    whole = read(make(), [text])
    assert read(make(), cut(data, text)) == whole
    one_by_one, at_once, some, same = make(), make(), Answer(), Answer()
    for character in text:
        some.add(one_by_one.push(character))
    same.add(at_once.push(text))
    assert some == same
    return whole
