"""Generation endpoints of the HTTP API: /v1/completions, /v1/chat/completions, /v1/responses
and /v1/messages over a `Frontend`.

An HTTP request may have several prompts. All of them run at the same time, each as a separate
request of the frontend. The HTTP status of a stream is sent when the first event arrives. An
earlier error determines the status. A later error becomes the last event of the stream. During a
long wait, SSE comments keep the connection open."""

import asyncio
import contextlib
import dataclasses
import functools
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, aclosing

import msgspec

from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.options import check_prompt_numbers, prompt_numbers
from jdisagg.dispatch.prompts import Prompt, TokenPrompt, chat_of
from jdisagg.errors import InvalidRequestError, first_error
from jdisagg.observe.request_log import RequestLog, RequestRecord
from jdisagg.request import CachedTokens, FinishReason, Request, SamplingParams, StreamEvent, Usage
from jdisagg.service.calls import read_in_time
from jdisagg.service.http.errors import HttpRefusal
from jdisagg.service.http.exchange import Exchange
from jdisagg.service.http.fields import Fields
from jdisagg.service.http.grammar import named_as_sent
from jdisagg.service.http.message_replies import MessageReply
from jdisagg.service.http.messages import message_from
from jdisagg.service.http.patterns import without_patterns
from jdisagg.service.http.replies import ChatReply, CompletionReply, Heading, Reply, ReplyChoice
from jdisagg.service.http.requests import Asked, chat_from, completion_from, ignored_header
from jdisagg.service.http.response_replies import ResponseReply
from jdisagg.service.http.response_store import Begun, ResponseStore
from jdisagg.service.http.responses import response_from
from jdisagg.service.http.resumption import event_id
from jdisagg.service.http.token_texts import Pieces

COMMENT_SECONDS = 10.0
THREAD_ABOVE_TOKENS = 64
IGNORED = b"jdisagg-ignored-fields"
_PLAIN = re.compile(r"[\x21-\x7e]{1,128}")
_PLAIN_NOT = re.compile(r"[^\x21-\x7e]")


