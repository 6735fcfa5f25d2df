"""Converts HTTP requests of OpenAI clients to prompts and options for the `Frontend`.

This module checks the types of fields, and the `Frontend` validates their values. An unsupported
field raises an error that names it. It is accepted only with a value without effect. Fields that
have no meaning for jdisagg are ignored. Field names are those of OpenAI's API. For features that
OpenAI's API does not have, they are those of vLLM."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from jdisagg.dispatch.options import SamplingOptions
from jdisagg.dispatch.prompts import BareText, Prompt, TokenPrompt
from jdisagg.errors import InvalidRequestError
from jdisagg.request import MAX_SEED, at_most
from jdisagg.service.grpc.wire_generation import MAX_IDS
from jdisagg.service.http.chat import chat_prompt
from jdisagg.service.http.fields import (
    BIASES,
    INTEGER,
    INTEGERS,
    NUMBER,
    TEXT,
    TEXTS,
    YES,
    FieldKind,
    Fields,
    either,
)
from jdisagg.service.http.grammar import grammar_from
from jdisagg.service.http.response_store import Keep
from jdisagg.service.http.response_tools import SentTool
from jdisagg.service.http.resumption import Resumed, resumed_from
from jdisagg.service.http.unsupported import REFUSED, REFUSED_OF_CHATS, WITHOUT_MEANING

MAX_PROMPTS = 256
MAX_IGNORED_SHOWN = 16

_NUMBERS = ("temperature", "top_p", "min_p")
_NUMBERS += ("presence_penalty", "frequency_penalty", "repetition_penalty")
_INTEGERS = ("top_k", "seed", "min_tokens", "n", "prompt_logprobs")
# Alternative names of one field, in vLLM and SGLang.
_WITH_STOP = ("include_stop_str_in_output", "no_stop_trim")
_SALTS = ("cache_salt", "extra_key")
_PROMPT = FieldKind(
    "a string, a list of strings, a list of token ids or a list of such lists",
    msgspec.json.Decoder(str | list[str | int | list[int]]).decode,
)


def _count(raw: msgspec.Raw) -> int | None:
    """Decodes the number of log-probabilities to report. Also accepts true (1) and false (None),
    because the field of this name is a boolean in chats."""
    given = bytes(raw)
    if given in (b"true", b"false"):
        return 1 if given == b"true" else None
    return INTEGER.decode(raw)


_COUNT = FieldKind("an integer", _count)
_PLAIN_NAME = re.compile(r"[\w.\[\]$?-]{1,256}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Streaming:
    """Options of a streamed reply.

    Attributes:
        usage: Whether the stream ends with a chunk that reports token usage.
        continuous_usage: Whether every chunk reports token usage.
    """

    usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class OfPrompt:
    """Which log-probabilities of the prompt a reply has: the number of most likely tokens for each
    prompt token, in each of two fields. None means that the field has none.

    Attributes:
        echoed: Number for OpenAI's field `logprobs`. There, the entries of an echoed prompt precede
            those of the answer.
    """

    told: int | None = None
    echoed: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed HTTP request for generation.

    Attributes:
        streaming: Options of the stream, or None if the reply is not streamed.
        tokens_as_ids: Whether log-probabilities identify tokens by id and not by text.
        answerless: Whether the reply has no answer (max_tokens 0). One token is generated in any
            case, and omitted.
        within_context: Whether a max_tokens that exceeds the context is reduced. If False, it is
            refused.
        sent_tools: Tools whose name in the chat differs from the client's, by the name in the chat.
        resumed: The part of the stream that the client has already received, or None if the stream
            cannot be resumed.
    """

    prompts: tuple[Prompt, ...]
    options: SamplingOptions
    model: str = ""
    request_id: str = ""
    deadline_seconds: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    streaming: Streaming | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    of_prompt: OfPrompt = OfPrompt()
    answerless: bool = False
    told: Mapping[str, object] = field(default_factory=dict)
    within_context: bool = False
    keep: Keep | None = None
    sent_tools: Mapping[str, SentTool] = field(default_factory=dict)
    resumed: Resumed | None = None


def completion_from(fields: Fields) -> Asked:
    """Raises InvalidRequestError, which names the invalid field."""
    options = sampling_options(fields)
    options["max_tokens"] = most = most_tokens(fields)
    options["logprobs"] = fields.read("logprobs", _COUNT)
    echo = bool(fields.read("echo", YES))
    told, scored = options.get("prompt_logprobs"), options["logprobs"] if echo else None
    answerless = echo and most == 0
    if answerless:
        options["max_tokens"] = 1
    if scored is not None:
        options["prompt_logprobs"] = max(scored, told or 0)
        if most in (0, 1):
            # Clients that score a prompt expect one token after it, even if it is an EOS token.
            options["ignore_eos"] = True
    asked = asked_from(fields, completion_prompts(fields), options, echo)
    resumed = _resumed(fields, options)
    if resumed is not None and len(asked.prompts) > 1:
        raise InvalidRequestError("resumption is for one prompt; send several requests")
    of_prompt = OfPrompt(told, scored)
    return replace(asked, of_prompt=of_prompt, answerless=answerless, resumed=resumed)


def chat_from(fields: Fields) -> Asked:
    """Raises InvalidRequestError, which names the invalid field."""
    options = sampling_options(fields)
    options["max_tokens"] = most_tokens(fields)
    top = fields.read("top_logprobs", INTEGER)
    if fields.read("logprobs", YES):
        options["logprobs"] = top or 0
    elif top:
        raise InvalidRequestError(f"top_logprobs={top} needs logprobs; set logprobs to true")
    fields.refuse(REFUSED_OF_CHATS)
    asked = asked_from(fields, (chat_prompt(fields),), options)
    return replace(asked, resumed=_resumed(fields, options))


