"""Separates a model's reasoning from its answer by the markers around the reasoning."""

from dataclasses import dataclass

from jdisagg.chat.answer import AnswerDelta, beginning_held


@dataclass(frozen=True, slots=True)
class Marks:
    begin: str
    end: str

    def open_in(self, text: str) -> bool:
        """Returns whether reasoning begins in `text` and does not end in it."""
        return text.rfind(self.begin) > text.rfind(self.end)


class ReasoningParser:
    """An `AnswerParser` for an answer that may begin with reasoning, followed by content. Line
    breaks around the reasoning are dropped. `begun`: whether the prompt ends within reasoning. If
    not, the answer has reasoning only if it begins with the marker."""

    def __init__(self, marks: Marks, *, begun: bool) -> None:
        self._marks = marks
        self._text = ""
        self._step = self._in_reasoning if begun else self._at_beginning
        self._said = False  # whether any reasoning, or content, was emitted
        self._reasoning = self._content = ""

    @property
    def reasons(self) -> bool:
        return self._step == self._in_reasoning

    @property
    def undecided(self) -> bool:
        return self._step == self._at_beginning

    def push(self, text: str) -> AnswerDelta:
        self._text += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> AnswerDelta:
        if self._step == self._in_reasoning:
            self._reasoning += self._text.rstrip("\n")
        else:
            self._content += self._text
        self._text = ""
        return self._take()

    def _take(self) -> AnswerDelta:
        delta = AnswerDelta(self._content, self._reasoning)
        self._reasoning = self._content = ""
        return delta

    def _at_beginning(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(self._marks.begin):
            self._text = text.removeprefix(self._marks.begin)
            self._step = self._in_reasoning
            return True
        if self._marks.begin.startswith(text):
            return False
        self._said = True
        self._step = self._in_words
        return True

    def _in_reasoning(self) -> bool:
        text, ended, rest = self._text.partition(self._marks.end)
        if not ended:
            text = text[: len(text) - beginning_held(text, self._marks.end)]
            rest = self._text[len(text.rstrip("\n")) :]
        text = text.rstrip("\n")
        shown = text if self._said else text.lstrip("\n")
        self._reasoning += shown
        self._said = self._said or bool(shown)
        self._text = rest
        if ended:
            self._said, self._step = False, self._in_words
        return bool(ended)

    def _in_words(self) -> bool:
        text = self._text if self._said else self._text.lstrip("\n")
        self._said = self._said or bool(text)
        self._content += text
        self._text = ""
        return False