class HttpGeneration:
    """`limit_bytes` is the size limit of a request body, in bytes."""

    def __init__(self, frontend: Frontend, log: RequestLog, limit_bytes: int) -> None:
        self._frontend = frontend
        self._log = log
        self._limit_bytes = limit_bytes
        self._pieces: dict[int, str] = {}

    async def completions(self, exchange: Exchange) -> None:
        await self._answer(exchange, "cmpl-", completion_from, CompletionReply)

    async def chats(self, exchange: Exchange) -> None:
        await self._answer(exchange, "chatcmpl-", chat_from, ChatReply)

    async def responses(
        self, exchange: Exchange, store: ResponseStore | None = None, begun: Begun | None = None
    ) -> None:
        """Answers a request of /v1/responses.

        Args:
            store: Store for the response, or None if the server stores none. A request with `store`
                false is not stored.
            begun: Callback for a response in the background, called with the id and the response
                object when the request is validated.
        """

        def read(fields: Fields) -> Asked:
            return response_from(fields, store, begun)

        await self._answer(exchange, "resp_", read, ResponseReply)

    async def messages(self, exchange: Exchange) -> None:
        await self._answer(exchange, "msg_", message_from, MessageReply)

    async def rendered_chat(self, exchange: Exchange) -> None:
        """Replies with the prompt and the sampling parameters that a request of
        /v1/chat/completions would have."""
        fields, asked = await self._read(exchange, chat_from)
        check_model(asked.sent.model, self._frontend)
        with named_as_sent(fields):
            built = await self._build(asked, asked.prompts[0], asked.sent.name)
        text = await self._frontend.detokenize(built.prompt_token_ids, False)
        sampling = dataclasses.asdict(built.sampling)
        if asked.options.get("seed") is None:
            sampling["seed"] = None  # drawn anew for every request
        shown = {
            "object": "chat.completion.render",
            "model": asked.sent.model or self._frontend.model.name,
            "prompt": text,
            "prompt_token_ids": built.prompt_token_ids,
            "max_model_len": self._frontend.model.context_tokens,
            "sampling_params": sampling,
            "stop_token_ids": built.stop_ids,
        }
        await exchange.reply(msgspec.json.encode(shown))

    async def _read(
        self, exchange: Exchange, read: Callable[[Fields], Asked]
    ) -> tuple[Fields, Asked]:
        fields = Fields.of(await exchange.body(self._limit_bytes))
        exchange.fields = fields.names
        asked = await read_request(fields, read, self._frontend)
        if ignored := ignored_header(fields):
            exchange.reply_headers.append((IGNORED, ignored))
        return fields, asked

    async def _answer(
        self, exchange: Exchange, prefix: str, read: Callable[[Fields], Asked], kind: type[Reply]
    ) -> None:
        with self._log.request("", "") as record:
            fields, asked = await self._read(exchange, read)
            request_id = asked.sent.name or _request_id(exchange)
            exchange.reply_headers += [(name, _header(request_id)) for name in kind.id_headers]
            check_model(asked.sent.model, self._frontend)
            if "last-event-id" in exchange.headers and not asked.resumed:
                raise InvalidRequestError(
                    "last-event-id needs the field resumption, with the ids of all events that"
                    " were received; send both, or neither"
                )
            with watched(exchange), ExitStack() as records:
                with named_as_sent(fields):
                    runs = await self._runs(asked, request_id, record, records, kind.takes_apart)
                model = self._frontend.model
                heading = Heading(
                    prefix + request_id,
                    int(time.time()),
                    asked.sent.model or model.name,
                    model.version or None,
                    {**asked.told, **_sampled(runs[0].sampling)},
                    asked.keep,
                    asked.sent_tools,
                )
                given = functools.partial(
                    self._frontend.token_bytes,
                    skip_special_tokens=runs[0].sampling.skip_special_tokens,
                )
                pieces = Pieces(
                    self._frontend.piece, given, self._pieces, asked.sent.return_tokens_as_token_ids
                )
                reply = kind(heading, asked.sent.streaming, pieces, asked.sent.return_token_ids)
                reply.begin()
                if asked.sent.stream:
                    await _stream(exchange, reply, runs, asked.resumed is not None)
                else:
                    await _whole(exchange, reply, runs)

    async def _runs(
        self,
        asked: Asked,
        request_id: str,
        record: RequestRecord,
        records: ExitStack,
        take_apart: bool,
    ) -> "list[_Run]":
        """Builds a run for each prompt, so that every prompt is validated before the first run
        starts."""
        runs: list[_Run] = []
        numbers = 0
        for number, prompt in enumerate(asked.prompts):
            own_id = f"{request_id}-{number}" if number else request_id
            if number:
                record = records.enter_context(self._log.request(own_id, asked.sent.tenant))
            record.tenant = asked.sent.tenant
            built = await self._build(asked, prompt, own_id)
            record.built(built)
            numbers += prompt_numbers(len(built.prompt_token_ids), built.sampling)
            check_prompt_numbers(numbers)
            echo = await self._text(prompt) if asked.echo else ""
            stream = self._frontend.stream(built, chat_of(prompt) if take_apart else None)
            if asked.resumed is not None and asked.resumed.complete:
                stream = _no_events()
            runs.append(_Run(stream, built, record, asked, number, echo))
        return runs

    async def _build(self, asked: Asked, prompt: Prompt, request_id: str) -> Request:
        return await self._frontend.build_request(
            prompt,
            request_id=request_id,
            deadline_seconds=asked.sent.deadline_seconds,
            tenant=asked.sent.tenant,
            priority=asked.sent.priority,
            cache_salt=asked.sent.salt,
            model=asked.sent.model,
            within_context=asked.within_context,
            resumption=asked.resumed and asked.resumed.resumption,
            life=asked.resumed.life if asked.resumed else 0,
            hints=asked.hints.hints,
            retained_part=asked.hints.retained_part,
            **asked.options,
        )

    async def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, TokenPrompt):
            return await self._frontend.detokenize(prompt.token_ids)
        assert isinstance(prompt, str), "chats refuse echo"
        return prompt


