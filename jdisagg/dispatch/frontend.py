"""Front end of the request path: converts a client's input into a `Request` and streams its events.

This module checks the options, uses the request path through a Protocol, and imports neither gRPC
nor JAX.

Invariant: every request has a concrete seed, a deadline, and room for at least one token."""

import asyncio
import contextlib
import dataclasses
import functools
import math
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Unpack

from jdisagg.chat.formats import FINAL, NEXT_PART, AnswerFormat
from jdisagg.chat.messages import ChatPrompt, ToolChoice
from jdisagg.clock import MonotonicClock
from jdisagg.config import LimitsConfig
from jdisagg.dispatch import caller
from jdisagg.dispatch.answers import ChatAnswers, thinks
from jdisagg.dispatch.client_limits import KeyUse
from jdisagg.dispatch.options import (
    bias_pairs,
    check_prompt_numbers,
    prompt_numbers,
    restricted,
    sampling_params,
    utf8_bytes,
    within_room,
)
from jdisagg.dispatch.prompts import (
    ChatTokenizer,
    Encoded,
    ModelInfo,
    Prompt,
    PromptEncoder,
    chat_of,
)
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.dispatch.served_adapters import ServedAdapters
from jdisagg.errors import (
    CancelledError,
    InvalidRequestError,
    JdisaggError,
    UnauthenticatedError,
    UnavailableError,
)
from jdisagg.grammar.chat_answers import (
    marked_call,
    marker,
    may_think_or_call,
    plain_call,
    with_thought_and_calls,
)
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.messages.ports import SessionAction, SessionCall, SessionReport, close_stream
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.prompt.hints import Hints
from jdisagg.request import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    Grammar,
    Request,
    Resumption,
    SamplingOptions,
    SamplingParams,
    StreamEvent,
    Thought,
    parameters_of,
)

if TYPE_CHECKING:  # the client imports this module, and no router
    from jdisagg.dispatch.weights_control import WeightsControl

MAX_NAME_BYTES = 256
MAX_PRIORITY = 2**31 - 1
PLAIN = AnswerFormat()
_BUDGET = parameters_of(SamplingOptions)["thinking_budget"][1]


class ServingPath(Protocol):
    """The interface of `RequestPath` that the front end needs. Closing the iterator of `stream`
    cancels the request."""

    def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]: ...

    async def status(self) -> tuple[WorkerStatus, ...]: ...

    async def suspend(self, tenant: str, request_id: str) -> None: ...

    def resume(self, tenant: str, request_id: str) -> None: ...

    def end(self, tenant: str, request_id: str, error: JdisaggError) -> None: ...

    async def reset_cache(self) -> int: ...

    async def session(self, call: SessionCall) -> tuple[SessionReport, ...]: ...

    async def drain(self) -> None: ...


