"""One mesh of the research API: the serving executor, driven synchronously by the caller's thread.

Extends `MeshExecutor` in two ways: offered blocks are stored instead of being served to peers, and
a sequence's pages can be read back as blocks. There is no scheduler: a command runs immediately,
and raises an error if too few pages are free.

Only one sequence at a time decodes, in slot 0 of its dp rank. Not thread-safe."""

import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from jdisagg.dispatch.ids import random_id
from jdisagg.engine.replica import Loaded
from jdisagg.engine.research.chunk_runs import KeepingChannel, Run, chunks, whole_token
from jdisagg.engine.research.kv_blocks import KVBlock, KVPlace
from jdisagg.engine.research.kv_cache import KVCache, NextToken
from jdisagg.engine.research.scores import Scores
from jdisagg.errors import BrokenModelError, ConfigError, HandoffError, OverloadedError
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.programs import BLOCK_SPEC, RANK, Programs
from jdisagg.executor.results import PrefillReading
from jdisagg.executor.work_threads import POLL_SECONDS, Waiting
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import (
    DecodeResult,
    DecodeSteps,
    DropBlocks,
    InsertBlock,
    InsertResult,
    PrefillChunk,
    PrefillResult,
    PullBlock,
    PullResult,
    SampleSpec,
    SlotAdmit,
)
from jdisagg.ops.kv_pages import gather_tokens
from jdisagg.ops.kv_rows import block_of
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import MAX_TOP_LOGPROBS, SamplingParams
from jdisagg.scheduler.blocks import padded, split_blocks
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import PageLedger, pages_for
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.in_process import InProcessChannel

PULL_SECONDS = 600.0
STEP = 0  # Commands run one by one, so that results need no step numbers.