async def read_request(
    fields: Fields, read: Callable[[Fields], Asked], frontend: Frontend
) -> Asked:
    """Reads a body. The fields that it leaves out are those that the reply lists as ignored."""
    asked = await without_patterns(fields, read(fields))
    if any(map(frontend.leaves_calls_in_text, asked.prompts)):
        fields.leave_out("tools.no_parser")
    return asked


class _Run:
    def __init__(
        self,
        events: AsyncGenerator[StreamEvent, None],
        request: Request,
        record: RequestRecord,
        asked: Asked,
        number: int,
        echo: str,
    ) -> None:
        count = request.sampling.n
        self._usage: Usage | None = None  # from the last event
        self._made_tokens = 0
        self.choices = [
            ReplyChoice(number * count + child, request.prompt_token_ids, echo, asked.of_prompt)
            for child in range(count)
        ]
        self._events = events
        self._request = request
        self._record = record
        self._echo = echo
        self._answerless = asked.answerless
        self._begun: set[int] = asked.resumed.begun if asked.resumed else set()
        for child in asked.resumed.children if asked.resumed else ():
            self._made_tokens += len(child.token_ids)

    @property
    def sampling(self) -> SamplingParams:
        return self._request.sampling

    @property
    def usage(self) -> Usage:
        return self._usage or Usage(len(self._request.prompt_token_ids), self._made_tokens)

    async def run(self, take: Callable[[ReplyChoice, StreamEvent, bool], Awaitable[None]]) -> None:
        begun = self._begun
        async with read_in_time(self._request), aclosing(self._events) as events:
            async for event in events:
                self._record.seen(event)
                if event.prompt_logprobs is not None:
                    for choice in self.choices:
                        choice.prompt_logprobs = event.prompt_logprobs
                if self._answerless:
                    event = _without_answer(event)
                first = event.child not in begun
                if first:
                    begun.add(event.child)
                    if self._echo:
                        event = dataclasses.replace(event, text=self._echo + event.text)
                self._made_tokens += len(event.token_ids)
                self._usage = event.usage
                await take(self.choices[event.child], event, first)


def _sampled(sampling: SamplingParams) -> dict[str, object]:
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    used: dict[str, object] = {name: getattr(sampling, name) for name in names}
    return {**used, "top_logprobs": sampling.logprobs or 0}


async def _no_events() -> AsyncGenerator[StreamEvent, None]:
    return
    yield


def _without_answer(event: StreamEvent) -> StreamEvent:
    usage = event.usage and dataclasses.replace(event.usage, completion_tokens=0)
    reason = event.finish_reason and FinishReason.LENGTH
    return dataclasses.replace(
        event, token_ids=(), text="", logprobs=(), finish_reason=reason, usage=usage
    )


async def _made(choices: Sequence[ReplyChoice], make: Callable[[], bytes]) -> bytes:
    """Returns the result of `make`, which encodes the reply for `choices`. If the choices have many
    prompt log-probabilities, `make` runs in a thread, so that it does not delay other streams."""
    numbers = [len(choice.prompt_logprobs) for choice in choices if choice.prompt_logprobs]
    return await asyncio.to_thread(make) if sum(numbers) > THREAD_ABOVE_TOKENS else make()


async def _whole(exchange: Exchange, reply: Reply, runs: Sequence[_Run]) -> None:
    async def take(choice: ReplyChoice, event: StreamEvent, first: bool) -> None:
        choice.add(event)

    await _together([run.run(take) for run in runs])
    choices = [choice for run in runs for choice in run.choices]
    await exchange.reply(await _made(choices, lambda: reply.whole(choices, _sum(runs))))


