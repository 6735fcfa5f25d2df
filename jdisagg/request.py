"""A request and what comes back: plain, frozen, serialisable data, ours alone.

Rule 9 of the design: a sequence is (Request, accepted token ids, KV). Everything else (penalty
counts, stop matching, detokenizer state, randomness) is derived from these, so that a sequence can
be rebuilt anywhere. Validation that needs no model happens here, once; limits that depend on the
model (vocabulary, context length) are checked by `dispatch/frontend.py`.

These are dataclasses, for they are what users make and get (`dataclasses.replace` and `asdict` work
on them); what only processes send each other is a `Message` (`messages/`). `TokenLogprobs`, which
workers send by the thousand, is one too."""

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jdisagg.errors import InvalidRequestError
from jdisagg.plain import Message, plain
from jdisagg.prompt_logprobs import PromptLogprobs

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 512
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_EOS_IDS = 16  # of the model itself
MAX_N = 64
MAX_SEED = 2**63 - 1
MAX_GRAMMAR_BYTES = 128 << 10

Identity = tuple[str, str, int]


def _is_number(value: float) -> bool:
    """NaN is one; it lies in no range."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    number = value.__class__ in (int, float) or _is_number(value)  # most are told at once
    if not number or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value!r}")


def foreign_token(token_ids: Sequence[object], vocabulary: int) -> int | None:
    """Where the first entry stands that is no token id of a model with so many; None where all
    are."""
    for index, token_id in enumerate(token_ids):
        if not isinstance(token_id, int) or not 0 <= token_id < vocabulary:
            return index
    return None


def at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name} may hold at most {limit}, got {count}")


class FinishReason(enum.Enum):
    """Why a stream ended. `STOP`: EOS, a stop token or a stop string. `LENGTH`: max_tokens or the
    context is full. `TOOL_CALLS`, of chats: it stopped, and what it said are calls of tools."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"


