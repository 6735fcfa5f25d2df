"""Prevents text in clients' messages from being tokenized as an image token.

For each image, a chat template writes a special token, which is replaced by the image's tokens. If
a message, a tool result or a document contains the text of this token, it must remain text. If it
became the token, it would count as an image, and the images would be at wrong positions. Before the
template is rendered, such texts are replaced by placeholders that clients cannot guess. In the
rendered prompt, the texts are restored, and the prompt is split within each of them, so that the
tokenizer finds no special token."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value")


class HiddenMarks:
    """Hides the texts of image tokens in the messages of one chat, and restores them in the
    rendered prompt."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._key = secrets.token_hex(8)
        self._any = re.compile("|".join(map(re.escape, self._marks)))
        self._name = re.compile(rf"<{self._key}-(\d+)>")

    def hide(self, value: Value) -> Value:
        return self._hide(value)  # type: ignore[return-value]

    def _hide(self, value: object) -> object:
        if isinstance(value, str):
            return self._any.sub(self._named, value)
        if isinstance(value, Mapping):
            return {self._hide(key): self._hide(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(one) for one in value]
        return value

    def _named(self, found: re.Match[str]) -> str:
        return f"<{self._key}-{self._marks.index(found[0])}>"

    def pieces(self, text: str) -> list[str]:
        """Returns the parts of the prompt, which must be tokenized separately."""
        first, *others = self._name.split(text)
        pieces = [first]
        for number, after in zip(others[::2], others[1::2], strict=True):
            mark = self._marks[int(number)]
            pieces[-1] += mark[0]
            pieces.append(mark[1:] + after)
        return pieces
