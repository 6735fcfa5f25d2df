"""Names, bytes and text offsets of the tokens whose log-probabilities a reply lists, so that a
client can match tokens with the text.

The joined bytes of the tokens are the text in UTF-8. If a character consists of several tokens, the
last of them has the character as its text. The others have an empty text at the same offset. A
special token that the text omits has no bytes."""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jdisagg.chat.reasoning_count import token_places

_CHARACTER_BYTES = 4  # at most
_UTF8 = codecs.getincrementaldecoder("utf-8")


class Placed(NamedTuple):
    """A token with its position in the text.

    Attributes:
        given: Bytes that the token adds to the text.
        offset: Number of characters of the text before the token.
    """

    token_id: int
    name: str
    given: bytes
    offset: int


class Pieces:
    """`as_ids`: whether names are "token_id:N", as in vLLM, instead of texts."""

    def __init__(
        self,
        text_of: Callable[[int], str],
        given: Callable[[int], bytes],
        known: dict[int, str],
        as_ids: bool = False,
    ) -> None:
        self.given = given
        self.as_ids = as_ids
        self._text_of = text_of
        self._known = known

    def name(self, token_id: int) -> str:
        """A token that is not valid UTF-8 alone is named by its bytes, as in OpenAI's API, because
        many such tokens decode to the same text."""
        if self.as_ids:
            return f"token_id:{token_id}"
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._named(token_id)
        return text

    def _named(self, token_id: int) -> str:
        given = self.given(token_id)
        try:
            return given.decode() if given else self._text_of(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in given)


class TextOfTokens:
    """Computes the text and the offset of each token of one text. Tokens are added in order, with
    `add`, as they are generated."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decoder = _UTF8("replace")
        self._offset = 0
        self._begun = False

    def follow(self, prompt: Sequence[int], echo: str) -> None:
        """Sets the state to the end of a prompt, whose last character may be incomplete. `echo`:
        text of the prompt if the reply begins with it, else ""."""
        self._decoder.decode(b"".join(map(self._pieces.given, prompt[-_CHARACTER_BYTES:])))
        self._offset = len(echo)

    def whole(self, prompt: Sequence[int], echo: str) -> list[Placed]:
        """Tokens of the answer are added after that."""
        text = b"".join(map(self._pieces.given, prompt))
        # Decoding may drop the first of several spaces.
        dropped = text[:1] == b" " and text[1:] == echo.encode()
        places = self.add(prompt, echo.lstrip(" ") if dropped else echo, last=False)
        if self._offset != len(echo):  # the tokenizer changed the text
            names = list(map(self._pieces.name, prompt))
            places = [
                placed._replace(offset=begin)
                for placed, (begin, _) in zip(places, token_places(names, echo), strict=True)
            ]
            self._offset = len(echo)
        return places

    def add(self, token_ids: Sequence[int], text: str | None, *, last: bool) -> list[Placed]:
        """Adds the next tokens and returns them with their names, bytes and offsets.

        Args:
            text: Text that starts at the first of these tokens, or None if unknown. It shows
                whether decoding has dropped a leading space, which some tokenizers add.
        """
        places: list[Placed] = []
        for at, token_id in enumerate(token_ids, 1):
            given = self._pieces.given(token_id)
            if text and not self._begun and given[:1] == b" " and not text.startswith(" "):
                given = given[1:]
            self._begun = self._begun or bool(given)
            made = self._decoder.decode(given, final=last and at == len(token_ids))
            omitted = not given and self._pieces.name(token_id)
            name = self._pieces.name(token_id) if self._pieces.as_ids else omitted or made
            places.append(Placed(token_id, name, given, self._offset))
            self._offset += len(made)
        return places
