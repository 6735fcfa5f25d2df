"""Computes the bytes that single tokens add to a text. Decoding a single token does not give these
bytes: a character may consist of several tokens, and a token that is decoded alone may lose its
leading space."""

import json
import re
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Function from token ids to the bytes that the tokens add to a text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        parts = _decoder_parts(backend)
        kinds = {part["type"] for part in parts}
        self._letters = _letters() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds
        # Replacements of texts within a token, in the order in which the decoder applies them.
        self._replaced = [pair for part in parts if (pair := _replaced(part)) is not None]
        self._alone = not (self._letters or self._falls_back or self._replaced)
        self._added = backend.get_added_tokens_decoder()

    def __call__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._alone:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        if self._letters is not None:
            known = [self._letters.get(letter) for letter in token]
            return token.encode() if None in known else bytes([one or 0 for one in known])
        if self._falls_back and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _decoder_parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    stated = json.loads(backend.decoder.__getstate__())
    return stated.get("decoders", [stated])


def _replaced(part: dict[str, Any]) -> tuple[str, str] | None:
    if part["type"] == "Metaspace":
        return part["replacement"], " "
    if part["type"] == "Replace" and isinstance(pattern := part["pattern"].get("String"), str):
        return pattern, part["content"]
    return None


def _letters() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + at): byte for at, byte in enumerate(others)},
    }
