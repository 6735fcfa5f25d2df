"""A request and its results as plain, frozen, serialisable data.

A sequence consists of its Request, its accepted token ids and its KV. Everything else (penalty
counts, stop matching, detokenizer state, randomness) derives from these, so that any worker can
rebuild a sequence.

Types that users create and receive are dataclasses, which support `dataclasses.replace` and
`asdict`. Types that only processes exchange are `Message` structs (`messages/`)."""

import enum
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_origin, get_type_hints

from jdisagg.errors import InvalidRequestError
from jdisagg.plain import Message, plain
from jdisagg.prompt.experts import ChosenExperts
from jdisagg.prompt.hints import Hints
from jdisagg.prompt.images import PromptImage, check_images, scoped
from jdisagg.prompt.logprobs import PromptLogprobs

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 512
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_EOS_IDS = 16  # of the model itself
MAX_N = 64
MAX_SEED = 2**63 - 1
MAX_GRAMMAR_BYTES = 128 << 10
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 64
INT32 = 2**31 - 1

_ANY_TEXT = "(?s:.*)"

Identity = tuple[str, str, int]


def foreign_token(token_ids: Sequence[object], vocabulary: int) -> int | None:
    """Returns the index of the first entry that is not an int in [0, `vocabulary`), or None if all
    entries are valid token ids."""
    for index, token_id in enumerate(token_ids):
        if not isinstance(token_id, int) or not 0 <= token_id < vocabulary:
            return index
    return None


def at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name} may hold at most {limit}, got {count}")


class FinishReason(enum.Enum):
    """Why a stream ended. `STOP`: EOS, a stop token or a stop string. `LENGTH`: max_tokens or a
    full context. `TOOL_CALLS`: a chat answer that stopped and contains tool calls."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"


class GrammarKind(enum.Enum):
    """Kinds of grammar, with the text that each kind expects.

    `JSON_SCHEMA`: a JSON Schema. `REGEX`: a regular expression that matches the whole answer.
    `CHOICE`: a JSON array of possible answers. `JSON_OBJECT`: empty text. Any JSON object is
    allowed as the answer. `LARK`: llguidance's Lark dialect, with embedded JSON schemas (%json) and
    regular expressions.
    """

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Thought:
    """Limits the number of reasoning tokens of an answer.

    Attributes:
        budget: Number of reasoning tokens after which the reasoning is ended.
        begin, end: Text of the markers around reasoning.
        closings: Token ids that end the reasoning. The second tuple, if any, is used from the
            second time on.
        begun: Whether the prompt ends within reasoning.
        in_parts: Whether reasoning may begin anywhere in the answer, and more than once. If False,
            only the beginning of the answer may be reasoning.
    """

    budget: int
    begin: str
    end: str
    closings: tuple[tuple[int, ...], ...]
    begun: bool = False
    in_parts: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on the answer's text. Each token is chosen so that the answer can still match the
    grammar, and the answer can end only where the grammar allows. An answer that reaches its length
    limit is the beginning of a matching text. Compilation (`jdisagg.grammar`) validates the
    grammar's text. `thought`: limit of the answer's reasoning, or None."""

    kind: GrammarKind
    text: str = ""
    thought: Thought | None = None

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
                f" {MAX_GRAMMAR_BYTES} are allowed; simplify it"
            )

    @property
    def free(self) -> bool:
        """Whether only `thought` restricts the answer."""
        return self.kind is GrammarKind.REGEX and self.text == _ANY_TEXT

    @classmethod
    def of_any_text(cls, thought: Thought | None = None) -> "Grammar":
        return cls(GrammarKind.REGEX, _ANY_TEXT, thought)

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> "Grammar":
        """Raises InvalidRequestError if `choices` is empty."""
        if isinstance(choices, str) or not all(isinstance(one, str) and one for one in choices):
            raise InvalidRequestError("grammar: choices must be a list of non-empty texts")
        if not choices:
            raise InvalidRequestError(
                "grammar: the list of choices is empty; give at least one text"
            )
        return cls(GrammarKind.CHOICE, json.dumps(list(choices), ensure_ascii=False))


