"""Measures the commands of a mesh's executor: their duration, transferred bytes and requests.

Commands run in order. The time of a command is therefore measured from the end of the previous
command, and not from when the command was queued. Pulls and file commands run in parallel to
others. Their time is measured from when they are posted."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial

from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import (
    HOST,
    CopyPages,
    DecodeSteps,
    DiskResult,
    ExtractBlock,
    ExtractResult,
    InsertBlock,
    LoadBlock,
    PrefillChunk,
    PrefillRow,
    PullBlock,
    PullResult,
    SaveBlock,
    StepCommand,
    StepResult,
)
from jdisagg.observe.observer import Observer
from jdisagg.observe.tracing import Key, Value, offer_key, reservation_key
from jdisagg.scheduler.executor import Executor, MeshLimits

IN_PROCESS = "local"
_NAMES = {
    PrefillChunk: "prefill chunk",
    DecodeSteps: "decode steps",
    InsertBlock: "insert",
    ExtractBlock: "extract",
    PullBlock: "pull",
}
_FILES = (SaveBlock, LoadBlock)


@dataclass(frozen=True, slots=True)
class _Move:
    tier: str
    way: str
    bytes: float


class ObservedExecutor:
    """An `Executor` that passes commands to another one and measures them.

    Args:
        executor: Executor to measure. Its attribute `card` must not be replaced later.
    """

    def __init__(self, worker: str, executor: Executor, observer: Observer) -> None:
        self.limits: MeshLimits = executor.limits
        self.card: MeshCard = executor.card
        self._worker = worker
        self._executor = executor
        self._observer = observer
        self._free_at = 0.0
        self._writers: dict[tuple[int, int], Key] = {}

    def run(self, command: StepCommand) -> "asyncio.Future[StepResult]":
        issued_at = self._observer.now()
        if self._observer.tracing.on:
            self._remember(command)
        running: Awaitable[StepResult] = self._executor.run(command)
        future = asyncio.ensure_future(running)
        if type(command) in _NAMES or type(command) in _FILES:
            future.add_done_callback(partial(self._done, command, issued_at))
        return future

    def close(self) -> None:
        self._executor.close()

    def _done(
        self, command: StepCommand, issued_at: float, future: "asyncio.Future[StepResult]"
    ) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        now = self._observer.now()
        if (move := _move(command, future.result(), self.limits)) is not None:
            metrics, place = self._observer.metrics.tiers, (self._worker, move.tier, move.way)
            metrics.moved.labels(*place).inc(move.bytes)
            metrics.seconds.labels(*place).observe(now - issued_at)
        if isinstance(command, _FILES):
            return
        if isinstance(command, PullBlock):
            result = future.result()
            assert isinstance(result, PullResult)
            self._pulled(command, result, issued_at, now)
            return
        started, self._free_at = max(issued_at, self._free_at), now
        name = _NAMES[type(command)]
        if isinstance(command, DecodeSteps) and command.chunk is not None:
            name = "mixed step"
        self._observer.metrics.meshes.step_seconds.labels(
            self._worker, name.replace(" ", "_")
        ).observe(now - started)
        if self._observer.tracing.on:
            self._record(command, started, now)

    def _pulled(self, command: PullBlock, result: PullResult, issued_at: float, now: float) -> None:
        source = command.peer.partition("#")[0] or IN_PROCESS
        if command.peer != HOST:  # host memory is counted as a tier, not as a link between workers
            metrics, ended = self._observer.metrics.transfers, "arrived"
            if result.error:
                ended = "failed"
            metrics.pulls.labels(source, self._worker, ended).inc()
            metrics.kv_bytes.labels(source, self._worker, command.codec).inc(result.bytes_moved)
            metrics.pull_seconds.labels(source, self._worker).observe(now - issued_at)
        args: dict[str, Value] = {
            "source": source,
            "codec": command.codec,
            "group": command.group,
            "bytes": result.bytes_moved,
        }
        if result.error:
            args["error"] = result.error
        self._observer.tracing.span(
            "pull", issued_at, now, offer_key(command.offer_id), worker=self._worker, **args
        )

    def _record(self, command: StepCommand, started: float, now: float) -> None:
        tracing = self._observer.tracing
        worker = self._worker
        match command:
            case PrefillChunk():
                self._record_chunk(command, started, now)
            case DecodeSteps():
                if command.chunk is not None:
                    self._record_chunk(command.chunk, started, now)
                for admit in command.admits:
                    writer = self._writers.get(
                        (admit.rank, self._page(admit.pages, admit.position))
                    )
                    tracing.instant(
                        "admit",
                        started,
                        writer,
                        worker=worker,
                        child=admit.sample.child,
                        slot=admit.slot,
                        step=command.step,
                    )
            case InsertBlock() | ExtractBlock():
                tracing.span(
                    _NAMES[type(command)],
                    started,
                    now,
                    offer_key(command.offer_id),
                    worker=worker,
                    start=command.start,
                    tokens=command.valid_tokens,
                    group=command.group,
                )

    def _record_chunk(self, command: PrefillChunk, started: float, now: float) -> None:
        tracing = self._observer.tracing
        worker = self._worker
        for row in command.rows:
            args: dict[str, Value] = {
                "start": row.start,
                "tokens": len(row.tokens),
                "step": command.step,
            }
            tracing.span("prefill chunk", started, now, _owner(worker, row), worker=worker, **args)

    def _remember(self, command: StepCommand) -> None:
        match command:
            case DecodeSteps(chunk=PrefillChunk() as chunk):
                self._remember(chunk)
            case PrefillChunk():
                for row in command.rows:
                    self._writers[
                        (row.rank, self._page(row.pages, row.start + len(row.tokens)))
                    ] = _owner(self._worker, row)
            case InsertBlock():
                page = self._page(command.pages, command.start + command.valid_tokens)
                self._writers[(command.rank, page)] = offer_key(command.offer_id)
            case CopyPages():
                for rank, source, destination in command.copies:
                    if (writer := self._writers.get((rank, source))) is not None:
                        self._writers[(rank, destination)] = writer

    def _page(self, pages: tuple[int, ...], end: int) -> int:
        return pages[(end - 1) // self.limits.page_size]


def _move(command: StepCommand, result: StepResult, limits: MeshLimits) -> _Move | None:
    match command, result:
        case ExtractBlock(to_host=True), ExtractResult():
            part = command.groups / limits.layer_groups  # share of the layers in this piece
            return _Move(
                "host", "written", command.valid_tokens * limits.kv_spec.bytes_per_token * part
            )
        case PullBlock(), PullResult(error="") if command.peer == HOST:
            return _Move("host", "restored", result.bytes_moved)
        case SaveBlock(), DiskResult(error=""):
            return _Move("disk", "written", result.bytes_moved)
        case LoadBlock(), DiskResult(error=""):
            return _Move("disk", "restored", result.bytes_moved)
        case _:
            return None


def _owner(worker: str, row: PrefillRow) -> Key:
    return (
        offer_key(row.offers[0].offer_id) if row.offers else reservation_key(worker, row.sequence)
    )
