"""Converts a caller's prompt to token ids and checks them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jdisagg.errors import ConfigError, InvalidRequestError
from jdisagg.request import foreign_token

Prompt = str | Sequence[int]


class TextCodec(Protocol):
    """Interface that a tokenizer must implement."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def prompt_tokens(
    prompt: Prompt,
    tokenizer: TextCodec | None,
    vocabulary: int,
    *,
    continues: bool = False,
    name: str = "prompt",
) -> tuple[int, ...]:
    """Returns the token ids of a prompt.

    Args:
        continues: Whether the prompt follows other tokens. If so, the tokenizer adds no start
            token.

    Raises:
        ConfigError: The prompt is text, and there is no tokenizer.
        InvalidRequestError: The prompt is empty or has an invalid token id.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError(
                f"{name} is text and the engine has no tokenizer; give token ids, or build the"
                " engine with a tokenizer"
            )
        # Checked here, because a tokenizer may add a start token, and empty text would then pass as
        # a prompt.
        prompt = tokenizer.encode(prompt, add_special_tokens=not continues) if prompt else ()
    for index, token in enumerate(prompt):
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise InvalidRequestError(
                f"{name}[{index}]={token!r} is not a token id; give text, or a sequence of integers"
            )
    if len(prompt) == 0:
        raise InvalidRequestError(
            f"{name} is empty: at least one token is needed to predict the next; send some text"
        )
    tokens = tuple(int(token) for token in prompt)
    if (at := foreign_token(tokens, vocabulary)) is not None:
        raise InvalidRequestError(
            f"{name}[{at}]={tokens[at]} is not a token id of the model; they are 0 to"
            f" {vocabulary - 1}"
        )
    return tokens
