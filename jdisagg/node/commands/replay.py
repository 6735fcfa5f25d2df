"""Runs recorded commands on new meshes and compares the sampled tokens with the recorded ones.

All recorded meshes are rebuilt in this process. A mesh that pulled KV is replayed together with the
meshes that sent the KV. Commands that failed during recording are skipped. If the recorded instance
had several processes, it may have summed floating-point values in another order. The replay may
then choose another token where two tokens are almost equally likely."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import msgspec

from jdisagg.clock import MonotonicClock
from jdisagg.engine.replica import LoadModel
from jdisagg.errors import ConfigError
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.executor.weight_swaps import WeightsSource
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import (
    DecodeResult,
    ExtractBlock,
    InsertBlock,
    PrefillChunk,
    PrefillResult,
    PullBlock,
    PullResult,
    ReleaseOffers,
    StepCommand,
    StepResult,
)
from jdisagg.node.recording import RecordedCommand, Recording, RecordingHeader, rebuild
from jdisagg.transfer.in_process import InProcessChannel

UNDER_WAY = 8
PULL_SECONDS = 600.0


@dataclass
class Replayed:
    """Result of a replay.

    Attributes:
        steps: Number of compared commands.
        tokens: Number of compared tokens.
        left_out: Number of skipped commands.
        difference: Description of the first difference, or empty if there is none.
    """

    steps: int = 0
    tokens: int = 0
    left_out: int = 0
    difference: str = ""


@dataclass
class _Offers:
    """The KV blocks that recorded meshes transferred to each other.

    Attributes:
        made: Ids of the blocks that a mesh offered.
        pulls_left: Number of pulls of each block that are not yet replayed.
        changed: Condition that is notified after each pull.
    """

    made: set[int] = field(default_factory=set)
    pulls_left: dict[int, int] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def pulled(self, offer_id: int) -> None:
        async with self.changed:
            self.pulls_left[offer_id] -= 1
            self.changed.notify_all()

    async def until_pulled(self, offer_ids: Sequence[int]) -> None:
        async with self.changed:
            await self.changed.wait_for(
                lambda: not any(self.pulls_left.get(offer_id) for offer_id in offer_ids)
            )


async def replay(
    recordings: Sequence[Recording],
    load_for: Callable[[RecordingHeader], LoadModel],
    grammars_for: Callable[[RecordingHeader], GrammarCompiler | None] = lambda _: None,
) -> Replayed:
    """Rebuilds every recorded mesh and replays all recordings concurrently. KV blocks are
    transferred between the meshes as in the recording.

    Args:
        load_for: Function that returns the function to load a recording's weights.
        grammars_for: Function that returns the grammar compiler for a recording, or None.

    Raises:
        ConfigError: The recording of a mesh that sent KV is missing, or a block could not be
            transferred again.
    """
    offers = _offers(recordings)
    channel = InProcessChannel(MonotonicClock())
    executors: list[MeshExecutor] = []
    first = 0
    try:
        for recording in recordings:
            last = first + Layout.parse(recording.header.layout).devices
            load = load_for(recording.header)
            executors.append(rebuild(recording.header, jax.devices()[first:last], channel, load))
            executors[-1].constrain(grammars_for(recording.header))
            if isinstance(load, WeightsSource):
                executors[-1].swaps.source = load
            first = last
        streams = [
            _Stream(recording, executor, offers)
            for recording, executor in zip(recordings, executors, strict=True)
        ]
        results = await asyncio.gather(*(stream.run() for stream in streams))
    finally:
        for executor in executors:
            await asyncio.to_thread(executor.close)
    difference = next((result.difference for result in results if result.difference), "")
    return Replayed(
        sum(r.steps for r in results),
        sum(r.tokens for r in results),
        sum(r.left_out for r in results),
        difference,
    )


def _offers(recordings: Sequence[Recording]) -> _Offers:
    offers = _Offers()
    for recording in recordings:
        for entry in recording.entries:
            match entry.command:
                case PrefillChunk(rows=rows):
                    offers.made.update(offer.offer_id for row in rows for offer in row.offers)
                case ExtractBlock(offer_id=offer_id):
                    offers.made.add(offer_id)
                case PullBlock(offer_id=offer_id) if _worked(entry):
                    offers.pulls_left[offer_id] = offers.pulls_left.get(offer_id, 0) + 1
    missing = offers.pulls_left.keys() - offers.made
    if missing:
        raise ConfigError(
            f"replay: {len(missing)} pulled blocks were offered by meshes that were not given;"
            " give the recordings of all meshes that sent KV to these"
        )
    return offers


def _worked(entry: RecordedCommand) -> bool:
    return entry.result is not None and not (
        isinstance(entry.result, PullResult) and entry.result.error
    )


def _sampled(then: PrefillResult, now: PrefillResult) -> list[tuple[str, int, int]]:
    """Returns (description of the place, recorded token, replayed token) for each token that was
    sampled after a prefill chunk."""
    return [
        (f"sequence {a.sequence}.{a.child}", a.token, b.token)
        for a, b in zip(then.samples, now.samples, strict=True)
    ]


class _Stream:
    """Replays one recording on one rebuilt mesh."""

    def __init__(self, recording: Recording, executor: MeshExecutor, offers: _Offers) -> None:
        self._recording, self._executor, self._offers = recording, executor, offers
        self._pulls: dict[int, asyncio.Future[StepResult]] = {}
        self._replayed = Replayed()

    async def run(self) -> Replayed:
        under_way: list[tuple[RecordedCommand, asyncio.Future[StepResult]]] = []
        for entry in self._recording.entries:
            if not _worked(entry):
                self._replayed.left_out += 1
                continue
            command = await self._prepared(entry.command)
            if isinstance(command, PullBlock):
                self._pulls[command.offer_id] = asyncio.create_task(
                    self._pulled(command.offer_id, self._executor.run(command))
                )
                continue
            under_way.append((entry, self._executor.run(command)))
            if len(under_way) >= UNDER_WAY:
                await self._compare(*under_way.pop(0))
        for item in under_way:
            await self._compare(*item)
        await asyncio.gather(*self._pulls.values())
        return self._replayed

    async def _prepared(self, command: StepCommand) -> StepCommand:
        """Waits until a command may run, and returns the command to run. An insert waits until its
        block has arrived. A release waits until its blocks have been pulled. A pull gets a long
        deadline."""
        match command:
            case PullBlock():
                return msgspec.structs.replace(command, deadline_seconds=PULL_SECONDS)
            case InsertBlock():
                pulled = await self._pulls.pop(command.offer_id)
                if isinstance(pulled, PullResult) and pulled.error:
                    raise ConfigError(
                        f"replay: {self._recording.path.name}: a block could not be pulled again:"
                        f" {pulled.error}"
                    )
            case ReleaseOffers():
                await self._offers.until_pulled(command.offer_ids)
        return command

    async def _pulled(self, offer_id: int, pull: asyncio.Future[StepResult]) -> StepResult:
        try:
            return await pull
        finally:
            await self._offers.pulled(offer_id)

    async def _compare(self, entry: RecordedCommand, future: asyncio.Future[StepResult]) -> None:
        now, then = await future, entry.result
        if isinstance(now, PrefillResult) and isinstance(then, PrefillResult):
            tokens = _sampled(then, now)
        elif isinstance(now, DecodeResult) and isinstance(then, DecodeResult):
            tokens = [
                (f"rank {rank}, row {row}, token {k}", a, b)
                for rank, rows in enumerate(then.tokens)
                for row, steps in enumerate(rows)
                for k, (a, b) in enumerate(zip(steps, now.tokens[rank][row], strict=True))
            ]
            if now.chunk is not None and then.chunk is not None:
                tokens += _sampled(then.chunk, now.chunk)
        else:
            return
        self._replayed.steps += 1
        self._replayed.tokens += sum(token >= 0 for _, token, _ in tokens)
        different = next(((where, a, b) for where, a, b in tokens if a != b), None)
        if different and not self._replayed.difference:
            where, a, b = different
            name = type(entry.command).__name__
            self._replayed.difference = (
                f"different: {self._recording.path.name}, command {entry.number} ({name}), {where}:"
                f" {a}, now {b}"
            )
