"""Converts HTTP requests of OpenAI clients to prompts and options for the `Frontend`.

The forms of `bodies` check the types of fields, and the `Frontend` validates their values."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec

from jdisagg.dispatch.prompts import BareText, Prompt, TokenPrompt
from jdisagg.errors import InvalidRequestError
from jdisagg.request import MAX_SEED, SamplingOptions, at_most
from jdisagg.service.grpc.wire_generation import MAX_IDS
from jdisagg.service.http.bodies import (
    Budget,
    ChatFields,
    CompletionFields,
    GenerationFields,
    Most,
    PromptFields,
    ResumptionFields,
    Sampling,
    TemplateArguments,
)
from jdisagg.service.http.chat import chat_prompt
from jdisagg.service.http.fields import INTEGER, TEXT, Fields, begins
from jdisagg.service.http.grammar import grammar_from
from jdisagg.service.http.hints import SentHints, hints_from
from jdisagg.service.http.response_store import Keep
from jdisagg.service.http.response_tools import SentTool
from jdisagg.service.http.resumption import Resumed, resumed_from

MAX_PROMPTS = 256
# Objects of a chat's request with the field that limits the number of reasoning tokens.
_BUDGETS = (("thinking", "budget_tokens"), ("reasoning", "max_tokens"))
MAX_IGNORED_SHOWN = 16

_PLAIN_NAME = re.compile(r"[\w.\[\]$?-]{1,256}", re.ASCII)


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
    sent: GenerationFields
    echo: bool = False
    of_prompt: OfPrompt = OfPrompt()
    answerless: bool = False
    told: Mapping[str, object] = field(default_factory=dict)
    within_context: bool = False
    keep: Keep | None = None
    sent_tools: Mapping[str, SentTool] = field(default_factory=dict)
    resumed: Resumed | None = None
    hints: SentHints = SentHints()


def completion_from(fields: Fields) -> Asked:
    """Raises InvalidRequestError, which names the invalid field."""
    options, own = sampling_options(fields, chat=False), fields.fill(CompletionFields)
    options["max_tokens"] = most = most_tokens(fields)
    options["logprobs"], echo = own.logprobs, own.echo
    told, scored = options.get("prompt_logprobs"), own.logprobs if echo else None
    answerless = echo and most == 0
    if answerless:
        options["max_tokens"] = 1
    if scored is not None:
        options["prompt_logprobs"] = max(scored, told or 0)
        if most in (0, 1):
            # Clients that score a prompt expect one token after it, even if it is an EOS token.
            options["ignore_eos"] = True
    asked = asked_from(fields, completion_prompts(fields), options, echo)
    resumed = _resumed(fields, options, own.resumption)
    if resumed is not None and len(asked.prompts) > 1:
        raise InvalidRequestError("resumption is for one prompt; send several requests")
    of_prompt = OfPrompt(told, scored)
    return replace(asked, of_prompt=of_prompt, answerless=answerless, resumed=resumed)


def chat_from(fields: Fields) -> Asked:
    """Raises InvalidRequestError, which names the invalid field."""
    options, own = sampling_options(fields), fields.fill(ChatFields)
    options["max_tokens"] = most_tokens(fields)
    if own.logprobs:
        options["logprobs"] = own.top_logprobs
    elif own.top_logprobs:
        raise InvalidRequestError(
            f"top_logprobs={own.top_logprobs} needs logprobs; set logprobs to true"
        )
    asked = asked_from(fields, (chat_prompt(fields),), options)
    return replace(asked, resumed=_resumed(fields, options, own.resumption))


def _resumed(
    fields: Fields, options: SamplingOptions, given: ResumptionFields | None
) -> Resumed | None:
    resumed = resumed_from(fields, given, options.get("n"))
    for name in ("prompt_logprobs", "logprobs"):
        if resumed is not None and options.get(name) is not None:
            raise InvalidRequestError(f"resumption excludes {name}; leave one of them out")
    return resumed


def most_tokens(fields: Fields) -> int | None:
    """Reads the largest number of tokens of the answer. Returns None if the field is absent or -1,
    which means that only the context length limits the answer."""
    given = fields.fill(Most)
    most = given.max_tokens if (newer := given.max_completion_tokens) is None else newer
    return None if most == -1 else most


def completion_prompts(fields: Fields) -> tuple[Prompt, ...]:
    asked = fields.fill(PromptFields)
    text = str if asked.add_special_tokens else BareText
    return listed_prompts("prompt", asked.prompt, MAX_PROMPTS, text)


def listed_prompts(
    name: str, given: str | Sequence[object], most: int, text: type[str] = str
) -> tuple[Prompt, ...]:
    """Reads the field `name`, which is a text, token ids, or a list of either. `text` is the class
    of texts."""
    if isinstance(given, str):
        return (text(given),)
    if not given:
        raise InvalidRequestError(f"{name} is empty (an empty list); send some text")
    if all(isinstance(one, int) for one in given):
        return (_ids(name, given),)
    at_most(name, len(given), most)
    if all(isinstance(one, str) for one in given):
        return tuple(text(one) for one in given if isinstance(one, str))
    if all(isinstance(one, list) for one in given):
        return tuple(_ids(name, one) for one in given if isinstance(one, list))
    raise InvalidRequestError(f"{name} mixes texts and token ids; send lists of one kind")


def ignored_header(fields: Fields) -> bytes:
    """Returns the value of the reply header that lists unknown request fields, or b"" if the
    request has none."""
    unread = fields.unread()
    names = [name for name in unread if _PLAIN_NAME.fullmatch(name)][:MAX_IGNORED_SHOWN]
    more = len(unread) - len(names)
    return ", ".join([*names, *([f"and {more} more"] if more else [])]).encode("ascii")


def _ids(name: str, given: Sequence[object]) -> TokenPrompt:
    at_most(f"{name} token ids", len(given), MAX_IDS)
    return TokenPrompt(tuple(one for one in given if isinstance(one, int)))


def sampling_options(fields: Fields, *, chat: bool = True) -> SamplingOptions:
    """Reads all options but those whose form differs between APIs."""
    options = cast(SamplingOptions, msgspec.structs.asdict(fields.fill(Sampling)))
    options["grammar"] = grammar_from(fields)
    if options.get("allowed_token_ids") == []:
        raise InvalidRequestError(
            "allowed_token_ids is empty: no token could be chosen; list some or leave it out"
        )
    options["thinking_budget"] = _budget(fields, options.get("thinking_budget"), chat)
    if options.get("top_k") == -1:  # means all tokens, as in vLLM
        options["top_k"] = 0
    options["seed"] = _seed(options.get("seed"))
    if options.get("top_p") == 0:  # nothing but the most likely token
        options["top_p"], options["temperature"] = None, 0.0
    return options


def _budget(fields: Fields, given: int | None, chat: bool) -> int | None:
    """Reads the number of reasoning tokens of the answer from the fields of all APIs. -1 means no
    limit, as in other servers."""
    found = [given, *msgspec.structs.astuple(fields.fill(Budget))]
    for name, inner in _BUDGETS if chat else ():
        if name in fields.names and begins(fields.raw(name), b"{"):
            part = fields.part(name)
            if name == "reasoning" or part.read("type", TEXT) != "disabled":
                found.append(part.read(inner, INTEGER))
    if chat:
        told = fields.fill(TemplateArguments).chat_template_kwargs.get("thinking_budget")
        found.append(told if type(told) is int else None)
    budget = next((one for one in found if one is not None), None)
    return None if budget == -1 else budget


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
    sent = fields.fill(GenerationFields)
    if sent.stream_options is not None and not sent.stream:
        raise InvalidRequestError("stream_options needs stream; set stream to true")
    if sent.best_of not in (None, -1, options.get("n") or 1):
        raise InvalidRequestError(
            f"best_of={sent.best_of} is not supported; request n answers and choose among them"
        )
    if options.get("include_stop_str_in_output") is None:
        options["include_stop_str_in_output"] = sent.no_stop_trim
    of_prompt = OfPrompt(options.get("prompt_logprobs"))
    return Asked(prompts, options, sent, echo, of_prompt, hints=hints_from(fields))
