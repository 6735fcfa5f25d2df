"""Runs one attempt: the execution of some children (parallel samples) of a request on a pair of
workers. Its steps:

    reserve     the decode worker reserves pages for prompt and growth, before any prefill
    prefill     the prefill worker computes and offers its KV; its reply carries the first tokens,
                which are streamed while the KV is still being transferred
    receive     the decode worker pulls the KV, and repeats the first tokens
    decode      spans of tokens, until each child has ended
    failover    a failed prefill worker is replaced; the reservation, the received KV and the first
                tokens remain valid
    migrate     a running sequence continues at another decode worker when its worker requests it

dispatch/request_path.py decides what follows an attempt. If the task of an attempt is cancelled,
everything that the attempt holds at both workers is freed."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine

import msgspec

from jdisagg.clock import to_the_end
from jdisagg.dispatch.migration import Migration
from jdisagg.dispatch.placer import PlacementHandle
from jdisagg.dispatch.request_context import RequestContext, ReservationHandle, quietly, reserve
from jdisagg.dispatch.request_run import RequestRun
from jdisagg.errors import (
    HandoffError,
    InvalidRequestError,
    JdisaggError,
    OverloadedError,
    UnavailableError,
)
from jdisagg.messages.ports import (
    FirstToken,
    GenerateCall,
    HandoffSource,
    PrefillCall,
    ResumeCall,
    SourceLost,
    Span,
    SpanEnd,
    close_stream,
)
from jdisagg.request import TokenLogprobs

Part = asyncio.Task[None]  # prefill and decode run as two tasks at the same time


class Attempt:
    """One attempt to run some children of a request.

    Args:
        preempted: Function that is called with the index of each child that its worker preempted.
            Another attempt then continues the child.

    Attributes:
        refused: Workers whose limits the request exceeds.
    """

    def __init__(
        self,
        context: RequestContext,
        run: RequestRun,
        children: tuple[int, ...],
        preempted: Callable[[int], None],
    ) -> None:
        self.number = run.next_attempt()
        self.open = set(children)
        self.failed: set[str] = set()
        self.refused: set[str] = set()
        self.children = tuple(run.as_child(index) for index in children)
        self._context = context
        self._times = context.limits.timeouts.request
        self._run = run
        self._preempted = preempted
        self._had = {child.index: len(child.accepted) for child in self.children}
        self._ended: set[int] = set()  # children that ended at their worker
        self._firsts: dict[int, FirstToken] = {}
        self._joined = False
        self.received = False
        self._migration: Migration | None = None
        # Source of the KV.
        self._source: HandoffSource | None = None
        self._prefilling: Part | None = None
        self._sources = 1
        self._lost: deque[SourceLost] = deque()
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        return not self.open and len(self._ended) == len(self.children)

    def suspend(self) -> None:
        """Tells the decode worker, before it hears that the stream is closed, that blocks are
        awaited. What the worker still reports starts no attempt."""
        self.open.clear()
        if self.received and not self._run.request.prefill_only:
            call = self._held.port.cancel(self._held.key, awaited=True)
            ending = asyncio.create_task(quietly(call, self._times.close_seconds))
            self._run.clean_up(ending)

    async def run(self, placement: PlacementHandle) -> None:
        """Runs the attempt until every child has finished. Raises the errors of the workers."""
        self._placement = placement
        decision = placement.decision
        began = self._context.clock.now()
        if self._run.request.prefill_only and decision.prefill is not None:
            return await self._prefill_alone(decision.prefill)
        # a decode worker may have cached all KV of an answer that gave way; the router learns of
        # full blocks only later, and never of the rest
        computes = decision.prefill is None or bool(self.children[0].accepted)
        try:
            held = self._held = await reserve(
                self._context,
                self._run,
                decision.decode,
                self.children,
                self.number,
                computes=computes,
                peer=self._peer_of(decision.decode),
            )
        except JdisaggError as error:
            self._blame(decision.decode, error)
            raise
        self._run.queue_seconds += self._context.clock.now() - began
        self.received = True
        try:
            prefill = await self._prefill_worker(held) if computes else decision.prefill
            if prefill is None:
                placement.prefill_sent()
                self._run.note_cached(held.reservation.cached, held.reservation.block_tokens)
                await self._decode(held, None)
            else:
                await self._hand_off(held, prefill)
        finally:
            if len(self._ended) < len(self.children):
                await to_the_end(self._free(held))

    async def _prefill_worker(self, held: ReservationHandle) -> str | None:
        """A prefill worker is needed if the decode worker has so few tokens cached that its running
        streams would stall for more than one chunk."""
        known = self._run.prompt_tokens + len(self.children[0].accepted)
        lacking = known - held.reservation.cached_tokens
        if lacking <= self._context.placer.most_computed(held.worker):
            return None
        if (prefill := self._placement.decision.prefill) is not None:
            return prefill
        self._deviated("appends_handed_over")
        return await self._another_prefill(held)

    async def _hand_off(self, held: ReservationHandle, prefill: str) -> None:
        source = self._name_source(prefill, held)
        decoding = self._begin(self._decode(held, source))
        reservation = held.reservation
        self._prefilling = self._begin(
            self._prefill(source, reservation.weights, reservation.cached_tokens, held)
        )
        try:
            while (failure := await self._failure(decoding)) is not None:
                await self._failover(held, decoding, failure)
            if decoding.done():
                decoding.result()
        except BaseException:
            await to_the_end(self._end_hand_off(decoding))
            raise
        if not decoding.done() or not _succeeded(self._prefilling):
            await to_the_end(self._end_hand_off(decoding))

    async def _prefill_alone(self, worker: str) -> None:
        """The answer ends with the first token, so nothing is reserved or handed over."""
        weights = self._context.placer.weights(worker)
        self._source = self._new_source(worker, weights)
        self.received = True
        try:
            await self._prefill(self._source, weights)
        except JdisaggError as error:
            self._blame(worker, error)
            raise
        finally:
            await to_the_end(self._release(self._times.close_seconds))
        self._ended |= {child.index for child in self.children}

    async def _failure(self, decoding: Part) -> UnavailableError | OverloadedError | None:
        while True:
            self._news.clear()
            if decoding.done() or not (self.open or self.over):
                return None
            while self._lost:
                lost = self._lost.popleft()
                if self._source and lost.handoff_id == self._source.handoff_id:
                    self._placement.lost(self._source.worker, self._held.worker)
                    return HandoffError(
                        f"KV from worker {self._source.worker!r} did not arrive: {lost.reason}"
                    )
            if self._prefilling is not None and self._prefilling.done():
                error = self._prefilling.exception()
                if isinstance(error, HandoffError):
                    # The receiver ended the transfer, because it preempted the sequence or because
                    # the source failed. It will report the cause.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._times.close_seconds):
                            await self._news.wait()
                    if decoding.done():
                        return None
                if isinstance(error, UnavailableError) or (
                    isinstance(error, OverloadedError) and self._sources > 1
                ):
                    return error
                if isinstance(error, InvalidRequestError) and self._source:
                    self.refused.add(self._source.worker)
                if error is not None:
                    raise error
            await self._news.wait()

    async def _failover(
        self, held: ReservationHandle, decoding: Part, failure: UnavailableError | OverloadedError
    ) -> None:
        """Raises HandoffError after `timeouts.request.sources` prefill workers have failed, because
        the decode worker is then probably at fault."""
        assert self._source is not None
        if self._sources == self._times.sources:
            self.failed.add(held.worker)
            raise HandoffError(
                f"{self._sources} prefill workers failed in a row; the last: {failure.message}"
            ) from failure
        await self._release(self._times.failed_close_seconds)
        self.failed.add(self._source.worker)
        self._sources += 1
        worker = await self._another_prefill(held)
        source = self._name_source(worker, held)
        if worker in self.failed:
            await asyncio.sleep(self._times.source_retry.seconds(self._sources - 1))
        call = ResumeCall(held.key, held.attempt, source, tuple(self._firsts.values()))
        try:
            kept = await held.port.resume_source(call)
        except HandoffError:
            # The reservation has ended, and its stream reports the reason.
            await asyncio.wait({decoding}, timeout=self._times.close_seconds)
            if not decoding.done():
                raise
            return
        except JdisaggError as error:
            self._blame(held.worker, error)
            raise
        self._deviated("sources_replaced")
        if kept is not None:
            self._prefilling = self._begin(
                self._prefill(source, held.reservation.weights, kept, held)
            )

    async def _prefill(
        self,
        source: HandoffSource,
        weights: str,
        from_token: int = 0,
        held: ReservationHandle | None = None,
    ) -> None:
        peer, peer_tokens = self._peer_of(source.worker)
        if held is not None and self.children[0].accepted:
            held_tokens = held.reservation.cached_tokens
            if held_tokens > peer_tokens:
                # blocks of a preempted answer, of which the router learns only later
                peer, peer_tokens = self._new_source(held.worker, weights), held_tokens
        call = PrefillCall(
            request=await self._context.with_pixels(self._run.request),
            attempt=self.number,
            children=self.children,
            handoff_id=source.handoff_id,
            destination=held.worker if held is not None else "",
            from_token=from_token,
            deadline_seconds=self._run.remaining_seconds(),
            age_seconds=self._run.age_seconds(),
            peer=peer,
            peer_tokens=peer_tokens,
            weights=weights,
        )
        self._placement.prefill_sent()
        reply = await self._context.cluster.prefill_port(source.worker).prefill(call)
        self._placement.prefilled()
        self._run.queue_seconds += reply.queue_seconds
        self._run.note_cached(reply.cached, held.reservation.block_tokens if held else 0)
        self._run.accept_prompt(reply.prompt_logprobs)
        for first in reply.tokens:
            # If a child was preempted in the meantime, another attempt generates its first token.
            if first.child in self.open:
                self._accept(
                    first.child,
                    self._had[first.child],
                    (first.token_id,),
                    (first.logprobs,) if first.logprobs else (),
                    weights,
                )

    async def _decode(self, held: ReservationHandle, source: HandoffSource | None) -> None:
        spans = held.port.generate(
            GenerateCall(held.key, held.attempt, self._run.remaining_seconds(), source)
        )
        try:
            while True:
                try:
                    moved = await self._follow(held, spans)
                except JdisaggError as error:
                    self._blame(held.worker, error)
                    raise
                if not moved:
                    break
                await close_stream(spans)
                if self._migration is None:
                    raise HandoffError(
                        f"worker {held.worker!r} reports that a sequence moved, but no other has it"
                    )
                held, placed, spans = self._migration.arrived()
                self._placement.moved(placed)
                self._deviated("sequences_moved")
                self._held, self._migration = held, None
        except BaseException:
            await to_the_end(self._end_decode(spans))
            raise
        await self._end_decode(spans)
        missing = self.open - self._ended
        if missing:
            raise UnavailableError(
                f"the stream of children {sorted(missing)} stopped before its end"
            )

    async def _follow(self, held: ReservationHandle, spans: AsyncIterator[Span]) -> bool:
        async for span in spans:
            if span.lost is not None:
                self._lost.append(span.lost)
                self._news.set()
            elif span.moving is not None:
                await self._migrate(held, span.moving)
            else:
                self._take(held, span)
                if span.end is SpanEnd.MOVED:
                    return True
                if not (self.open or self.over):
                    return False  # the client has all tokens; the worker need not report more
        return False

    async def _migrate(self, held: ReservationHandle, source: HandoffSource) -> None:
        if self._migration is not None:
            await self._migration.close()
        if not source.address:
            source = msgspec.structs.replace(
                source, address=self._context.cluster.address(source.worker)
            )
        children = tuple(self._run.as_child(index) for index in sorted(self.open))
        self._migration = Migration(self._context, self._run, children, held.worker, source)

    # ---- tokens

    def _take(self, held: ReservationHandle, span: Span) -> None:
        if span.end is not None and span.end is not SpanEnd.MOVED:
            self._ended.add(span.child)
        self._run.kv_bytes_moved += span.kv_bytes_moved
        self._run.exposed_transfer_seconds += span.exposed_transfer_seconds
        if span.prompt_logprobs is not None:
            self._run.accept_prompt(span.prompt_logprobs)
        if span.token_ids:
            own = span.first_index + len(span.token_ids) > self._had[span.child] + 1
            if own and not self._joined:
                # The decode worker computed a token itself, so the prompt's KV has arrived.
                self._joined = True
                self._placement.handed_over(
                    self._source.worker if self._source else None, held.worker
                )
            self._accept(span.child, span.first_index, span.token_ids, span.logprobs, span.weights)
        if span.end is SpanEnd.PREEMPTED and span.child in self.open:
            self.open.discard(span.child)
            preempted = self._run.children[span.child]
            preempted.preempted(span.yielded, self._context.clock.now())
            self._preempted(span.child)

    def _accept(
        self,
        index: int,
        first_index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        weights: str,
    ) -> None:
        at = self._had[index] - first_index
        if index not in self._firsts and 0 <= at < len(token_ids):
            self._firsts[index] = FirstToken(
                index, token_ids[at], logprobs[at] if logprobs else None
            )
            self._placement.prefilled()
        self._run.accept(index, first_index, token_ids, logprobs, weights)
        if index in self.open and self._run.children[index].finish is not None:
            self.open.discard(index)
            if not self.open:
                self._news.set()
            elif index not in self._ended:
                self._run.clean_up(asyncio.create_task(self._end_child(index)))

    def _deviated(self, cause: str) -> None:
        self._run.as_planned = False
        self._context.counters.add(cause)

    # ---- workers

    async def _another_prefill(self, held: ReservationHandle) -> str:
        run, placer = self._run, self._context.placer
        avoid = run.avoid(placer.life) | self.failed
        worker = await placer.another_prefill(avoid, held.worker, run.unfit)
        self._placement.prefill_at(worker)
        return worker

    def _name_source(self, worker: str, held: ReservationHandle) -> HandoffSource:
        self._source = self._new_source(worker, held.reservation.weights)
        return self._source

    def _peer_of(self, worker: str) -> tuple[HandoffSource | None, int]:
        decision = self._placement.decision
        computes = decision.prefill or decision.decode
        if computes != worker or not decision.peer or decision.peer in self.failed:
            return None, 0
        weights = self._context.placer.weights(worker)
        return self._new_source(decision.peer, weights), decision.peer_tokens

    def _new_source(self, worker: str, weights: str) -> HandoffSource:
        cluster, new_id = self._context.cluster, self._context.new_id()
        address, boot_id = cluster.address(worker), cluster.boot_id(worker)
        return HandoffSource(worker, new_id, address, boot_id, weights)

    def _begin(self, part: Coroutine[object, object, None]) -> Part:
        task = asyncio.create_task(part)
        task.add_done_callback(lambda _: self._news.set())
        return task

    def _blame(self, worker: str, error: JdisaggError) -> None:
        """A failed hand-off is not recorded, because the worker that reports the failure may be
        healthy."""
        if isinstance(error, InvalidRequestError):
            self.refused.add(worker)
        elif isinstance(error, UnavailableError) and not isinstance(error, HandoffError):
            self.failed.add(worker)

    # ---- the end

    async def _end_child(self, child: int) -> None:
        await quietly(self._held.port.cancel(self._held.key, child), self._times.close_seconds)

    async def _end_decode(self, spans: AsyncIterator[Span]) -> None:
        await close_stream(spans)
        if self._migration is not None:
            await self._migration.close()

    async def _end_hand_off(self, decoding: Part) -> None:
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        await self._release(self._times.close_seconds)

    async def _release(self, seconds: float) -> None:
        if self._prefilling is not None:
            self._prefilling.cancel()
            await asyncio.gather(self._prefilling, return_exceptions=True)
            self._prefilling = None
        port = self._context.cluster.prefill.get(self._source.worker) if self._source else None
        if port is not None and self._source is not None:
            await quietly(port.cancel_prefill(self._source.handoff_id), seconds)

    async def _free(self, first: ReservationHandle) -> None:
        for held in (first, *([] if self._held is first else [self._held])):
            failed = held.worker in self.failed
            await quietly(
                held.port.cancel(held.key),
                self._times.failed_close_seconds if failed else self._times.close_seconds,
            )


def _succeeded(task: Part | None) -> bool:
    return task is None or (task.done() and not task.cancelled() and task.exception() is None)