@dataclasses.dataclass(eq=False)
class _Running:
    """A running request. `closing` is set once its stream has ended or its client has left, and
    `over` once its id is free again."""

    request: Request
    closing: bool = False
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class Frontend:
    """Builds requests and streams them through the request path. Refuses a request if another
    request with the same tenant and id is running. A request that is sent again replaces the
    earlier one.

    Args:
        grammars: Compiler of grammars for structured output. None means that requests for
            structured output are refused.
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
        self.prompts = PromptEncoder(codec, model, limits, answers)
        self.adapters = ServedAdapters()
        self.weights: WeightsControl | None = None
        self._grammars = grammars
        self._answers = answers
        self.routing = routing
        self._path = path
        self._limits = limits
        self._running: dict[tuple[str, str], _Running] = {}
        self.key_use = KeyUse()
        self._clock = MonotonicClock()
        # Lark expressions of the answer format's markers
        self._marker: Callable[[str], str] = functools.cache(
            lambda text: _marker(self.prompts.codec, text)
        )

    @property
    def model(self) -> ModelInfo:
        return self.prompts.model

    @model.setter
    def model(self, model: ModelInfo) -> None:
        self.prompts.model = model

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
        hints: Hints | None = None,
        retained_part: float = 1.0,
        **options: Unpack[SamplingOptions],
    ) -> Request:
        """Validates and tokenizes a prompt, and builds the request from it.

        Args:
            tenant: Name of the tenant from the client's request. The tenant of the client's bearer
                token (`jdisagg.dispatch.caller`) takes precedence.
            resumption: Tokens of an earlier stream that the client already has. The new stream
                continues after them.
            life: Random number that identifies the stream across retries (`Request.life`).
            cache_salt: Text that separates prefix caches: only requests with equal salts share
                cached KV.
            model: Name of the model or of one of `adapters`. An empty name means the model.
            within_context: Whether to reduce a max_tokens that does not fit into the context. If
                not set, such a request is refused.
            hints: What the client knows about the request.
            retained_part: Part of the prompt to which `hints.retention` applies.

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
        deadline_seconds = self._deadline(deadline_seconds)
        encoded, sampling = await self._encoded(prompt, options, within_context)
        token_ids = encoded.token_ids
        if resumption is not None:
            self._check_resumption(resumption, len(token_ids), sampling)
        ends = (
            ()
            if sampling.ignore_eos and (sampling.grammar is None or sampling.grammar.free)
            else self.prompts.codec.eos_ids
        )
        if hints is not None:
            _check_name("session", hints.session)
            if retained_part < 1.0:
                retained_tokens = math.ceil(retained_part * len(token_ids))
                hints = dataclasses.replace(hints, retained_tokens=retained_tokens)
        images = await self.prompts.images.read(encoded.placed)
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
            images=images,
            hints=hints,
        )

    def _deadline(self, seconds: float | None) -> float:
        if seconds is None:
            return self._limits.default_deadline_seconds
        if not (seconds > 0 and math.isfinite(seconds)):
            raise InvalidRequestError(
                f"deadline_seconds must be positive and finite, got {seconds}"
            )
        return seconds

    async def _encoded(
        self, prompt: Prompt, options: SamplingOptions, within_context: bool
    ) -> tuple[Encoded, SamplingParams]:
        self._check_option_ids(options)
        size_bytes = self.prompts.check(prompt)
        chat = chat_of(prompt)
        budget = options.get("thinking_budget")
        options, origin = restricted(chat, options, self.prompts.codec.eos_ids)
        sampling = sampling_params(options, self.model.sampling, self.model.context_tokens)
        if sampling.grammar is not None:
            await self._check_grammar(sampling.grammar, origin)
        encoded = await self.prompts.encode(prompt, size_bytes, within_context=True)
        firm = None if within_context else options.get("max_tokens")
        room_tokens = self.prompts.room(len(encoded.token_ids), firm)
        sampling = within_room(sampling, SamplingOptions(max_tokens=firm), room_tokens)
        check_prompt_numbers(prompt_numbers(len(encoded.token_ids), sampling))
        if chat is not None and self._answers.takes_apart(chat.callable_tools):
            if origin == "bad_words":
                raise InvalidRequestError(
                    "bad_words cannot be used in a chat whose answers are parsed for tool calls or"
                    " reasoning; leave them out"
                )
            # The parser needs the markers, which may be special tokens.
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)
            open_to_thought = not self._answers.in_headers or budget is not None
            if sampling.grammar is not None and not origin and open_to_thought:
                opened = await self._opened(chat, sampling.grammar, encoded.token_ids)
                sampling = dataclasses.replace(sampling, grammar=opened)
        if budget is not None:
            sampling = await self._limited(budget, chat, sampling, encoded.token_ids, origin)
        return encoded, sampling

    async def _limited(
        self,
        budget: int,
        chat: ChatPrompt | None,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        origin: str,
    ) -> SamplingParams:
        """Limits the reasoning of the answer. A forced tool call has no reasoning."""
        _BUDGET.check("thinking_budget", budget)
        form, codec, marks = self._answers, self.prompts.codec, self._answers.marks
        if marks is None:
            raise InvalidRequestError(
                f"thinking_budget={budget} is not supported: the chat template of"
                f" {self.model.name!r} has no reasoning whose form the server knows; leave it out"
            )
        if origin == "tools":
            return sampling
        grammar = sampling.grammar or Grammar.of_any_text()
        if origin or not may_think_or_call(grammar):
            raise InvalidRequestError(
                f"thinking_budget={budget} cannot be used with {origin or 'this grammar'}, which"
                " restricts the whole answer and leaves no reasoning to limit; leave one of them"
                " out"
            )
        if grammar.free:
            await self._check_grammar(grammar, "thinking_budget")
        if chat is not None:
            begun = thinks(form, chat, prompt_ids, codec)
        else:
            begun = marks.open_in(await self.detokenize(prompt_ids, skip_special_tokens=False))
        closings = tuple(
            tuple(codec.encode(text, add_special_tokens=False))
            for text in form.closings(chat.callable_tools if chat is not None else {})
        )
        thought = Thought(budget, marks.begin, marks.end, closings, begun, form.in_headers)
        grammar = dataclasses.replace(grammar, thought=thought)
        return dataclasses.replace(sampling, grammar=grammar)

    async def _opened(
        self, chat: ChatPrompt, grammar: Grammar, prompt_ids: Sequence[int]
    ) -> Grammar:
        form, tools, codec = self._answers, chat.callable_tools, self.prompts.codec
        calls = [marked_call(self._marker(form.call_mark))] if tools and form.call_mark else []
        if tools and form.plain_calls:
            calls.append(plain_call([*tools]))
        marks = form.marks and (self._marker(form.marks.begin), self._marker(form.marks.end))
        begun = thinks(form, chat, prompt_ids, codec)
        with contextlib.suppress(InvalidRequestError):
            headers = (self._marker(NEXT_PART), self._marker(FINAL))
            more = {"headers": headers} if form.in_headers else {}
            made = with_thought_and_calls(grammar, marks, begun, calls, **more)
            await self._check_grammar(made, "")
            return made
        return grammar

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
            self.prompts.check_ids(name, ids)

    def leaves_calls_in_text(self, prompt: Prompt) -> bool:
        """Returns whether the model may call tools in its answer to a prompt, but no parser knows
        the format of its calls."""
        if not isinstance(prompt, ChatPrompt) or prompt.tool_choice is ToolChoice.REQUIRED:
            return False
        return bool(prompt.callable_tools) and self._answers.tools is None

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokenizes a prompt in the same way as `build_request` and returns the token ids. The
        prompt may be longer than the model's context. Raises InvalidRequestError for an invalid
        prompt."""
        size_bytes = self.prompts.check(prompt)
        return (await self.prompts.encode(prompt, size_bytes, within_context=False)).token_ids

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return await self.prompts.decode(token_ids, skip_special_tokens)

    def piece(self, token_id: int) -> str:
        """Returns the text of one token. Incomplete characters become U+FFFD."""
        return self.prompts.codec.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        if skip_special_tokens and token_id in self.prompts.codec.special_ids:
            return b""
        return self.prompts.codec.token_bytes(token_id)

    def stream(
        self, request: Request, chat: ChatPrompt | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """Closing this iterator cancels the request.

        Args:
            chat: Chat from which the request was built, or None. Answers to a chat are parsed for
                reasoning and tool calls. Answers that follow a Lark grammar are not parsed.
        """
        events = self._stream(request)
        if chat is None:
            return events
        grammar = request.sampling.grammar
        content_only = grammar is not None and not may_think_or_call(grammar)
        if chat.tool_choice is not ToolChoice.REQUIRED and (
            content_only or not self._answers.takes_apart(chat.callable_tools)
        ):
            return events
        return ChatAnswers(request, chat, self._answers, self.prompts.codec).of(events)

    async def _stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        key = request.tenant, request.request_id
        if (earlier := self._running.get(key)) is not None:
            await self._make_way(earlier, request)
        prompt_tokens, resumed = len(request.prompt_token_ids), request.resumption is not None
        with self.key_use.stream(
            caller.current(), prompt_tokens, self._clock.now(), resumed
        ) as used:
            running = self._running[key] = _Running(request)
            events = self._path.stream(request)
            try:
                async for event in events:
                    used(len(event.token_ids))
                    yield event
            finally:
                running.closing = True
                try:
                    await close_stream(events)
                finally:
                    del self._running[key]
                    running.over.set()

    async def _make_way(self, earlier: "_Running", request: Request) -> None:
        """Waits until the request `earlier`, which has the id of `request`, has ended. Ends it if
        `request` resumes or repeats it: its stream broke, perhaps without a sign at this end.

        Raises:
            InvalidRequestError: The earlier request is another one, and still runs.
            UnavailableError: The earlier request does not end in time.
        """
        repeated = earlier.request.prompt_token_ids == request.prompt_token_ids
        if not earlier.closing:
            if request.resumption is None and not repeated:
                raise InvalidRequestError(
                    f"request_id {request.request_id!r} is in use by a running request; choose"
                    " another or leave it empty"
                )
            again = CancelledError("the request was sent again under its id, and runs there")
            self._path.end(request.tenant, request.request_id, again)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                earlier.over.wait(), self._limits.timeouts.request.resumption_seconds
            )
        if (request.tenant, request.request_id) in self._running:
            raise UnavailableError(
                f"request_id {request.request_id!r} is still being closed here since its stream"
                " broke; try again",
                retry_after_seconds=1.0,
            )

    async def status(self) -> tuple[WorkerStatus, ...]:
        return await self._path.status()

    async def suspend(self, request_id: str, tenant: str = "") -> None:
        """Suspends a running request of the caller (`RequestPath.suspend`). Raises
        InvalidRequestError if no such request is running at this server."""
        await self._path.suspend(caller.current().tenant_of(tenant), request_id)

    def resume(self, request_id: str, tenant: str = "") -> None:
        """Resumes a suspended request of the caller. Raises the same error as `suspend`."""
        self._path.resume(caller.current().tenant_of(tenant), request_id)

    async def reset_cache(self) -> int:
        """Clears the prefix cache of every worker and returns the number of removed blocks. The
        caches serve all tenants, so it raises UnauthenticatedError if the caller's token belongs to
        a tenant.
        """
        who = caller.current()
        if who.tenant:
            raise UnauthenticatedError(
                f"the cache serves all tenants, and the token belongs to tenant {who.tenant!r};"
                " send a token without a tenant"
            )
        return await self._path.reset_cache()

    async def session(
        self, key: str, action: SessionAction, tenant: str = "", cache_salt: str = ""
    ) -> tuple[SessionReport, ...]:
        """Shows, restores or drops the KV of a session of the caller.

        Args:
            tenant, cache_salt: Those of the session's requests (`build_request`).

        Returns:
            The reports of the workers that know the session; empty if none does.

        Raises:
            UnavailableError: A worker did not answer (`RequestPath.session`).
        """
        for name, text in (("session", key), ("tenant", tenant), ("cache_salt", cache_salt)):
            _check_name(name, text)
        who, seconds = caller.current(), self._limits.timeouts.request.status_seconds
        scope = who.cache_scope(tenant, cache_salt)
        call = SessionCall(who.tenant_of(tenant), scope, key, action, seconds)
        return await self._path.session(call)

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
                    f"accepted tokens of child {index}: {given} reach its limit of {most}, and"
                    " none is left to generate"
                )
            self.prompts.check_ids(f"accepted tokens of child {index}", child.token_ids)

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


def _marker(codec: ChatTokenizer, text: str) -> str:
    parts = [part for part in re.split(r"(<\|\w+\|>)", text) if part]
    if len(parts) > 1:
        return " ".join(_marker(codec, part) for part in parts)
    found = [
        token_id
        for token_id in codec.encode(text, add_special_tokens=False)
        if codec.decode([token_id], skip_special_tokens=False) == text
    ]
    return marker(text, found[0] if found else None)


def _check_name(name: str, text: str) -> None:
    if utf8_bytes(name, text) > MAX_NAME_BYTES:
        raise InvalidRequestError(
            f"{name} may hold at most {MAX_NAME_BYTES} bytes, got {len(text)} characters"
        )
