"""Sampling options of a request, and their conversion to `SamplingParams`.

Forced tool calls, allowed tokens and bad words are converted to a grammar, so that workers need to
implement only grammars."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jdisagg.chat.forced_calls import forced_calls
from jdisagg.chat.messages import ChatPrompt
from jdisagg.errors import InvalidRequestError
from jdisagg.prompt.logprobs import MAX_PROMPT_LOGPROBS
from jdisagg.request import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_SEED,
    Biases,
    Grammar,
    GrammarKind,
    SamplingDefaults,
    SamplingOptions,
    SamplingParams,
    at_most,
    parameters_of,
)

DEFAULT_MAX_TOKENS = 256
MAX_BAD_WORD_BYTES = 128

_RESTRICTIONS = parameters_of(SamplingOptions)


def restricted(
    prompt: ChatPrompt | None, options: SamplingOptions, eos_ids: Sequence[int]
) -> tuple[SamplingOptions, str]:
    """Converts forced tool calls, allowed tokens and bad words to a grammar.

    A forced tool call replaces the request's own grammar, which applies to text answers only.

    Returns:
        The options with the grammar, and the name of the field that was converted ("" if the
        options contained a grammar or no restriction).

    Raises:
        InvalidRequestError: More than one field restricts the answer.
    """
    found: dict[str, Grammar] = {}
    if prompt is not None and (forced := forced_calls(prompt)) is not None:
        found["tools"] = forced
        options = {**options, "grammar": None}
    allowed = tuple_of("allowed_token_ids", options.get("allowed_token_ids") or ())
    if allowed:
        found["allowed_token_ids"] = _of_allowed(allowed)
    if words := tuple_of("bad_words", options.get("bad_words") or ()):
        found["bad_words"] = _without(words)
    if not found:
        return options, ""
    names = [*found, "grammar"] if options.get("grammar") is not None else [*found]
    if len(names) > 1:
        raise InvalidRequestError(
            f"{names[0]} and {names[1]} cannot restrict one answer together; leave one of them out"
        )
    ((name, grammar),) = found.items()
    options = {**options, "grammar": grammar}
    if name == "allowed_token_ids" and not set(allowed) & set(eos_ids):
        options["ignore_eos"] = True
    return options, name


def _of_allowed(token_ids: tuple[object, ...]) -> Grammar:
    at_most("allowed_token_ids", len(token_ids), MAX_ALLOWED_TOKENS)
    ranges: list[list[int]] = []
    for token_id in sorted({one for one in token_ids if isinstance(one, int)}):
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    shown = ",".join(str(one) if one == last else f"{one}-{last}" for one, last in ranges)
    return Grammar(GrammarKind.LARK, f"start: <[{shown}]>*")


def _without(words: tuple[object, ...]) -> Grammar:
    at_most("bad_words", len(words), MAX_BAD_WORDS)
    escaped: list[str] = []
    for word in words:
        if not isinstance(word, str) or not word:
            raise InvalidRequestError(f"bad_words must hold non-empty texts, got {word!r:.80}")
        at_most("bad_words bytes", utf8_bytes("bad_words", word), MAX_BAD_WORD_BYTES)
        escaped.append("".join(f"\\x{{{ord(character):x}}}" for character in word))
    bad = f"/(?s:.*)({'|'.join(escaped)})(?s:.*)/"
    return Grammar(GrammarKind.LARK, f"start: TEXT\nTEXT: /(?s:.*)/ & ~{bad}")


def bias_pairs(biases: Biases) -> Sequence[tuple[int, float]]:
    return tuple(biases.items()) if isinstance(biases, Mapping) else biases


def sampling_params(
    options: SamplingOptions, defaults: SamplingDefaults, room_tokens: int
) -> SamplingParams:
    """`room_tokens` is the number of tokens that fit into the context after the prompt. It limits
    max_tokens only if the client did not set max_tokens."""
    given: dict[str, Any] = {
        name: value
        for name, value in options.items()
        if value is not None and name not in _RESTRICTIONS
    }
    if (biases := options.get("logit_bias")) is not None:
        given["logit_bias"] = bias_pairs(biases)
    if given.get("return_routed_experts"):
        given.setdefault("logprobs", 0)  # they travel with the log-probabilities
    for name, (_, rule) in parameters_of(SamplingParams).items():
        if name in given and rule.most is not None:
            given[name] = tuple_of(name, given[name])
    most_tokens = max(defaults.max_tokens or DEFAULT_MAX_TOKENS, options.get("min_tokens") or 0)
    default: dict[str, Any] = {"seed": secrets.randbelow(MAX_SEED), "max_tokens": most_tokens}
    return within_room(SamplingParams(**(defaults.given() | default | given)), options, room_tokens)


def within_room(
    sampling: SamplingParams, options: SamplingOptions, room_tokens: int
) -> SamplingParams:
    """Reduces the default of max_tokens to `room_tokens`, the number of tokens that fit into the
    context after the prompt. Raises InvalidRequestError if min_tokens does not fit."""
    if options.get("max_tokens") is not None or sampling.max_tokens <= room_tokens:
        return sampling
    if sampling.min_tokens > room_tokens:
        raise InvalidRequestError(
            f"min_tokens={sampling.min_tokens} exceeds the {room_tokens} tokens of context left"
            " after the prompt; ask for fewer"
        )
    return dataclasses.replace(sampling, max_tokens=room_tokens)


def prompt_numbers(prompt_tokens: int, sampling: SamplingParams) -> int:
    top = sampling.prompt_logprobs
    return 0 if top is None else prompt_tokens * (1 + top) * sampling.n


def check_prompt_numbers(numbers: int) -> None:
    if numbers > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs: {numbers} values requested (tokens x (1 + prompt_logprobs) x n), and"
            f" at most {MAX_PROMPT_LOGPROBS} fit a reply; lower prompt_logprobs or n, or send a"
            " shorter prompt"
        )


def tuple_of(name: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name} must be a sequence, got {type(value).__name__}")
    for text in value if name == "stop" else ():
        if isinstance(text, str):
            utf8_bytes("stop", text)
    return tuple(value)


def utf8_bytes(name: str, text: str) -> int:
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} must be text, got {type(text).__name__}")
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid UTF-8 at character {error.start}: {text[error.start]!r} cannot be"
            " encoded"
        ) from None
