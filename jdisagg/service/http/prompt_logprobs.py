"""Log-probabilities of a prompt in HTTP replies: vLLM's field `prompt_logprobs`, and the prompt's
part of OpenAI's `logprobs` where a completion echoes it.

Both are written token by token as JSON text: as objects of Python's a prompt's would fill
memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from jdisagg.chat.reasoning_count import token_places
from jdisagg.prompt_logprobs import PromptLogprobs, PromptToken

_encode = msgspec.json.encode


@dataclass(slots=True)
class EchoedPrompt:
    """The entries of `logprobs` before those of an answer; `top` is JSON text."""

    tokens: list[str]
    offsets: list[int]
    logprobs: list[float | None]
    top: list[msgspec.Raw]


def field_of(
    prompt: Sequence[int], found: PromptLogprobs, top: int, piece: Callable[[int], str]
) -> msgspec.Raw:
    """As vLLM: null for the first token; then by token id, the token itself first."""

    def entry(token_id: int, logprob: float, rank: int) -> bytes:
        shown = _encode({"logprob": logprob, "rank": rank, "decoded_token": piece(token_id)})
        return b'"%d":%b' % (token_id, shown)

    def token(token_id: int, one: PromptToken) -> bytes:
        likely = [
            entry(other, logprob, rank)
            for rank, (other, logprob) in enumerate(one.top[:top], 1)
            if other != token_id
        ]
        return b"{%b}" % b",".join([entry(token_id, one.logprob, one.rank), *likely])

    entries = [b"null", *(token(*one) for one in zip(prompt[1:], found, strict=True))]
    return msgspec.Raw(b"[%b]" % b",".join(entries))


def echoed(
    prompt: Sequence[int], text: str, found: PromptLogprobs, top: int, piece: Callable[[int], str]
) -> EchoedPrompt:
    """The tokens of a prompt whose text is `text`. An offset is where the token's own text stands;
    of one that has none there (a special one, a part of a character), where the next begins."""
    tokens = [piece(token_id) for token_id in prompt]
    likely = [
        msgspec.Raw(_encode(top_by_text(own, one.logprob, one.top[:top], piece)))
        for own, one in zip(tokens[1:], found, strict=True)
    ]
    return EchoedPrompt(
        tokens,
        [begin for begin, _ in token_places(tokens, text)],
        [None, *(one.logprob for one in found)],
        [msgspec.Raw(b"null"), *likely],
    )


def top_by_text(
    own: str, logprob: float, top: Sequence[tuple[int, float]], piece: Callable[[int], str]
) -> dict[str, float]:
    """As OpenAI: the token itself is among the likely ones, be it likely or not. Where two have one
    text, the likelier one's probability stands."""
    return {own: logprob, **{piece(other): value for other, value in top[::-1]}}