class ResearchInstance(MeshExecutor):
    """A model replica that runs commands synchronously: prefill, decode, and transfer of caches."""

    def __init__(
        self,
        name: str,
        loaded: Loaded,
        layout: Layout,
        limits: MeshLimits,
        channel: InProcessChannel,
    ) -> None:
        if limits.kv_spec.has_state:
            raise ConfigError(
                "the research API supports only KV, and this model also keeps state; serve it with"
                " jdisagg generate or jdisagg serve"
            )
        if any(layer.source is not None for layer in limits.kv_spec.layers):
            raise ConfigError(
                "the research API supports only layers with KV of their own, and layers of this"
                " model read the KV of others; serve it with jdisagg generate or jdisagg serve"
            )
        self.layout = layout
        self.vocabulary = loaded.model.vocabulary
        self.ledgers = [PageLedger(limits.pages_per_rank) for _ in range(limits.ranks)]
        self._wire = channel
        self._keeper = KeepingChannel(channel)
        role = MeshRole(prefill=True, decode=True, emit=True)
        programs = Programs(loaded.mesh)
        super().__init__(name, loaded.model, programs, layout, limits, role, self._keeper)
        # Blocks are received in pieces of one KV head, which every sender's layout supports. All
        # senders can then share the resident zeros and the insert programs.
        self.blocks.granule = 1

    @property
    def logprobs_wanted(self) -> int:
        return min(MAX_TOP_LOGPROBS, self.vocabulary)

    def place(self, rank: int = 0) -> KVPlace:
        return KVPlace(self.mesh, rank, self.limits.kv_spec)

    def prefill(self, prompts: Sequence[tuple[int, ...]], spec: SampleSpec) -> list[KVCache]:
        """Computes prompts, as many at the same time as fit into the free pages, and chooses the
        next token of each prompt. Blocks until all are computed. Returns the prompts' caches and
        frees the pages."""
        started = time.perf_counter()
        done: list[Run] = []
        waiting: list[Run] = []
        try:
            for tokens in prompts:
                if waiting and not self._has_room(len(tokens)):
                    self._finish(waiting)
                    done, waiting = done + waiting, []
                rank, owner = self.reserve(len(tokens))
                waiting.append(Run(tokens, 0, rank, owner, (spec,), emits=True))
            self._finish(waiting)
        except BaseException:
            self._keeper.forget()
            self._free(waiting)
            raise
        seconds = time.perf_counter() - started
        return [
            self._cache(run.tokens, run.next_token(), run.rank, run.blocks, seconds)
            for run in done + waiting
        ]

    def compute(self, runs: Sequence[Run], *, logits: bool = False) -> None:
        for chunk in chunks(runs, self.limits):
            rows = [part.row(self.limits, self.ledgers[part.run.rank]) for part in chunk]
            length = max(
                row.offset + padded(len(row.tokens), self.limits.granule_tokens) for row in rows
            )
            width = next(size for size in self.limits.chunk_buckets if size >= length)
            reading = self._issue(PrefillChunk(STEP, width, tuple(rows)))
            result = reading.result()
            assert isinstance(reading, PrefillReading) and isinstance(result, PrefillResult)
            for part, row in zip(chunk, rows, strict=True):
                part.take(row, result, self._keeper)
                if logits:
                    part.run.logits.append(self._scorer.logits(row, reading.last))

    def score(self, run: Run, *, logits: bool = False) -> Scores:
        """Computes the log-probabilities of the run's tokens after `start`. The call blocks. Raises
        BrokenModelError if logits are not finite."""
        self.compute([run], logits=logits)
        given = run.tokens[run.start + 1 :]
        whole = np.concatenate(run.logits)[: len(given)] if logits else None
        scores = Scores.of(given, PromptLogprobs.joined(run.scores), whole)
        if np.isnan(scores.logprobs).any():
            raise BrokenModelError()
        return scores

    def score_prompt(self, prompt: tuple[int, ...], top: int, *, logits: bool = False) -> Scores:
        rank, owner = self.reserve(len(prompt))
        try:
            return self.score(Run(prompt, 0, rank, owner, top=top), logits=logits)
        finally:
            self.ledgers[rank].free(owner)

    def receive(self, kv: KVCache, rank: int, owner: int, codec: str) -> None:
        """Transfers a cache from its mesh into pages of `owner` on this mesh. Blocks until the
        transfer is complete."""
        pages, spec = self.ledgers[rank].pages(owner), self.limits.kv_spec
        offers = [(random_id(), block) for block in kv.blocks]
        try:
            pulls = []
            for offer_id, block in offers:
                first_row = spec.first_row(block.layer)
                stamp = BlockStamp(0, first_row, block.start, block.valid_tokens)
                self._wire.offer(offer_id, block.array, kv.rank, stamp.of_offer(offer_id))
                pull = PullBlock(
                    STEP, offer_id, rank, block.layer, block.block_tokens, PULL_SECONDS, codec=codec
                )
                pulls.append(self._issue(pull))
            inserts: list[Waiting] = []
            for (offer_id, block), pull in zip(offers, pulls, strict=True):
                while not pull.is_ready():
                    time.sleep(POLL_SECONDS)
                result = pull.result()
                assert isinstance(result, PullResult)
                if result.error:
                    raise HandoffError(
                        f"layer {block.layer} of the cache did not arrive: {result.error}"
                    )
                insert = InsertBlock(
                    STEP,
                    offer_id,
                    rank,
                    block.layer,
                    block.block_tokens,
                    block.valid_tokens,
                    block.start,
                    pages[: pages_for(block.stop, self.limits.page_size)],
                    codec=codec,
                )
                inserts.append(self._issue(insert))
            for (_, block), insert in zip(offers, inserts, strict=True):
                inserted = insert.result()
                assert isinstance(inserted, InsertResult)
                if not inserted.intact:
                    raise HandoffError(
                        f"layer {block.layer} of the cache, packed by {codec!r}, differs in"
                        " its pages from what was sent; push it again"
                    )
        finally:
            self._issue(DropBlocks(STEP, tuple(offer_id for offer_id, _ in offers)))
            for offer_id, _ in offers:
                self._wire.release(offer_id)

    def extract(
        self, tokens: tuple[int, ...], chosen: NextToken | None, rank: int, owner: int
    ) -> KVCache:
        """Copies the KV in the owner's pages to a new cache on this mesh. The call blocks."""
        started = time.perf_counter()
        pages = np.asarray(self.ledgers[rank].pages(owner), np.int32)
        blocks: list[KVBlock] = []
        for start, block_tokens, valid_tokens in split_blocks(
            len(tokens), self.limits.granule_tokens
        ):
            coordinates = np.zeros((self.limits.ranks, 2, block_tokens), np.int32)
            positions = np.arange(start, start + valid_tokens)
            coordinates[rank, 0, :valid_tokens] = pages[positions // self.limits.page_size]
            coordinates[rank, 1, :valid_tokens] = positions % self.limits.page_size
            on_mesh = jax.device_put(coordinates, NamedSharding(self.mesh, RANK))
            blocks += [
                KVBlock(layer, start, valid_tokens, self._read(layer, on_mesh))
                for layer in range(len(self._pool.layers))
            ]
        jax.block_until_ready([block.array for block in blocks])
        seconds = time.perf_counter() - started
        return self._cache(tokens, chosen, rank, blocks, seconds)

    def admit(
        self, token: int, position: int, limit: int, spec: SampleSpec, rank: int, owner: int
    ) -> SlotAdmit:
        """Returns the part of a command that admits a sequence to slot 0. The caller passes it to
        the first `decode_step`. `token` is the sequence's last token, whose KV this step writes at
        `position`."""
        return SlotAdmit(
            owner, rank, 0, token, position, limit, self.ledgers[rank].pages(owner), spec
        )

    def decode_step(
        self, rank: int, sampling: SamplingParams, admit: SlotAdmit | None
    ) -> NextToken:
        """Runs one decode step for the sequence in slot 0 of the dp rank. Returns the next token.
        The call blocks."""
        slots = tuple((0,) if index == rank else () for index in range(self.limits.ranks))
        admits = (admit,) if admit else ()
        result = self.issue_and_wait(DecodeSteps(STEP, 1, slots, admits))
        assert isinstance(result, DecodeResult)
        logprobs = result.logprobs[rank][0][0] if result.logprobs else None
        return NextToken(whole_token(result.tokens[rank][0][0]), sampling, logprobs)

    def reserve(self, tokens: int) -> tuple[int, int]:
        """Reserves pages for `tokens` tokens on the dp rank with the most free pages. Returns
        (rank, owner), where `owner` is the id of the reservation. Raises OverloadedError if there
        are too few pages."""
        count = pages_for(tokens, self.limits.page_size)
        rank = max(range(len(self.ledgers)), key=lambda index: self.ledgers[index].free_pages)
        owner = random_id()
        if self.ledgers[rank].reserve(owner, count) is None:
            raise self._full(count, rank)
        return rank, owner

    def grow(self, rank: int, owner: int, tokens: int) -> None:
        ledger = self.ledgers[rank]
        count = pages_for(tokens, self.limits.page_size) - len(ledger.pages(owner))
        if count > 0 and ledger.extend(owner, count) is None:
            raise self._full(count, rank)

    def _has_room(self, tokens: int) -> bool:
        free = max(ledger.free_pages for ledger in self.ledgers)
        return free >= pages_for(tokens, self.limits.page_size)

    def _finish(self, runs: list[Run]) -> None:
        self.compute(runs)
        self._free(runs)

    def _free(self, runs: list[Run]) -> None:
        for run in runs:
            self.ledgers[run.rank].free(run.owner)

    def _full(self, count: int, rank: int) -> OverloadedError:
        free, total = self.ledgers[rank].free_pages, self.limits.pages_per_rank
        return OverloadedError(
            f"{count} KV pages are needed on rank {rank} of {self.layout} and {free} of {total} are"
            " free; close sessions on this mesh, or build the engine with a larger"
            " sessions_per_rank"
        )

    def _cache(
        self,
        tokens: tuple[int, ...],
        chosen: NextToken | None,
        rank: int,
        blocks: list[KVBlock],
        seconds: float,
    ) -> KVCache:
        spec = self.limits.kv_spec
        return KVCache(tokens, chosen, self.layout, self.mesh, rank, spec, tuple(blocks), seconds)

    def _read(self, layer: int, coordinates: jax.Array) -> jax.Array:
        pages, kind, spec = self._pool.layers[layer], self._pool.spec.layers[layer], self._pool.spec

        def body(pages: tuple[jax.Array, ...], coordinates: jax.Array) -> jax.Array:
            page_T, slot_T = coordinates[0]
            parts = [gather_tokens(part, page_T, slot_T) for part in pages]
            return block_of([kind], [parts], spec)[None]

        specs = (self._pool.specs(range(layer, layer + 1))[0], RANK)
        build = lambda: self.programs.compile(body, (pages, coordinates), specs, BLOCK_SPEC)  # noqa: E731
        key = ("extract", coordinates.shape, kind.components)
        return self.programs.get(key, build)(pages, coordinates)