class Rule(NamedTuple):
    """Declares a sampling parameter, in the annotation of its field.

    Attributes:
        help: What the parameter is, for descriptions of the APIs.
        low, high: Range of a number.
        above: Whether `low` is outside the range.
        most: Largest number of entries of a list.
    """

    help: str
    low: float | None = None
    high: float = 0
    above: bool = False
    most: int | None = None

    @property
    def least(self) -> float:
        low = math.inf if self.low is None else self.low
        return math.nextafter(low, math.inf) if self.above else low

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidRequestError for a value out of range. None is not checked."""
        if self.most is not None:
            at_most(name, len(value), self.most)
        if self.low is None or value is None:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not self.least <= value <= self.high:
            span = f"{'(' if self.above else '['}{self.low}, {self.high}]"
            raise InvalidRequestError(f"{name} must be in {span}, got {value!r}")


@functools.cache
def parameters_of(declared: type) -> dict[str, tuple[Any, Rule]]:
    """Returns the type and the rule of each sampling parameter that a field of `declared`
    declares."""
    return {
        name: get_args(one)
        for name, hint in get_type_hints(declared, include_extras=True).items()
        for one in (hint, *get_args(hint))
        if get_origin(one) is Annotated
    }


@functools.cache
def _limited(declared: type) -> tuple[tuple[str, Rule, float, float], ...]:
    rules = [(name, rule) for name, (_, rule) in parameters_of(declared).items()]
    limited = [one for one in rules if (one[1].low, one[1].most) != (None, None)]
    return tuple([(name, rule, rule.least, rule.high) for name, rule in limited])


_TOKEN_ID = Rule("a token id", 0, INT32)
_BIAS = Rule("a bias", -100.0, 100.0)
_Penalty = Annotated[float, Rule("of generated tokens, as in OpenAI's API", -2.0, 2.0)]
_Biases = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. The fields are the declaration of the parameters: range checks, gRPC,
    HTTP and its description follow them.

    Temperature 0 is greedy: the largest logit, ties to the smallest token id. Filters apply in the
    order temperature, top-k, top-p, min-p. Top-p uses the renormalised probabilities of the tokens
    that top-k kept. If `grammar` allows no further token, the answer ends, whatever min_tokens and
    ignore_eos are."""

    max_tokens: Annotated[int, Rule("largest number of tokens", 1, INT32)] = 256
    temperature: Annotated[float, Rule("0 is greedy", 0.0, 100.0)] = 1.0
    top_k: Annotated[int, Rule("number of tokens to choose from; 0: all", 0, INT32)] = 0
    top_p: Annotated[float, Rule("share of the likeliest tokens", 0.0, 1.0, above=True)] = 1.0
    min_p: Annotated[float, Rule("probability relative to the likeliest token's", 0.0, 1.0)] = 0.0
    seed: Annotated[int, Rule("of random choices", 0, MAX_SEED)] = 0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Rule("of prompt and generated tokens", 0.01, 100.0)] = 1.0
    logit_bias: Annotated[_Biases, Rule("biases by token id", most=MAX_LOGIT_BIAS)] = ()
    min_tokens: Annotated[int, Rule("least number of tokens", 0, INT32)] = 0
    stop: Annotated[tuple[str, ...], Rule("texts that end it", most=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Rule("end it", most=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: Annotated[bool, Rule("the end token does not end the answer")] = False
    logprobs: Annotated[int, Rule("likeliest tokens to report", 0, MAX_TOP_LOGPROBS)] | None = None
    n: Annotated[int, Rule("number of answers", 1, MAX_N)] = 1
    include_stop_str_in_output: Annotated[bool, Rule("the text has the stop string")] = False
    skip_special_tokens: Annotated[bool, Rule("the text omits special tokens")] = True
    grammar: Annotated[Grammar, Rule("what the answer must match")] | None = None
    prompt_logprobs: Annotated[int, Rule("as logprobs", 0, MAX_TOP_LOGPROBS)] | None = None
    return_routed_experts: Annotated[bool, Rule("the experts of each token, in logprobs")] = False

    def __post_init__(self) -> None:
        for name, rule, least, high in _limited(type(self)):
            value = getattr(self, name)
            if value.__class__ not in (int, float) or not least <= value <= high:
                rule.check(name, value)
        if self.min_tokens:
            Rule("", 0, self.max_tokens).check("min_tokens", self.min_tokens)
        if self.logit_bias:
            self._check_logit_bias()
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
        for token_id in self.stop_token_ids:
            _TOKEN_ID.check("stop_token_ids", token_id)

    def _check_logit_bias(self) -> None:
        for token_id, bias in self.logit_bias:
            _TOKEN_ID.check("logit_bias token id", token_id)
            _BIAS.check(f"logit_bias[{token_id}]", bias)
        if len({token_id for token_id, _ in self.logit_bias}) != len(self.logit_bias):
            raise InvalidRequestError("logit_bias contains a token id twice; give each id one bias")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def shaped(self) -> bool:
        """Whether penalties, bias or min_tokens change the logits."""
        return self.penalised or bool(self.logit_bias) or self.min_tokens > 0


Biases = Mapping[int, float] | Sequence[tuple[int, float]]


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of a generation: the fields of `SamplingParams`, for type checkers, and
    three fields that are converted to a grammar.

    If an option is absent or None, the model's default (`ModelInfo.sampling`) is used, or else the
    general default. The general default of `max_tokens` is 256, or fewer if the prompt leaves less
    context. The general default of `seed` is a random number."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Biases | None
    min_tokens: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    n: int | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    grammar: Grammar | None
    allowed_token_ids: (
        Annotated[Sequence[int], Rule("the only tokens to choose", most=MAX_ALLOWED_TOKENS)] | None
    )
    bad_words: Annotated[Sequence[str], Rule("not in the answer", most=MAX_BAD_WORDS)] | None
    thinking_budget: (
        Annotated[int, Rule("number of reasoning tokens after which reasoning is ended", 0, INT32)]
        | None
    )
    prompt_logprobs: int | None
    return_routed_experts: bool | None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A checkpoint's defaults for fields of `SamplingParams` that a request leaves unset. None
    means that the checkpoint has no default for the field."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AcceptedChild:
    """Tokens that a client has already received for one child (answer) of a request.
    `finish_reason` is None if the child had not ended."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Resumption:
    """A client's new call that resumes a broken stream of a request.

    The stream continues at the next token of each child (answer). Nothing is sent for children that
    had finished."""

    number: int
    children: tuple[AcceptedChild, ...]


@plain
class Adapter:
    """A LoRA adapter that a request uses.

    Attributes:
        path: Folder of the adapter, on the hosts of all workers.
        digest: Hash of the adapter's content. The hashes of cached KV blocks include the digest, so
            that KV of another adapter is never used, even if it had the same name.
    """

    name: str
    path: str
    digest: str


@plain
class Request:
    """One request after tokenization.

    Attributes:
        sampling: How tokens are chosen. Its `seed` is always set: the API draws one if the client
            gave none.
        stop_ids: Token ids that end the stream: the client's stop tokens and, without `ignore_eos`,
            EOS. A stop token is never delivered.
        deadline_seconds: Number of seconds until the deadline, counted from the time when the
            request was sent.
        resumption: Tokens that the client received before its stream broke. The request path
            converts them to accepted tokens. Workers never receive this field.
        life: Random number by which the client identifies this stream. All calls that resume the
            stream have the same number. A client that reuses a request id for a new request draws a
            new number, so that it does not receive the earlier stream. With 0, the request path
            draws a number for each stream that is not resumed.
        cache_scope: Scope within the tenant in which cached KV is shared, computed by the API.
        images: Images of the prompt, in order. `prompt_token_ids` already holds their tokens.
        pooling: "last" or "mean" for an embedding in place of log-probabilities of the prompt: the
            hidden state of the last token, or the sum over all tokens, after the last norm.
        prefill_only: Whether the answer ends with the token that the prefill chooses, so that a
            prefill worker sends no KV.
    """

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
    adapter: Adapter | None = None
    images: tuple[PromptImage, ...] = ()
    pooling: str = ""
    prefill_only: bool = False
    hints: Hints | None = None

    def __post_init__(self) -> None:
        if self.images:
            check_images(self.images, len(self.prompt_token_ids))
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
        """Key that identifies the stream. All attempts to serve the stream have the same key."""
        return self.tenant, self.request_id, self.life

    @property
    def scoped_images(self) -> tuple[PromptImage, ...]:
        return scoped(self.images, self.tenant, self.cache_scope) if self.images else ()

    def without_pixels(self) -> "Request":
        if not self.images:
            return self
        return replace(self, images=tuple([image.without_pixels() for image in self.images]))

    def most_tokens(self, context_tokens: int) -> int:
        return min(self.sampling.max_tokens, context_tokens - len(self.prompt_token_ids))

    def end_at(self, index: int, token_id: int, context_tokens: int) -> "FinishReason | None":
        """Returns why a child (answer) ends at the generated token with the index `index`, or None
        if it continues. Both the worker and the request path apply this rule."""
        if token_id in self.stop_ids and (
            index >= self.sampling.min_tokens or self.sampling.grammar is not None
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.most_tokens(context_tokens) else None

    def end_among(
        self, first_index: int, token_ids: tuple[int, ...], context_tokens: int
    ) -> "tuple[int, FinishReason | None]":
        """Finds the end of an answer within new tokens.

        Returns:
            The number of leading `token_ids` that belong to the answer, and the reason why the
                answer ends after them. The reason is None if the answer continues.
        """
        left = max(1, self.most_tokens(context_tokens) - first_index)
        if self.stop_ids:
            for count, token_id in enumerate(token_ids[:left], 1):
                if (
                    finish := self.end_at(first_index + count - 1, token_id, context_tokens)
                ) is not None:
                    return count, finish
        return (left, FinishReason.LENGTH) if len(token_ids) >= left else (len(token_ids), None)


class TokenLogprobs(Message, frozen=True):
    """Natural logarithms of the probabilities of one token and of the most likely tokens at its
    position. The distribution is the model's after penalties and bias, and before temperature and
    filters. `experts` are those of earlier positions, if requested (`ChosenExperts.joined`)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    experts: ChosenExperts | None = None


@plain
class Timings:
    """Timings of one request in seconds.

    `kv_bytes_moved` is the number of bytes of KV sent from the prefill mesh to the decode mesh.
    `exposed_transfer_seconds` is the part of the KV transfer that the prefill does not overlap,
    that is the time after the end of the prefill.
    """

    queue_seconds: float = 0.0
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0
    handoff_gap_seconds: float = 0.0
    total_seconds: float = 0.0
    kv_bytes_moved: int = 0
    preemptions: int = 0
    exposed_transfer_seconds: float = 0.0


class CachedTokens(Message, frozen=True):
    """Numbers of prompt tokens with cached KV, by the tier of the cache.

    The tier is the place of the KV when the request arrived: device pages, host memory, disk or
    another worker (peer). KV that was not in device pages was copied into them for this request."""

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
        return {"pages": self.pages, "host": self.host, "disk": self.disk, "peer": self.peer}


@plain
class Usage:
    """Token counts of a request.

    Attributes:
        reasoning_tokens: Number of completion tokens that are reasoning, or None without a
            reasoning parser.
        cached_by_tier: `cached_tokens` by tier, or None if not reported.
        created_tokens: Number of prompt tokens that were cached newly and that the request asked
            to retain, in whole blocks.
        weights: Versions of the weights that chose the completion tokens, in order, each with its
            number of tokens. The server's initial weights have version "". Empty if only these were
            used.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    cached_by_tier: CachedTokens | None = None
    weights: tuple[tuple[str, int], ...] = ()
    created_tokens: int = 0


@plain
class ToolCallDelta:
    """New part of the tool call with the number `index`. The first part has the call's id and name.
    Later parts have pieces of the arguments. All pieces together are the text of a JSON object."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@plain
class StreamEvent:
    """One message of a stream to the client: new tokens of the answer with the number `child`.
    `first_index` is the index of the first new token in that answer.

    A parsed chat answer has `text`, `reasoning` and `tool_calls`. `finish_reason` is set on a
    child's last event, and `stop_string` or `stop_token` with it if the request's stop string or
    one of its `stop_token_ids` ended the answer. `usage` and `timings` are set on the last event of
    the stream. `request_id` and requested `prompt_logprobs` are set on the first event that a
    client receives."""

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
    stop_string: str = ""
    stop_token: int | None = None