async def _stream(exchange: Exchange, reply: Reply, runs: Sequence[_Run], ids: bool) -> None:
    began, opening, opened = asyncio.Event(), asyncio.Lock(), False
    comments = asyncio.ensure_future(_comments(exchange, began, reply.waiting))
    until_now = functools.partial(_sum, runs)

    async def take(choice: ReplyChoice, event: StreamEvent, first: bool) -> None:
        nonlocal opened
        if not opened:
            async with opening:  # several prompts may start at once
                began.set()
                await comments
                if not exchange.begun:
                    await exchange.begin_stream()
                opened = True
        if first:
            usage = until_now()
            made = await _made([choice], lambda: reply.chunk(choice, event, first, lambda: usage))
        else:
            made = reply.chunk(choice, event, first, until_now)
        await exchange.frame(event_id(event) + made if ids else made)

    try:
        await _together([run.run(take) for run in runs])
    finally:
        comments.cancel()
    if not exchange.begun:  # all events were received before
        await exchange.begin_stream()
    await exchange.end_stream(reply.end(_sum(runs)))


async def _comments(exchange: Exchange, began: asyncio.Event, comment: bytes) -> None:
    """Sends `comment` periodically until the first event, because proxies close idle
    connections."""
    while not began.is_set():
        try:
            # wait_for loses a cancellation that coincides with the event before Python 3.12.
            async with asyncio.timeout(COMMENT_SECONDS):
                await began.wait()
        except TimeoutError:
            if not exchange.begun:
                await exchange.begin_stream()
            await exchange.comment(comment)


async def _together(runs: Sequence[Coroutine[None, None, None]]) -> None:
    if len(runs) == 1:
        return await runs[0]
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(run)
    except BaseExceptionGroup as failed:
        raise first_error(failed) from None


@contextlib.contextmanager
def watched(exchange: Exchange) -> Iterator[None]:
    task = asyncio.current_task()
    assert task is not None
    watching = asyncio.ensure_future(exchange.gone())
    watching.add_done_callback(lambda _: task.cancel() if exchange.disconnected else None)
    try:
        yield
    finally:
        watching.cancel()


def _sum(runs: Sequence[_Run]) -> Usage:
    if len(runs) == 1:
        return runs[0].usage
    told = [run.usage.cached_by_tier or CachedTokens() for run in runs]
    weights: Counter[str] = Counter()
    for run in runs:
        weights.update(dict(run.usage.weights))
    return Usage(
        sum(run.usage.prompt_tokens for run in runs),
        sum(run.usage.completion_tokens for run in runs),
        sum(run.usage.cached_tokens for run in runs),
        cached_by_tier=sum(told, CachedTokens()),
        weights=tuple(weights.items()),
        created_tokens=sum(run.usage.created_tokens for run in runs),
    )


def check_model(name: str, frontend: Frontend) -> None:
    """Raises HttpRefusal (404) if `name` is neither the served model nor one of its adapters. An
    empty name means the served model."""
    if name in ("", frontend.model.name) or name in frontend.adapters:
        return
    also = " or one of its adapters (/v1/models)" if frontend.adapters.listed else ""
    raise HttpRefusal(
        f"model must be {frontend.model.name!r}, the served model,{also} got {name[:80]!r}",
        404,
        "model_not_found",
    )


def _request_id(exchange: Exchange) -> str:
    """The id is the client's header `x-request-id` with a random suffix, because clients repeat
    their id on retries."""
    drawn = secrets.token_hex(16)
    given = exchange.headers.get("x-request-id", "")
    return f"{given}-{drawn[:8]}" if _PLAIN.fullmatch(given) else drawn


def _header(request_id: str) -> bytes:
    return _PLAIN_NOT.sub("?", request_id).encode("ascii")