def _resumed(fields: Fields, options: SamplingOptions) -> Resumed | None:
    resumed = resumed_from(fields, options.get("n"))
    for name in ("prompt_logprobs", "logprobs"):
        if resumed is not None and options.get(name) is not None:
            raise InvalidRequestError(f"resumption excludes {name}; leave one of them out")
    return resumed


def most_tokens(fields: Fields) -> int | None:
    """Reads the largest number of tokens of the answer. Returns None if the field is absent or -1,
    which means that only the context length limits the answer."""
    most = either(fields, ("max_completion_tokens", "max_tokens"), INTEGER)
    return None if most == -1 else most


def completion_prompts(fields: Fields) -> tuple[Prompt, ...]:
    given = fields.given("prompt", _PROMPT)
    text = BareText if fields.read("add_special_tokens", YES) is False else str
    if isinstance(given, str):
        return (text(given),)
    if not given:
        raise InvalidRequestError("prompt is empty (an empty list); send some text")
    if all(isinstance(one, int) for one in given):
        return (_ids(given),)
    at_most("prompt", len(given), MAX_PROMPTS)
    if all(isinstance(one, str) for one in given):
        return tuple(text(one) for one in given if isinstance(one, str))
    if all(isinstance(one, list) for one in given):
        return tuple(_ids(one) for one in given if isinstance(one, list))
    raise InvalidRequestError("prompt mixes texts and token ids; send lists of one kind")


def ignored_header(fields: Fields) -> bytes:
    """Returns the value of the reply header that lists unknown request fields, or b"" if the
    request has none."""
    unread = fields.unread()
    names = [name for name in unread if _PLAIN_NAME.fullmatch(name)][:MAX_IGNORED_SHOWN]
    more = len(unread) - len(names)
    return ", ".join([*names, *([f"and {more} more"] if more else [])]).encode("ascii")


def _ids(given: Sequence[object]) -> TokenPrompt:
    at_most("prompt token ids", len(given), MAX_IDS)
    return TokenPrompt(tuple(one for one in given if isinstance(one, int)))


def sampling_options(fields: Fields) -> SamplingOptions:
    allowed = fields.read("allowed_token_ids", INTEGERS)
    if allowed is not None and not allowed:
        raise InvalidRequestError(
            "allowed_token_ids is empty: no token could be chosen; list some or leave it out"
        )
    options = SamplingOptions(
        logit_bias=fields.read("logit_bias", BIASES),
        stop=fields.read("stop", TEXTS),
        stop_token_ids=fields.read("stop_token_ids", INTEGERS),
        ignore_eos=fields.read("ignore_eos", YES),
        include_stop_str_in_output=either(fields, _WITH_STOP, YES),
        skip_special_tokens=fields.read("skip_special_tokens", YES),
        grammar=grammar_from(fields),
        allowed_token_ids=allowed,
        bad_words=fields.read("bad_words", TEXTS),
    )
    numbers = {name: fields.read(name, NUMBER) for name in _NUMBERS}
    integers = {name: fields.read(name, INTEGER) for name in _INTEGERS}
    if integers["top_k"] == -1:  # means all tokens, as in vLLM
        integers["top_k"] = 0
    integers["seed"] = _seed(integers["seed"])
    if numbers["top_p"] == 0:  # nothing but the most likely token
        numbers["top_p"], numbers["temperature"] = None, 0.0
    best_of = fields.read("best_of", INTEGER)
    if best_of not in (None, -1, integers["n"] or 1):
        raise InvalidRequestError(
            f"best_of={best_of} is not supported; request n answers and choose among them"
        )
    fields.refuse(REFUSED)
    fields.ignore(*WITHOUT_MEANING)
    return SamplingOptions(**options, **numbers, **integers)


def _seed(given: int | None) -> int | None:
    """Returns the seed, or None for a random one. -1 means random, as in vLLM. Other negative
    numbers are mapped to non-negative seeds."""
    if given is None or given == -1:
        return None
    return given % (MAX_SEED + 1) if -MAX_SEED - 1 <= given < 0 else given


def asked_from(
    fields: Fields, prompts: tuple[Prompt, ...], options: SamplingOptions, echo: bool = False
) -> Asked:
    """`echo` is whether the reply's text begins with the prompt."""
    wanted = fields.part("stream_options")
    streaming = Streaming(
        bool(wanted.read("include_usage", YES)), bool(wanted.read("continuous_usage_stats", YES))
    )
    streams = bool(fields.read("stream", YES))
    if wanted.names and not streams:
        raise InvalidRequestError("stream_options needs stream; set stream to true")
    return Asked(
        prompts=prompts,
        options=options,
        model=fields.read("model", TEXT) or "",
        request_id=either(fields, ("request_id", "rid"), TEXT) or "",
        deadline_seconds=fields.read("deadline_seconds", NUMBER),
        tenant=fields.read("tenant", TEXT) or "",
        cache_salt="/".join(filter(None, (fields.read(name, TEXT) for name in _SALTS))),
        priority=fields.read("priority", INTEGER) or 0,
        streaming=streaming if streams else None,
        token_ids=bool(fields.read("return_token_ids", YES)),
        tokens_as_ids=bool(fields.read("return_tokens_as_token_ids", YES)),
        echo=echo,
        of_prompt=OfPrompt(options.get("prompt_logprobs")),
    )
