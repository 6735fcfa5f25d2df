"""The forms of reasoning of five families of models, as their chat templates write them, in small,
and the texts that end it."""

from dataclasses import dataclass

from jdisagg.chat.formats import AnswerFormat
from jdisagg.request import Grammar, Thought
from tests.fakes.toy_grammars import FIRST, GRAMMARS

_FINAL = "<|start|>assistant<|channel|>final<|message|>"


@dataclass(frozen=True)
class ReasoningForm:
    """`begun`: Whether the template's prompt ends within reasoning. `natural`: How the model itself
    ends its reasoning and begins its answer, and `closing`: how the server does."""

    template: str
    begun: bool
    closing: str
    natural: str

    @property
    def format(self) -> AnswerFormat:
        return AnswerFormat.of(self.template)

    def thought(self, budget: int, begun: bool | None = None) -> Thought:
        """For the toy model, whose tokens are characters, without tools."""
        marks, form = self.format.marks, self.format
        assert marks is not None
        toy = [text.replace("\n", "") for text in form.closings({})]
        closings = tuple(tuple(ord(letter) - FIRST for letter in text) for text in toy)
        begun = self.begun if begun is None else begun
        return Thought(budget, marks.begin, marks.end, closings, begun, form.in_headers)

    def limited(self, budget: int, begun: bool | None = None) -> Grammar:
        GRAMMARS._find(Grammar.of_any_text())  # so that workers need not wait for it
        return Grammar.of_any_text(self.thought(budget, begun))


FORMS = {
    "harmony": ReasoningForm(
        "{{ messages[0].content }}{% if old %}<|channel|>analysis<|message|>{{ old }}<|end|>{%"
        " endif %}<|start|>assistant",
        False,
        "<|end|>" + _FINAL,
        "<|end|>" + _FINAL,
    ),
    "qwen3": ReasoningForm(
        "{% if old %}{{ old.split('</think>')[-1].lstrip('\\n') }}{{ '<think>\\n' + old +"
        " '\\n</think>\\n\\n' }}{% endif %}{{ messages[0].content }}{% if enable_thinking is false"
        " %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
        False,
        "\n</think>\n\n",
        "</think>",
    ),
    "deepseek": ReasoningForm(
        "{{ messages[0].content }}{% if old %}{{ '</think>' + old }}{% endif %}<think>",
        True,
        "</think>",
        "</think>",
    ),
    "glm": ReasoningForm(
        "{% if old %}{{ '\\n<think>' + old + '</think>' }}{% endif %}{{ messages[0].content }}"
        "{% if thinking is false %}\\n<think></think>{% endif %}",
        False,
        "</think>",
        "</think>",
    ),
    "minimax": ReasoningForm(
        "{% if old %}{{ '<think>' ~ '\\n' ~ old ~ '\\n' ~ '</think>' ~ '\\n\\n' }}{% endif %}"
        "{{ messages[0].content }}{{ '<think>' ~ '\\n' }}",
        True,
        "</think>",
        "</think>",
    ),
}
