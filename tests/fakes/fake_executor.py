"""A mesh without JAX: runs step commands on the toy model, in order, in virtual time, and checks
every one of them.

Each read of a page is verified: what lies there must be the KV of exactly this sequence's prefix,
so a page that was freed and given away too early, a missing copy or a wrong position fails at once.
Offers and pulled blocks are counted, so that a test can ask whether all were released. Pulls come
from connected peers alone; checksums are computed where the real ones are. `Faults` lets pulls
fail, never return or bring something else, breaks the mesh at a step, or lets a command hang."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from jdisagg.errors import UnavailableError
from jdisagg.layout.kv_spec import KvKind, KVSpec
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import (
    HOST,
    BlockChecksum,
    ConnectPeer,
    CopyPages,
    DecodeResult,
    DecodeSteps,
    DisconnectPeer,
    Done,
    DraftRow,
    DropBlocks,
    ExtractBlock,
    ExtractResult,
    FindSaved,
    InsertBlock,
    InsertResult,
    LoadBlock,
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    PullBlock,
    PullResult,
    ReleaseOffers,
    RemoveSaved,
    SampledToken,
    SampleSpec,
    SaveBlock,
    SlotAdmit,
    StepCommand,
    StepResult,
)
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import TokenLogprobs
from jdisagg.scheduler.blocks import padded
from jdisagg.scheduler.executor import MeshLimits
from tests.fakes.fake_disk import FakeDisk, no_disk
from tests.fakes.fake_states import FakeStates
from tests.fakes.toy_grammars import is_forced
from tests.fakes.toy_model import Entry, choose, extend, score

LONGEST_RUN = 5
C = TypeVar("C")


@dataclass
class FakeChannel:
    """Blocks offered by one mesh and pulled by another: (layer groups, entries, when computed); and
    whose they are."""

    offered: dict[int, tuple[range, list[Entry], float]] = field(default_factory=dict)
    owners: dict[int, "FakeExecutor"] = field(default_factory=dict)

    def offer(
        self,
        owner: "FakeExecutor",
        offer_id: int,
        band: range,
        entries: list[Entry],
        ready_at: float,
    ) -> None:
        assert offer_id not in self.owners, "ids are used once"
        self.offered[offer_id] = (band, entries, ready_at)
        self.owners[offer_id] = owner

    def lose(self, owner: "FakeExecutor") -> None:
        """The process of this mesh has died: nothing of it can be pulled any more, what is under
        way neither."""
        owner.gone = True
        for offer_id in [offer_id for offer_id in self.offered if self.owners[offer_id] is owner]:
            del self.offered[offer_id]


@dataclass
class Faults:
    """`pull_error(nth pull)`: an error text, "stall" (never returns), "garble" (brings something
    else), or "" for success. `breaks_at(command)`: the mesh fails there; `hangs_at(command)`: it
    never ends."""

    pull_error: Callable[[int], str] = lambda _: ""
    breaks_at: Callable[[StepCommand], bool] = lambda _: False
    hangs_at: Callable[[StepCommand], bool] = lambda _: False


@dataclass(frozen=True)
class Costs:
    """Virtual seconds."""

    prefill_token: float = 1e-4
    decode_step: float = 1e-2
    pull: float = 5e-3
    other: float = 1e-4


@dataclass
class _Slot:
    """`forced`: its token came when a grammar allowed no other."""

    sequence: int
    token: int
    position: int
    limit: int
    pages: tuple[int, ...]
    spec: SampleSpec
    outputs: list[int]
    state: int
    forced: bool = False


def toy_limits(
    ranks: int = 1,
    page_size: int = 4,
    pages_per_rank: int = 64,
    slots_per_rank: int = 4,
    context_tokens: int = 128,
    chunk_buckets: tuple[int, ...] = (8, 16),
    layer_groups: int = 2,
    granule_tokens: int = 4,
    rows_per_chunk: int = 4,
    samples_per_chunk: int = 8,
    continuing_rows: int = 1,
) -> MeshLimits:
    spec = KVSpec.attention(layers=2, kv_heads=1, head_dim=1, dtype="float32")
    return MeshLimits(
        ranks=ranks,
        page_size=page_size,
        pages_per_rank=pages_per_rank,
        slots_per_rank=slots_per_rank,
        context_tokens=context_tokens,
        chunk_buckets=chunk_buckets,
        batch_buckets=(slots_per_rank,),
        layer_groups=layer_groups,
        granule_tokens=granule_tokens,
        rows_per_chunk=rows_per_chunk,
        samples_per_chunk=samples_per_chunk,
        kv_spec=spec,
        continuing_rows=continuing_rows,
    )


class FakeExecutor:
    """Implements `scheduler.executor.Executor`."""

    def __init__(
        self,
        limits: MeshLimits,
        channel: FakeChannel,
        faults: Faults | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.limits = limits
        self.card = MeshCard((limits.ranks, 1, 1), tuple(range(limits.ranks)), (0,) * limits.ranks)
        self.log: list[StepCommand] = []
        self.pulled: dict[int, list[Entry]] = {}
        self.host: dict[int, tuple[range, list[Entry]]] = {}  # in host memory
        self.disk: FakeDisk | None = None
        self.closed = False
        self.choose_chunks(every_prompt=False)
        self._channel = channel
        self._faults = faults or Faults()
        self._costs = costs or Costs()
        empty: Entry = (-1, -1, -1)
        self._pages: list[list[list[list[Entry]]]] = [
            [
                [[empty] * limits.page_size for _ in range(limits.pages_per_rank)]
                for _ in range(limits.layer_groups)
            ]
            for _ in range(limits.ranks)
        ]
        self._states = FakeStates(limits)
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._pulling: dict[int, object] = {}  # the newest pull of each block
        self.peers: set[str] = set()
        self.accepted = self.rejected = 0  # drafts
        self.gone = False
        self._pulls = 0
        self._free_at = 0.0
        self._broken = False

    def choose_chunks(self, every_prompt: bool) -> None:
        """Sets which chunks its worker may issue, as `MeshExecutor.choose_chunks` does."""
        self._chunks = self.limits.computed_by(every_prompt).chunk_buckets

    def ran(self, kind: type[C]) -> list[C]:
        """Its commands of a kind."""
        return [command for command in self.log if isinstance(command, kind)]

    def run(self, command: StepCommand) -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self.log.append(command)
        if self._broken or self._faults.breaks_at(command):
            self._broken = True
            loop.call_soon(_fail, future, UnavailableError("the fake mesh broke"))
        elif self._faults.hangs_at(command):
            self._free_at = float("inf")
        elif self._free_at == float("inf"):
            pass
        elif isinstance(command, PullBlock):
            self._pull(command, future)
        else:
            result = self._execute(command)
            self._free_at = max(self._free_at, loop.time()) + self._cost(command)
            loop.call_at(self._free_at, _set, future, result)
        return future

    def close(self) -> None:
        self.closed = True

    def _cost(self, command: StepCommand) -> float:
        if isinstance(command, PrefillChunk):
            return command.chunk_tokens * self._costs.prefill_token
        if isinstance(command, DecodeSteps):
            chunk = self._cost(command.chunk) if command.chunk else 0.0
            return command.steps * self._costs.decode_step + chunk
        return self._costs.other

    def _execute(self, command: StepCommand) -> StepResult:
        match command:
            case PrefillChunk():
                return self._prefill(command)
            case DecodeSteps():
                return self._decode(command)
            case InsertBlock():
                return self._insert(command)
            case ExtractBlock():
                return self._extract(command)
            case ConnectPeer():
                assert command.peer not in self.peers, "connected twice"
                self.peers.add(command.peer)
            case DisconnectPeer():
                self.peers.remove(command.peer)
            case DropBlocks():
                for offer_id in command.offer_ids:
                    self.pulled.pop(offer_id, None)
                    self._pulling.pop(offer_id, None)
            case ReleaseOffers():
                for offer_id in command.offer_ids:
                    if command.from_host:
                        self.host.pop(offer_id, None)
                        continue
                    assert offer_id in self._channel.offered or self.gone, (
                        "released twice, or never offered"
                    )
                    self._channel.offered.pop(offer_id, None)
            case FindSaved() | SaveBlock() | LoadBlock() | RemoveSaved():
                return self.disk.run(command, self.host) if self.disk else no_disk(command)
            case CopyPages():
                for rank, source, destination in command.copies:
                    for group in self._pages[rank]:
                        group[destination] = list(group[source])
                self._states.copy(command.states)
        return Done(command.step)

    def _read(self, rank: int, pages: tuple[int, ...], tokens: int) -> int:
        """Verifies positions [0, tokens) in all layer groups and returns their chain."""
        size, chain = self.limits.page_size, 1
        for position in range(tokens):
            page, slot = pages[position // size], position % size
            entry = self._pages[rank][0][page][slot]
            chain = extend(chain, entry[1])
            assert entry == (position, entry[1], chain), (
                f"rank {rank} page {page} slot {slot} holds {entry}, not position {position}"
            )
            for group in self._pages[rank][1:]:
                assert group[page][slot] == entry, f"layer groups differ at position {position}"
        return chain

    def _write(
        self, rank: int, pages: tuple[int, ...], entry: Entry, groups: range | None = None
    ) -> None:
        page, slot = pages[entry[0] // self.limits.page_size], entry[0] % self.limits.page_size
        for group in range(self.limits.layer_groups) if groups is None else groups:
            self._pages[rank][group][page][slot] = entry

    def _prefill(self, chunk: PrefillChunk) -> PrefillResult:
        self._check_chunk(chunk)
        samples: list[SampledToken] = []
        checksums: list[BlockChecksum] = []
        prompts: list[tuple[int, PromptLogprobs]] = []
        ready_at = max(self._free_at, asyncio.get_running_loop().time()) + self._cost(chunk)
        for row in chunk.rows:
            chain = before = self._read(row.rank, row.pages, row.start)
            entries: list[Entry] = []
            for at, token in enumerate(row.tokens):
                chain = extend(chain, token)
                entries.append((row.start + at, token, chain))
                self._write(row.rank, row.pages, entries[-1])
                if row.start + at + 1 == row.snapshot_at:
                    into, end = at + 1, at + 1 == len(row.tokens)
                    assert end or into % self.limits.state_grain == 0
                    self._states.keep(row.rank, row.snapshot, row.snapshot_at, chain)
            for offer in row.offers:
                at = offer.offset - row.offset
                piece = entries[at : at + offer.block_tokens]
                band = range(offer.group, offer.group + offer.groups)
                self._channel.offer(self, offer.offer_id, band, piece, ready_at)
                checksums.append(
                    BlockChecksum(offer.offer_id, checksum(chunk.checksum_key, band, piece))
                )
            if row.prompt_logprobs is not None:
                prompts.append((row.sequence, scores(row, before)))
            end = row.start + len(row.tokens)
            self._states.advance(row.rank, row.state, (row.start, before), (end, chain))
            for spec in row.samples:
                token, logprobs = choose(chain, end, spec, spec.output_history)
                samples.append(SampledToken(row.sequence, spec.child, token, logprobs))
        return PrefillResult(chunk.step, tuple(samples), tuple(checksums), tuple(prompts))

    def _extract(self, command: ExtractBlock) -> ExtractResult:
        entries = (
            self._states.extract(command) if command.kind is KvKind.STATE else self._kv(command)
        )
        band = range(command.group, command.group + command.groups)
        sum_ = BlockChecksum(command.offer_id, checksum(command.checksum_key, band, entries))
        if command.to_host:
            positions = [entry[0] for entry in entries]
            wanted = list(range(command.start, command.start + len(entries)))
            assert command.kind is KvKind.STATE or positions == wanted, entries
            assert command.offer_id not in self.host, "ids are used once"
            self.host[command.offer_id] = (band, entries)
            return ExtractResult(command.step, sum_)
        self._channel.offer(
            self, command.offer_id, band, entries, asyncio.get_running_loop().time()
        )
        return ExtractResult(command.step, sum_)

    def _kv(self, command: ExtractBlock) -> list[Entry]:
        end = command.start + command.valid_tokens
        assert command.valid_tokens <= command.block_tokens
        assert len(command.pages) == -(-end // self.limits.page_size)
        assert command.block_tokens % self.limits.granule_tokens == 0
        assert command.start % self.limits.granule_tokens == 0
        if not command.to_host:
            self._read(command.rank, command.pages, end)
        return self._entries(command.rank, command.group, command.pages, command.start, end)

    def _entries(
        self, rank: int, group: int, pages: tuple[int, ...], start: int, end: int
    ) -> list[Entry]:
        size = self.limits.page_size
        return [
            self._pages[rank][group][pages[position // size]][position % size]
            for position in range(start, end)
        ]

    def _check_chunk(self, chunk: PrefillChunk) -> None:
        limits = self.limits
        assert chunk.rows and chunk.chunk_tokens in self._chunks
        for rank in range(limits.ranks):
            rows = [row for row in chunk.rows if row.rank == rank]
            assert len(rows) <= limits.rows_per_chunk
            assert sum(len(row.samples) for row in rows) <= limits.samples_per_chunk
            going_on = sum(row.start > 0 for row in rows)
            assert all(row.start > 0 for row in rows[:going_on]), "a row that goes on comes first"
            assert going_on <= limits.continuing_rows
            at = 0
            for row in rows:
                assert row.tokens and row.offset == at and row.offset % limits.granule_tokens == 0
                at += padded(len(row.tokens), limits.granule_tokens)
                assert len(row.pages) == -(-(row.start + len(row.tokens)) // limits.page_size)
                _check_offers(row, limits)
            assert at <= chunk.chunk_tokens

    def _pull(self, command: PullBlock, future: "asyncio.Future[StepResult]") -> None:
        loop = asyncio.get_running_loop()
        if command.peer == HOST:
            self._pull_from_host(command, future)
            return
        assert command.peer in self.peers, (
            f"pulled from {command.peer!r}, connected are {self.peers}"
        )
        self._pulls += 1
        error = self._faults.pull_error(self._pulls)
        pull = self._pulling[command.offer_id] = object()
        offered = self._channel.offered.get(command.offer_id)
        if offered is None:
            error = error or "no such offer"
        if error == "stall":
            return
        garbled = error == "garble"
        error = "" if garbled else error
        ready_at = loop.time() if offered is None else max(loop.time(), offered[2])

        def arrive() -> None:
            owner = self._channel.owners.get(command.offer_id)
            if owner is not None and owner.gone:
                _set(future, PullResult(command.step, command.offer_id, 0, "connection reset"))
                return
            dropped = self._pulling.get(command.offer_id) is not pull
            if offered is not None and not error and not dropped:
                assert range(command.group, command.group + command.groups) == offered[0]
                entries = list(offered[1])
                if garbled:
                    entries[-1] = (entries[-1][0], entries[-1][1], entries[-1][2] + 1)
                self.pulled[command.offer_id] = entries
            moved = 0 if error or offered is None else len(offered[1]) * 8
            _set(future, PullResult(command.step, command.offer_id, moved, error))

        loop.call_at(ready_at + self._costs.pull, arrive)

    def _pull_from_host(self, command: PullBlock, future: "asyncio.Future[StepResult]") -> None:
        pull = self._pulling[command.offer_id] = object()

        def arrive() -> None:
            found = self.host.get(command.offer_id)
            error = "" if found else "not in host memory"
            if found and self._pulling.get(command.offer_id) is pull:
                assert found[0] == range(command.group, command.group + command.groups)
                assert command.offer_id not in self.pulled, "pulled twice at a time"
                self.pulled[command.offer_id] = list(found[1])
            moved = len(found[1]) * 8 if found else 0
            _set(future, PullResult(command.step, command.offer_id, moved, error))

        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self._costs.pull, arrive)

    def _insert(self, command: InsertBlock) -> InsertResult:
        entries = self.pulled.pop(command.offer_id)
        if command.kind is KvKind.STATE:
            self._states.insert(command, entries)
            found = checksum(command.checksum_key, range(1), entries)
            return InsertResult(command.step, command.offer_id, found)
        assert len(entries) == command.valid_tokens <= command.block_tokens
        assert entries[0][0] == command.start
        assert len(command.pages) == -(
            -(command.start + command.valid_tokens) // self.limits.page_size
        )
        band = range(command.group, command.group + command.groups)
        end = command.start + command.valid_tokens
        for entry in entries:
            self._write(command.rank, command.pages, entry, band)
        written = {
            group: self._entries(command.rank, group, command.pages, command.start, end)
            for group in band
        }
        sums = [
            checksum(command.checksum_key, range(group, group + 1), found)
            for group, found in written.items()
        ]
        return InsertResult(command.step, command.offer_id, sum(sums) % (1 << 64))

    def _mixed(self, command: DecodeSteps, chunk: PrefillChunk) -> DecodeResult:
        assert chunk.chunk_tokens in self.limits.mixed_buckets or chunk.rows
        assert command.steps == 1 and not command.drafts
        part = self._prefill(chunk)
        return msgspec.structs.replace(
            self._decode(msgspec.structs.replace(command, chunk=None)), chunk=part
        )

    def _decode(self, command: DecodeSteps) -> DecodeResult:
        if command.chunk is not None:
            return self._mixed(command, command.chunk)
        for admit in command.admits:
            self._admit(admit)
        for grow in command.grows:
            slot = self._slots[grow.rank, grow.slot]
            assert grow.pages[: len(slot.pages)] == slot.pages and grow.limit > slot.limit
            slot.pages, slot.limit = grow.pages, grow.limit
        rows = [
            [self._slots[rank, slot] for slot in slots] for rank, slots in enumerate(command.slots)
        ]
        assert any(rows) and len(rows) == self.limits.ranks
        assert all(
            len(set(slots)) == len(slots) <= self.limits.batch_buckets[-1]
            for slots in command.slots
        )
        every = [slot.spec.sampling for slots in rows for slot in slots]
        assert command.masked == any(sampling.grammar is not None for sampling in every)
        scored = any(sampling.logprobs is not None for sampling in every)
        drafts = {(one.rank, one.row): one for one in command.drafts}
        assert len(drafts) == len(command.drafts) and (not drafts or command.steps == 1)
        for rank in range(len(rows)):
            used = sum(one.count for one in command.drafts if one.rank == rank)
            assert used <= self.limits.extra_rows(self.limits.batch_buckets[-1])
        steps = [
            [
                [self._step(rank, slot, drafts.get((rank, row))) for row, slot in enumerate(slots)]
                for rank, slots in enumerate(rows)
            ]
            for _ in range(command.steps)
        ]
        taken = [
            [[one for step in steps for one in step[rank][row]] for row in range(len(slots))]
            for rank, slots in enumerate(rows)
        ]
        tokens = tuple(tuple(tuple(one[0] for one in row) for row in rank) for rank in taken)
        logprobs = tuple(tuple(tuple(one[1] for one in row) for row in rank) for rank in taken)
        return DecodeResult(command.step, tokens, logprobs if scored else ())

    def _admit(self, admit: SlotAdmit) -> None:
        assert 0 <= admit.slot < self.limits.slots_per_rank
        assert admit.position < admit.limit <= len(admit.pages) * self.limits.page_size
        slot = _Slot(
            admit.sequence,
            admit.token,
            admit.position,
            admit.limit,
            admit.pages,
            admit.sample,
            list(admit.sample.output_history),
            admit.state,
        )
        self._slots[admit.rank, admit.slot] = slot

    def _step(
        self, rank: int, slot: _Slot, drafts: DraftRow | None
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """A token, and those after accepted drafts or in a run of forced ones, up to the limit."""
        if slot.position >= slot.limit:
            return [(-1, None)]
        taken = [self._token(rank, slot)]
        known, slot.forced = slot.forced, is_forced(slot.token, slot.spec, tuple(slot.outputs))
        while known and slot.forced and slot.position < slot.limit and len(taken) < LONGEST_RUN:
            taken.append(self._token(rank, slot))
            slot.forced = is_forced(slot.token, slot.spec, tuple(slot.outputs))
        if drafts is not None and len(taken) == 1 and not slot.forced:
            taken += self._verified(rank, slot, drafts)
        return taken

    def _verified(
        self, rank: int, slot: _Slot, drafts: DraftRow
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """The tokens after accepted drafts. KV of rejected ones is left in the pages, as it is."""
        assert 0 < drafts.count < self.limits.longest_run and slot.position >= drafts.start
        first = slot.position - drafts.start
        guess, taken = drafts.tokens[first : first + drafts.count], []
        for position, draft in enumerate(guess, slot.position):
            if position >= slot.limit:
                break
            if position == slot.position and draft == slot.token:
                taken.append(self._token(rank, slot))
                self.accepted += 1
            else:
                self._write(rank, slot.pages, (-1, draft, 0))
                self.rejected += 1
        return taken

    def _token(self, rank: int, slot: _Slot) -> tuple[int, TokenLogprobs | None]:
        before = self._read(rank, slot.pages, slot.position)
        chain = extend(before, slot.token)
        self._write(rank, slot.pages, (slot.position, slot.token, chain))
        slot.position += 1
        self._states.advance(rank, slot.state, (slot.position - 1, before), (slot.position, chain))
        slot.token, logprobs = choose(chain, slot.position, slot.spec, tuple(slot.outputs))
        slot.outputs.append(slot.token)
        return slot.token, logprobs


def checksum(key: int, band: range, entries: list[Entry]) -> int:
    """Keyed and additive over layer groups and entries, as the real one is."""
    return sum(hash((key, group, entry)) for group in band for entry in entries) % (1 << 64)


def _check_offers(row: PrefillRow, limits: MeshLimits) -> None:
    """Every layer group's offers tile the row's padded room from the first offered token on; each
    is a power of two."""
    if not row.offers:
        return
    first = min(offer.offset for offer in row.offers)
    assert (first - row.offset) % limits.granule_tokens == 0
    for group in range(limits.layer_groups):
        at = first
        its = [offer for offer in row.offers if offer.group <= group < offer.group + offer.groups]
        for offer in sorted(its, key=lambda offer: offer.offset):
            assert offer.offset == at and offer.block_tokens >= limits.granule_tokens
            assert offer.block_tokens & (offer.block_tokens - 1) == 0
            at += offer.block_tokens
        assert at == row.offset + padded(len(row.tokens), limits.granule_tokens)


def _fail(future: "asyncio.Future[StepResult]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _set(future: "asyncio.Future[StepResult]", result: StepResult) -> None:
    if not future.done():
        future.set_result(result)


def scores(row: PrefillRow, chain: int) -> PromptLogprobs:
    """`chain`: of what comes before the row."""
    top, found = row.prompt_logprobs or 0, []
    following = (row.following,) if row.following >= 0 else ()
    assert bool(following) != bool(row.samples), "the last part samples, and only it"
    for token, after in zip(row.tokens, (*row.tokens[1:], *following), strict=False):
        chain = extend(chain, token)
        found.append(score(chain, after, top))
    return PromptLogprobs.of(top, found)
