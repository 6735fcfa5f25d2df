"""How models write calls, by hand: writers of each form, made from the models' own chat templates,
and what a parser made of a text."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from jdisagg.chat.answer import AnswerDelta, AnswerParser

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


WRITERS = {
    "hermes": [hermes],
    "llama3_json": [llama, llama_tagged],
    "mistral": [mistral, mistral_named],
    "deepseek_v3": [deepseek, deepseek_3_1],
    "kimi_k2": [kimi],
    "glm45": [glm],
    "qwen3_coder": [qwen_coder],
    "seed_oss": [seed],
    "minimax_m2": [minimax],
}