class GrammarKind(enum.Enum):
    """`JSON_SCHEMA`: text is a JSON Schema. `JSON_OBJECT`: any JSON object; no text. `REGEX`: the
    whole answer matches. `CHOICE`: text is a JSON array of the possible answers. `LARK`: a grammar
    as llguidance reads Lark's notation, with JSON schemas (%json) and regular expressions in it."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer's text must be: its tokens are chosen among those with which that can still
    come true, and it ends where the grammar lets it. Cut by its length it is a beginning of such a
    text. That the text means something is found out when it is compiled (`jdisagg.grammar`)."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        try:
            size_bytes = len(self.text.encode())
        except (AttributeError, UnicodeEncodeError):
            raise InvalidRequestError(
                f"grammar: a {self.kind.value} must be given as UTF-8 text, got"
                f" {type(self.text).__name__}"
            ) from None
        if size_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"grammar: the {self.kind.value} has {size_bytes} bytes; at most"
                f" {MAX_GRAMMAR_BYTES} are taken: simplify it"
            )

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> "Grammar":
        """The answer is one of these. Raises InvalidRequestError where there is none."""
        if isinstance(choices, str) or not all(isinstance(one, str) and one for one in choices):
            raise InvalidRequestError(
                "grammar: a choice must be a list of texts, none of them empty"
            )
        if not choices:
            raise InvalidRequestError("grammar: a choice of nothing has no answer; give some texts")
        return cls(GrammarKind.CHOICE, json.dumps(list(choices), ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy: the largest logit, ties to the smallest
    token id.

    top_k 0 and top_p 1 and min_p 0 switch the filters off; they apply in the order temperature,
    top-k, top-p (on what top-k leaves, renormalised), min-p. Penalties follow the OpenAI (presence,
    frequency: over generated tokens) and Hugging Face (repetition: over prompt and generated
    tokens) definitions. `include_stop_str_in_output` and `skip_special_tokens` are of the text
    alone: whether it ends with the stop string that ended it, and without special tokens.
    `prompt_logprobs`: those of the prompt's own tokens are told, each with so many of the most
    likely ones. `grammar`: what the answer must be; where it allows nothing but the end, the answer
    ends, whatever min_tokens and ignore_eos say."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        number = self.top_p.__class__ is float or _is_number(self.top_p)
        if not number or not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(
                f"top_p must be in (0.0, 1.0], got {self.top_p!r}; temperature=0 decodes greedily"
            )
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("seed", self.seed, 0, MAX_SEED)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("n", self.n, 1, MAX_N)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.logit_bias != ():
            self._check_logit_bias()
        at_most("stop", len(self.stop), MAX_STOP_STRINGS)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(
                    f"stop must hold non-empty strings, got {text!r}; remove it"
                )
            at_most(
                "stop string bytes",
                len(text.encode("utf-8", "surrogatepass")),
                MAX_STOP_STRING_BYTES,
            )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequestError(
                f"grammar must be a Grammar, got {type(self.grammar).__name__}"
            )
        at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, 2**31 - 1)

    def _check_logit_bias(self) -> None:
        at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token_id, bias in self.logit_bias:
            _in_range("logit_bias token id", token_id, 0, 2**31 - 1)
            _in_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if len({token_id for token_id, _ in self.logit_bias}) != len(self.logit_bias):
            raise InvalidRequestError("logit_bias names a token id twice; give each id one bias")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens so far (and not only through the logits)."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def shaped(self) -> bool:
        """Whether logits are changed or reported beyond temperature and filters (the slower
        sampling program)."""
        return (
            self.penalised
            or bool(self.logit_bias)
            or self.min_tokens > 0
            or self.logprobs is not None
        )


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a checkpoint wants of the fields of `SamplingParams` that a request leaves unset; None
    where it says nothing. Checked by whoever reads it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        """The fields that it says something of."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AcceptedChild:
    """What a client already has of one child: its tokens, and how it ended if it did."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Resumption:
    """A client asks again for a request whose stream broke. `number` is 1 for the first such time
    and rises; `children` are all of the request's, in order. The stream goes on at the next token
    of each; a child that had ended is not heard of again."""

    number: int
    children: tuple[AcceptedChild, ...]


@plain
class Request:
    """One request after tokenization. `deadline_seconds` is what remained when it was handed on.

    `resumption` is for the request path alone, which turns it into each child's accepted tokens:
    workers never see it. `stop_ids` are all token ids that end the stream (EOS unless ignored, and
    the caller's); they are delivered to no one. `seed` in `sampling` is always concrete: the door
    draws one where the client gave none. `life` is the client's own number for all the times that
    it asks for this stream: who uses a request id again draws another, and is not taken for the
    earlier stream's echo. `cache_scope`: KV is shared only between requests of one tenant and one
    scope; the door makes it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()
    deadline_seconds: float | None = None
    tenant: str = ""
    priority: int = 0
    resumption: Resumption | None = None
    life: int = 0
    cache_scope: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequestError(
                "prompt is empty: at least one token is needed to predict the next; send some text"
            )
        if self.deadline_seconds is not None and not self.deadline_seconds > 0:
            raise InvalidRequestError(
                f"deadline_seconds must be positive, got {self.deadline_seconds}"
            )

    @property
    def identity(self) -> Identity:
        """What is equal between two attempts at the same stream, and differs between any two
        streams."""
        return self.tenant, self.request_id, self.life

    def most_tokens(self, context_tokens: int) -> int:
        """How many tokens a child may generate: max_tokens, or fewer where prompt and answer fill
        the context."""
        return min(self.sampling.max_tokens, context_tokens - len(self.prompt_token_ids))

    def end_at(self, index: int, token_id: int, context_tokens: int) -> "FinishReason | None":
        """Why a child ends with generated token `index`, or None: the one rule that worker and path
        share."""
        if token_id in self.stop_ids and (
            index >= self.sampling.min_tokens or self.sampling.grammar is not None
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.most_tokens(context_tokens) else None

    def end_among(
        self, first_index: int, token_ids: tuple[int, ...], context_tokens: int
    ) -> "tuple[int, FinishReason | None]":
        """How many of the tokens `first_index`.. a child still generates, the one that ends it
        included, and why it ends then."""
        left = max(1, self.most_tokens(context_tokens) - first_index)
        if self.stop_ids:
            for count, token_id in enumerate(token_ids[:left], 1):
                if (
                    finish := self.end_at(first_index + count - 1, token_id, context_tokens)
                ) is not None:
                    return count, finish
        return (left, FinishReason.LENGTH) if len(token_ids) >= left else (len(token_ids), None)


class TokenLogprobs(Message, frozen=True):
    """Natural-log probabilities of one token and of the most likely ones, under the model's
    distribution after penalties and bias, before temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@plain
class Timings:
    """Seconds of one request; `kv_bytes_moved` crossed from the prefill mesh to the decode mesh.
    `exposed_transfer_seconds`: what the hand-offs took beyond the end of their prefill."""

    queue_seconds: float = 0.0
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0
    handoff_gap_seconds: float = 0.0
    total_seconds: float = 0.0
    kv_bytes_moved: int = 0
    preemptions: int = 0
    exposed_transfer_seconds: float = 0.0


class CachedTokens(Message, frozen=True):
    """Tokens of a prompt whose KV was known and not computed again, by where it was when the
    request came: in the device's pages, in host memory, on disk, at another worker (peer). What was
    not in pages was brought there for this request."""

    pages: int = 0
    host: int = 0
    disk: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        return self.pages + self.host + self.disk + self.peer

    def __add__(self, other: "CachedTokens") -> "CachedTokens":
        return CachedTokens(
            self.pages + other.pages,
            self.host + other.host,
            self.disk + other.disk,
            self.peer + other.peer,
        )

    def by_tier(self) -> dict[str, int]:
        """Under the names by which usage, traces and metrics tell them."""
        return {"pages": self.pages, "host": self.host, "disk": self.disk, "peer": self.peer}


@plain
class Usage:
    """`cached_tokens`: of the prompt's, those whose KV was known and not computed again.
    `reasoning_tokens`: of the completion's; None where nobody tells reasoning from words.
    `cached_by_tier`: `cached_tokens`, by where they were found; None where nobody says."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    cached_by_tier: CachedTokens | None = None


@plain
class ToolCallDelta:
    """What is new of call `index` of an answer: its id and name where it begins, more of its
    arguments (a JSON object's text) from there on."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@plain
class StreamEvent:
    """One message of a stream to the client: new tokens of child `child`, from token `first_index`
    on. Of a chat that is taken apart, `text` is the words, beside `reasoning` and `tool_calls`.

    `finish_reason` is set on a child's last event; `usage` and `timings` on the last event of the
    whole stream. `request_id` and, where they were asked for, `prompt_logprobs`: on the first event
    that a client receives."""

    child: int
    first_index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    request_id: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
