"""Front end of the request path: turns a client's input into a `Request` and streams its events.

Used by the gRPC and HTTP servers and by embedded clusters. This module makes all checks that need
the model: prompt size, context length, token ids, chat roles. It uses the tokenizer and the request
path through Protocols, and imports neither gRPC nor JAX.

Invariants: a prompt over the byte limit is refused before it is tokenized. Long text is tokenized
in a thread, so that it delays no other stream. Every request has a concrete seed, a deadline, and
room for at least one token."""

import asyncio
import contextlib
import dataclasses
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Unpack

from jdisagg import caller
from jdisagg.chat.call_ids import with_ids
from jdisagg.chat.formats import AnswerFormat
from jdisagg.chat.messages import (
    ChatPrompt,
    ToolChoice,
    check_chat,
    json_bytes,
    shown_messages,
    texts_of,
)
from jdisagg.clock import MonotonicClock
from jdisagg.config import LimitsConfig, Mode
from jdisagg.dispatch.answers import ChatAnswers
from jdisagg.dispatch.client_limits import KeyUse, LongTexts
from jdisagg.dispatch.options import (
    MAX_ALLOWED_TOKENS,
    SamplingOptions,
    bias_pairs,
    check_prompt_numbers,
    prompt_numbers,
    restricted,
    sampling_params,
    utf8_bytes,
    within_room,
)
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.dispatch.served_adapters import ServedAdapters
from jdisagg.errors import InvalidRequestError, UnauthenticatedError, UnavailableError
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import close_stream
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    Grammar,
    Request,
    Resumption,
    SamplingDefaults,
    SamplingParams,
    StreamEvent,
    foreign_token,
)

if TYPE_CHECKING:  # the client imports this module, and no router
    from jdisagg.dispatch.weights_control import WeightsControl

MAX_NAME_BYTES = 256
THREAD_ABOVE_BYTES = 8 << 10
MESSAGE_BYTES = 64  # estimate of what a chat template adds to each message
LARGEST_TEXTS = 4
PROBE_CHARACTERS = 16 << 10
PROBE_CHARACTERS_PER_TOKEN = 32
MAX_PRIORITY = 2**31 - 1
PLAIN = AnswerFormat()


class ServingPath(Protocol):
    """The part of `RequestPath` that serves clients. Closing the iterator of `stream` cancels the
    request."""

    def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]: ...

    async def status(self) -> tuple[WorkerStatus, ...]: ...

    async def suspend(self, tenant: str, request_id: str, keep_seconds: float | None) -> None: ...

    async def reset_cache(self) -> int: ...

    async def drain(self) -> None: ...


class ChatTokenizer(Protocol):
    """The model's tokenizer. `encode` adds the BOS token unless `add_special_tokens` is False.
    `token_bytes` returns the bytes that a token adds to a text. `special_ids` are the tokens that
    `decode` omits."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def sampling_defaults(self) -> SamplingDefaults: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        """Renders a `ChatPrompt`. Raises InvalidRequestError if the model has no chat template or
        the template refuses the messages."""
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model. `prefill_layout` is None if one mesh does both prefill and decode.
    `sampling`: Default sampling options of the model, for options that a request leaves unset."""

    name: str
    family: str
    vocabulary: int
    context_tokens: int
    dtype: str
    mode: Mode
    prefill_layout: Layout | None
    decode_layout: Layout
    kv_bytes_per_token: int
    version: str = ""
    sampling: SamplingDefaults = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = str | TokenPrompt | ChatPrompt


class Frontend:
    """Builds requests and streams them through the request path. Refuses a request if another
    request with the same tenant and id is running.

    Args:
        path: Request path, which runs the requests.
        codec: Tokenizer of the served model.
        model: The served model.
        limits: Limits on requests, such as the largest prompt.
        routing: Returns the router's routing status.
        grammars: Compiler of structured output, or None to refuse it.
        answers: Format in which the model writes reasoning and tool calls.
    """

    def __init__(
        self,
        path: ServingPath,
        codec: ChatTokenizer,
        model: ModelInfo,
        limits: LimitsConfig,
        routing: Callable[[], RoutingStatus] = RoutingStatus,
        grammars: GrammarCompiler | None = None,
        answers: AnswerFormat = PLAIN,
    ) -> None:
        self.model = model
        self.adapters = ServedAdapters()
        self.weights: WeightsControl | None = None
        self._grammars = grammars
        self._answers = answers
        self.routing = routing
        self._path = path
        self._codec = codec
        self._limits = limits
        self._running: dict[tuple[str, str], asyncio.Event] = {}
        self._key_use = KeyUse()
        self._clock = MonotonicClock()
        # At least 1 MiB for each, because the template of a chat adds text to many short messages.
        self._long_texts = LongTexts(LARGEST_TEXTS * max(limits.max_prompt_bytes, 1 << 20))

    async def build_request(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        deadline_seconds: float | None = None,
        tenant: str = "",
        priority: int = 0,
        resumption: Resumption | None = None,
        life: int = 0,
        cache_salt: str = "",
        model: str = "",
        within_context: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> Request:
        """Validates and tokenizes a prompt, and builds the request from it.

        Args:
            tenant: Name of the tenant from the client's request. The tenant of the client's bearer
                token (`jdisagg.caller`) takes precedence.
            resumption: Tokens of an earlier stream that the client already has. The new stream
                continues after them.
            life: Random number that identifies the stream across retries (`Request.life`).
            cache_salt: Text that separates prefix caches: only requests with equal salts share
                cached KV.
            model: Name of the model or of one of `adapters`. Empty is the model.
            within_context: Whether a max_tokens for which the context has no room is reduced
                instead of being refused.

        Raises:
            InvalidRequestError: The message names the field, the value and the limit.
        """
        _check_name("request_id", request_id)
        _check_name("tenant", tenant)
        _check_name("cache_salt", cache_salt)
        adapter = self.adapters.find(model, self.model.name)
        who = caller.current()
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {priority}"
            )
        if deadline_seconds is None:
            deadline_seconds = self._limits.default_deadline_seconds
        elif not (deadline_seconds > 0 and math.isfinite(deadline_seconds)):
            raise InvalidRequestError(
                f"deadline_seconds must be positive and finite, got {deadline_seconds}"
            )
        self._check_option_ids(options)
        size_bytes = self._check_prompt(prompt)
        chat = chat_of(prompt)
        options, origin = restricted(chat, options, self._codec.eos_ids)
        sampling = sampling_params(options, self.model.sampling, self.model.context_tokens)
        if sampling.grammar is not None:
            await self._check_grammar(sampling.grammar, origin)
        token_ids = await self._tokens(prompt, size_bytes, within_context=True)
        firm = None if within_context else options.get("max_tokens")
        room_tokens = self._room(len(token_ids), firm)
        sampling = within_room(sampling, SamplingOptions(max_tokens=firm), room_tokens)
        check_prompt_numbers(prompt_numbers(len(token_ids), sampling))
        if chat is not None and self._answers.takes_apart(chat.callable_tools):
            if origin == "bad_words":
                raise InvalidRequestError(
                    "bad_words cannot be used in a chat whose answers are parsed for tool calls or"
                    " reasoning; leave them out"
                )
            # The parser needs the markers, which may be special tokens.
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)
        if resumption is not None:
            self._check_resumption(resumption, len(token_ids), sampling)
        ends = () if sampling.ignore_eos and sampling.grammar is None else self._codec.eos_ids
        return Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling=sampling,
            stop_ids=tuple(dict.fromkeys((*ends, *sampling.stop_token_ids))),
            deadline_seconds=deadline_seconds,
            tenant=who.tenant_of(tenant),
            priority=priority,
            resumption=resumption,
            life=life,
            cache_scope=who.cache_scope(tenant, cache_salt),
            adapter=adapter,
        )

    def _check_option_ids(self, options: SamplingOptions) -> None:
        biased = bias_pairs(options.get("logit_bias") or ())[: MAX_LOGIT_BIAS + 1]
        for name, ids in (
            ("stop_token_ids", (options.get("stop_token_ids") or ())[: MAX_STOP_TOKEN_IDS + 1]),
            (
                "allowed_token_ids",
                (options.get("allowed_token_ids") or ())[: MAX_ALLOWED_TOKENS + 1],
            ),
            ("logit_bias", [token for token, _ in biased]),
        ):
            self._check_ids(name, ids)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokenizes a prompt like `build_request` and returns the token ids. The prompt may be
        longer than the model's context. Raises InvalidRequestError for an invalid prompt."""
        return await self._tokens(prompt, self._check_prompt(prompt), within_context=False)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        # Every token takes at least a byte on the wire, so the same limit bounds the work.
        if len(token_ids) > self._limits.max_prompt_bytes:
            raise InvalidRequestError(
                f"token_ids may hold at most {self._limits.max_prompt_bytes} ids, got"
                f" {len(token_ids)}"
            )
        if len(token_ids) > THREAD_ABOVE_BYTES:
            return await self._long_texts.run(
                len(token_ids), self._decode, token_ids, skip_special_tokens
            )
        return self._decode(token_ids, skip_special_tokens)

    def piece(self, token_id: int) -> str:
        """Returns the text of one token. Incomplete characters become U+FFFD."""
        return self._codec.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """Returns the bytes that one token adds to a text."""
        if skip_special_tokens and token_id in self._codec.special_ids:
            return b""
        return self._codec.token_bytes(token_id)

    def stream(
        self, request: Request, chat: ChatPrompt | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yields the events of a request. Closing this iterator cancels the request.

        Args:
            chat: Chat from which the request was built, or None. Answers to a chat are parsed for
                reasoning and tool calls, except answers that follow a grammar.
        """
        events = self._stream(request)
        if chat is None:
            return events
        if chat.tool_choice is not ToolChoice.REQUIRED and (
            request.sampling.grammar is not None
            or not self._answers.takes_apart(chat.callable_tools)
        ):
            return events
        return ChatAnswers(request, chat, self._answers, self._codec).of(events)

    async def _stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        key = request.tenant, request.request_id
        if request.resumption is not None:
            await self._gone(key)
            if key in self._running:
                raise UnavailableError(
                    f"request_id {request.request_id!r} is still being closed here since its stream"
                    " broke; try again",
                    retry_after_seconds=1.0,
                )
        if key in self._running:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is in use by a running request; choose another"
                " or leave it empty"
            )
        prompt_tokens, resumed = len(request.prompt_token_ids), request.resumption is not None
        with self._key_use.stream(
            caller.current(), prompt_tokens, self._clock.now(), resumed
        ) as used:
            over = self._running[key] = asyncio.Event()
            events = self._path.stream(request)
            try:
                async for event in events:
                    used(len(event.token_ids))
                    yield event
            finally:
                try:
                    await close_stream(events)
                finally:
                    del self._running[key]
                    over.set()

    async def _gone(self, key: tuple[str, str]) -> None:
        """If a client resumes a request, waits until the earlier stream has ended in this
        process."""
        over = self._running.get(key)
        if over is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    over.wait(), self._limits.timeouts.request.resumption_seconds
                )

    async def status(self) -> tuple[WorkerStatus, ...]:
        return await self._path.status()

    async def suspend(
        self, request_id: str, tenant: str = "", keep_seconds: float | None = None
    ) -> None:
        """Suspends a running request of the caller (`RequestPath.suspend`).

        Args:
            keep_seconds: Seconds for which workers keep the KV of the suspended request. None means
                until the request's deadline.

        Raises:
            InvalidRequestError: No such request is running at this server.
            UnavailableError: A worker did not answer.
        """
        seconds = math.inf if keep_seconds is None else keep_seconds
        if not (seconds > 0 and (keep_seconds is None or math.isfinite(seconds))):
            raise InvalidRequestError(
                f"keep_seconds must be positive and finite, got {seconds}; leave it out to keep the"
                " KV as long as the request's deadline allows"
            )
        await self._path.suspend(caller.current().tenant_of(tenant), request_id, seconds)

    async def resume(self, request_id: str, tenant: str = "") -> None:
        """Resumes a suspended request of the caller. Raises the same errors as `suspend`."""
        await self._path.suspend(caller.current().tenant_of(tenant), request_id, None)

    async def reset_cache(self) -> int:
        """Clears the prefix cache of every worker and returns the number of removed blocks. The
        caches serve all tenants, so a caller that belongs to one tenant gets UnauthenticatedError.
        """
        who = caller.current()
        if who.tenant:
            raise UnauthenticatedError(
                f"the cache serves all tenants, and the token belongs to tenant {who.tenant!r};"
                " send a token without a tenant"
            )
        return await self._path.reset_cache()

    def _check_prompt(self, prompt: Prompt) -> int:
        """Checks a prompt without the tokenizer. Returns an estimate of the bytes to tokenize."""
        if isinstance(prompt, TokenPrompt):
            if not prompt.token_ids:
                raise InvalidRequestError(
                    "prompt token_ids is empty: at least one token is needed; send some"
                )
            return 0
        if isinstance(prompt, ChatPrompt):
            return self._check_chat(prompt)
        return self._check_text("prompt", prompt)

    async def _tokens(
        self, prompt: Prompt, size_bytes: int, within_context: bool
    ) -> tuple[int, ...]:
        if isinstance(prompt, TokenPrompt):
            if within_context:
                # Checks the length first, to spend no time on the ids of too long a list.
                self._room(len(prompt.token_ids), None)
            self._check_ids("prompt token_ids", prompt.token_ids)
            return tuple(prompt.token_ids)
        if size_bytes > THREAD_ABOVE_BYTES:
            token_ids = await self._long_texts.run(size_bytes, self._encode, prompt, within_context)
        else:
            token_ids = self._encode(prompt, within_context)
        if not token_ids and within_context:  # an empty text may still have a BOS token
            raise InvalidRequestError(
                "prompt is empty: at least one token is needed to predict the next; send some text"
            )
        self._check_known(token_ids)
        return token_ids

    def _encode(self, prompt: str | ChatPrompt, within_context: bool) -> tuple[int, ...]:
        text, add_special_tokens = prompt, True
        if isinstance(prompt, ChatPrompt):
            # The chat template already contains BOS.
            add_special_tokens = False
            text = self._codec.apply_chat_template(
                shown_messages(with_ids(prompt.messages, self._answers.tools)),
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                arguments=prompt.arguments,
                tools=[tool.shown for tool in prompt.tools] if prompt.callable_tools else (),
            )
        assert isinstance(text, str)
        if within_context:
            self._check_beginning(text)
        return tuple(self._codec.encode(text, add_special_tokens=add_special_tokens))

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self._check_ids("token_ids", token_ids)
        return self._codec.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _check_beginning(self, text: str) -> None:
        """Tokenizes only the start of a very long text. Raises InvalidRequestError if this part
        alone exceeds the model's context.

        Near the cut, the tokens of the start can differ from the tokens of the whole text. The
        check therefore allows twice the context."""
        context = self.model.context_tokens
        probe_characters = PROBE_CHARACTERS + PROBE_CHARACTERS_PER_TOKEN * context
        if len(text) <= 2 * probe_characters:
            return
        probe_tokens = len(self._codec.encode(text[:probe_characters], add_special_tokens=False))
        if probe_tokens > 2 * context:
            raise InvalidRequestError(
                f"prompt has more than {2 * context} tokens in its first {probe_characters}"
                f" characters alone; the model's context holds {context}; shorten the prompt"
            )

    def _check_known(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError for token ids for which the model has no embedding. Some
        tokenizers have such ids for tokens that were added after training."""
        vocabulary, largest = self.model.vocabulary, max(token_ids, default=0)
        if largest >= vocabulary:
            text = self._codec.decode([largest], skip_special_tokens=False)
            raise InvalidRequestError(
                f"prompt holds {text!r:.80}, token {largest} of the tokenizer, which the model does"
                f" not have: its ids are 0 to {vocabulary - 1}; leave it out"
            )

    def _room(self, prompt_tokens: int, max_tokens: int | None) -> int:
        context = self.model.context_tokens
        if prompt_tokens + 1 > context:
            raise InvalidRequestError(
                f"prompt has {prompt_tokens} tokens; the model's context of {context} holds at most"
                f" {context - 1} and one new token; shorten the prompt"
            )
        if max_tokens is not None and prompt_tokens + max_tokens > context:
            raise InvalidRequestError(
                f"max_tokens={max_tokens} and the prompt's {prompt_tokens} tokens exceed the"
                f" model's context of {context}; ask for at most {context - prompt_tokens}, or"
                " leave max_tokens unset"
            )
        return context - prompt_tokens

    def _check_resumption(
        self, resumption: Resumption, prompt_tokens: int, sampling: SamplingParams
    ) -> None:
        if len(resumption.children) != sampling.n:
            raise InvalidRequestError(
                f"accepted names {len(resumption.children)} children of a request with"
                f" n={sampling.n}"
            )
        most = min(sampling.max_tokens, self.model.context_tokens - prompt_tokens)
        for index, child in enumerate(resumption.children):
            given = len(child.token_ids)
            if given > most or (given == most and child.finish_reason is None):
                raise InvalidRequestError(
                    f"accepted tokens of child {index}: {given} leave none of its {most} to go on"
                    " with"
                )
            self._check_ids(f"accepted tokens of child {index}", child.token_ids)

    def _check_chat(self, prompt: ChatPrompt) -> int:
        check_chat(prompt)
        self._check_tools(prompt)
        size_bytes = sum(self._check_text(name, text) for name, text in texts_of(prompt))
        size_bytes += json_bytes("chat_template_kwargs", prompt.arguments)
        size_bytes += sum(
            json_bytes(f"tools[{index}].function.parameters", tool.parameters)
            for index, tool in enumerate(prompt.tools)
        )
        self._check_size("messages", size_bytes)
        return size_bytes + MESSAGE_BYTES * len(prompt.messages)

    async def _check_grammar(self, grammar: Grammar, origin: str) -> None:
        if self._grammars is None:
            raise InvalidRequestError(
                f"{origin or 'grammar'}: {self.model.name!r} has no tokenizer.json, which"
                f" structured output needs; leave {origin or 'the grammar'} out"
            )
        try:
            await self._grammars.admit(grammar, self._limits.timeouts.request.grammar_seconds)
        except InvalidRequestError as error:
            if not origin:
                raise
            fault = error.message.removeprefix("grammar: ")
            raise InvalidRequestError(f"{origin}: its grammar: {fault}") from None

    def _check_tools(self, prompt: ChatPrompt) -> None:
        if prompt.callable_tools and not self._answers.shows_tools:
            raise InvalidRequestError(
                f"tools cannot be used: the chat template of {self.model.name!r} shows none to the"
                " model; describe them in a message"
            )
        forced = prompt.tool_choice is ToolChoice.REQUIRED
        if prompt.callable_tools and not forced and self._answers.tools is None:
            raise InvalidRequestError(
                f"tools cannot be used: the chat template of {self.model.name!r} does not show how"
                " it writes calls; start the server with --tool_parser"
            )

    def _check_text(self, name: str, text: str) -> int:
        self._check_size(name, len(text) if isinstance(text, str) else 0)
        size_bytes = utf8_bytes(name, text)
        self._check_size(name, size_bytes)
        return size_bytes

    def _check_size(self, name: str, size_bytes: int) -> None:
        limit = self._limits.max_prompt_bytes
        if size_bytes > limit:
            raise InvalidRequestError(
                f"{name} has {size_bytes} bytes or more; at most {limit} are taken"
                " (limits.max_prompt_bytes)"
            )

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        vocabulary = self.model.vocabulary
        if (at := foreign_token(token_ids, vocabulary)) is not None:
            raise InvalidRequestError(
                f"{name}[{at}]={token_ids[at]!r} is not a token id of the model; they are 0 to"
                f" {vocabulary - 1}"
            )


def chat_of(prompt: Prompt) -> ChatPrompt | None:
    return prompt if isinstance(prompt, ChatPrompt) else None


def _check_name(name: str, text: str) -> None:
    if utf8_bytes(name, text) > MAX_NAME_BYTES:
        raise InvalidRequestError(
            f"{name} may hold at most {MAX_NAME_BYTES} bytes, got {len(text)} characters"
        )
