"""One mesh of the research face: the serving executor, driven by the caller's own thread, one
command after another.

It adds to `MeshExecutor` what holding a cache in the hand needs: blocks that a prefill offers are
kept instead of waiting for a peer, and a sequence's pages can be read back as blocks. Programs,
pages, slots and transfers are the serving ones. A scheduler would be idle here, so that the page
ledger alone decides; every owner is a session or one running prefill.

A sequence decodes alone, in slot 0 of its rank. Not thread-safe: a notebook has one thread."""

import time

import jax
import numpy as np
from jax.sharding import NamedSharding

from jdisagg.engine.instance import Loaded
from jdisagg.engine.kv_cache import KVBlock, KVCache, NextToken
from jdisagg.errors import BrokenModelError, ConfigError, HandoffError, OverloadedError
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.programs import BLOCK_SPEC, RANK, Programs
from jdisagg.executor.work_threads import POLL_SECONDS
from jdisagg.ids import random_id
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import (
    BROKEN_TOKEN,
    DecodeResult,
    DecodeSteps,
    DropBlocks,
    InsertBlock,
    OfferSpec,
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    PullBlock,
    PullResult,
    SampleSpec,
    SlotAdmit,
)
from jdisagg.ops.kv_pages import gather_tokens
from jdisagg.ops.kv_rows import block_of
from jdisagg.request import SamplingParams
from jdisagg.scheduler.blocks import padded, split_blocks
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import PageLedger, pages_for
from jdisagg.transfer.channel import BlockStamp, Channel, Offered, Pull, PullTarget
from jdisagg.transfer.in_process import InProcessChannel

PULL_SECONDS = 600.0
_NO_STAMP = BlockStamp()
STEP = 0  # commands run one by one: their results need no numbers


class KeepingChannel:
    """A `Channel` whose offers stay with the instance that makes them, until it takes them; all
    else is the real channel's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: dict[int, jax.Array] = {}

    def take(self, offer_id: int) -> jax.Array:
        return self._kept.pop(offer_id)

    def forget(self) -> None:
        """Drops what a failed prefill left."""
        self._kept.clear()

    def connect(self, peer: str, card: MeshCard) -> None:
        self._channel.connect(peer, card)

    def disconnect(self, peer: str) -> None:
        self._channel.disconnect(peer)

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = _NO_STAMP
    ) -> None:
        self._kept[offer_id] = block

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        return self._channel.pull(offer_id, target, deadline_seconds)

    def release(self, offer_id: int) -> None:
        self._kept.pop(offer_id, None)

    def revoke(self, offer_id: int, reason: str) -> None:
        self._kept.pop(offer_id, None)

    def offered(self) -> Offered:
        return Offered(len(self._kept), sum(block.nbytes for block in self._kept.values()))

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        return self._channel.bytes_per_pair()


class ResearchInstance(MeshExecutor):
    """A model replica on one mesh that prefills, receives, decodes and gives back,
    synchronously."""

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
                "the research face holds KV alone, and this model keeps state beside it; serve it"
                " by a cluster (launch.generate, launch.serve)"
            )
        self.layout = layout
        self.vocabulary = loaded.model.vocabulary
        self.ledgers = [PageLedger(limits.pages_per_rank) for _ in range(limits.ranks)]
        self._wire = channel
        self._keeper = KeepingChannel(channel)
        role = MeshRole(prefill=True, decode=True, emit=True)
        programs = Programs(loaded.mesh)
        super().__init__(name, loaded.model, programs, layout, limits, role, self._keeper)

    def pull_target(self, block: PullBlock) -> PullTarget:
        """In pieces of one head: they fit every sender's layout, so that one set of resident zeros
        and insert programs serves them all."""
        return self._targets.target(block, self._blocks.layers(block.group, block.groups), 1)

    def prefill(self, tokens: tuple[int, ...], spec: SampleSpec) -> KVCache:
        """Runs the prompt chunk by chunk, chooses the next token, gives the pages back and the
        blocks to the caller. Blocks."""
        started = time.perf_counter()
        rank, owner = self.reserve(len(tokens))
        try:
            blocks: list[KVBlock] = []
            for start in range(0, len(tokens), self.limits.chunk_buckets[-1]):
                chosen, more = self._prefill_chunk(tokens, start, rank, owner, spec)
                blocks += more
        finally:
            self._keeper.forget()
            self.ledgers[rank].free(owner)
        token = chosen.samples[0]
        seconds = time.perf_counter() - started
        next_token = NextToken(_whole(token.token), spec.sampling, token.logprobs)
        return self._cache(tokens, next_token, rank, blocks, seconds)

    def receive(self, kv: KVCache, rank: int, owner: int) -> int:
        """Moves a cache, from whatever mesh, into the owner's pages. Blocks until it is there;
        returns the bytes that moved."""
        pages = self.ledgers[rank].pages(owner)
        offers = [(random_id(), block) for block in kv.blocks]
        moved = 0
        try:
            pulls = []
            for offer_id, block in offers:
                self._wire.offer(offer_id, block.array, kv.rank)
                pulls.append(
                    self._issue(
                        PullBlock(
                            STEP, offer_id, rank, block.layer, block.block_tokens, PULL_SECONDS
                        )
                    )
                )
            for (offer_id, block), pull in zip(offers, pulls, strict=True):
                while not pull.is_ready():
                    time.sleep(POLL_SECONDS)
                result = pull.result()
                assert isinstance(result, PullResult)
                if result.error:
                    raise HandoffError(
                        f"layer {block.layer} of the cache did not arrive: {result.error}"
                    )
                moved += result.bytes_moved
                end = pages_for(block.start + block.valid_tokens, self.limits.page_size)
                self._issue(
                    InsertBlock(
                        STEP,
                        offer_id,
                        rank,
                        block.layer,
                        block.block_tokens,
                        block.valid_tokens,
                        block.start,
                        pages[:end],
                    )
                )
            jax.block_until_ready(self._pool.layers)
        finally:
            self._issue(DropBlocks(STEP, tuple(offer_id for offer_id, _ in offers)))
            for offer_id, _ in offers:
                self._wire.release(offer_id)
        return moved

    def extract(
        self, tokens: tuple[int, ...], next_token: NextToken, rank: int, owner: int
    ) -> KVCache:
        """Copies the owner's pages out as blocks on this mesh. Blocks until they are there."""
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
        return self._cache(tokens, next_token, rank, blocks, seconds)

    def admit(
        self, token: int, position: int, limit: int, spec: SampleSpec, rank: int, owner: int
    ) -> SlotAdmit:
        """What a sequence's first `decode_step` carries: its last known token, whose KV the step
        writes at `position`."""
        return SlotAdmit(
            owner, rank, 0, token, position, limit, self.ledgers[rank].pages(owner), spec
        )

    def decode_step(
        self, rank: int, sampling: SamplingParams, admit: SlotAdmit | None
    ) -> NextToken:
        """One step of the rank's sequence; waits for its token."""
        slots = tuple((0,) if index == rank else () for index in range(self.limits.ranks))
        admits = (admit,) if admit else ()
        result = self.issue_and_wait(
            DecodeSteps(STEP, 1, slots, sampling.shaped, not sampling.greedy, admits)
        )
        assert isinstance(result, DecodeResult)
        logprobs = result.logprobs[rank][0][0] if result.logprobs else None
        return NextToken(_whole(result.tokens[rank][0][0]), sampling, logprobs)

    def reserve(self, tokens: int) -> tuple[int, int]:
        """Pages for so many tokens on the emptiest rank: (rank, owner). Raises `OverloadedError`
        when there are not so many."""
        count = pages_for(tokens, self.limits.page_size)
        rank = max(range(len(self.ledgers)), key=lambda index: self.ledgers[index].free_pages)
        owner = random_id()
        if self.ledgers[rank].reserve(owner, count) is None:
            raise self._full(count, rank)
        return rank, owner

    def grow(self, rank: int, owner: int, tokens: int) -> None:
        """Adds pages until the owner's hold so many tokens."""
        ledger = self.ledgers[rank]
        count = pages_for(tokens, self.limits.page_size) - len(ledger.pages(owner))
        if count > 0 and ledger.extend(owner, count) is None:
            raise self._full(count, rank)

    def _full(self, count: int, rank: int) -> OverloadedError:
        free, total = self.ledgers[rank].free_pages, self.limits.pages_per_rank
        return OverloadedError(
            f"{count} KV pages are wanted on rank {rank} of {self.layout} and {free} of {total} are"
            " free; close sessions on this mesh, or build the engine with a larger"
            " sessions_per_rank"
        )

    def _prefill_chunk(
        self, tokens: tuple[int, ...], start: int, rank: int, owner: int, spec: SampleSpec
    ) -> tuple[PrefillResult, list[KVBlock]]:
        limits = self.limits
        part = tokens[start : start + limits.chunk_buckets[-1]]
        end = start + len(part)
        width = next(
            size
            for size in limits.chunk_buckets
            if size >= padded(len(part), limits.granule_tokens)
        )
        cuts = list(split_blocks(len(part), limits.granule_tokens))
        offers = [
            (OfferSpec(random_id(), layer, offset, size), valid)
            for offset, size, valid in cuts
            for layer in range(limits.layer_groups)
        ]
        pages = self.ledgers[rank].pages(owner)[: pages_for(end, limits.page_size)]
        samples = (spec,) if end == len(tokens) else ()
        row = PrefillRow(
            owner, rank, 0, part, start, pages, samples, tuple(offer for offer, _ in offers)
        )
        result = self.issue_and_wait(PrefillChunk(STEP, width, (row,)))
        assert isinstance(result, PrefillResult)
        taken = [(offer, valid, self._keeper.take(offer.offer_id)) for offer, valid in offers]
        return result, [
            KVBlock(offer.group, start + offer.offset, valid, block)
            for offer, valid, block in taken
        ]

    def _cache(
        self,
        tokens: tuple[int, ...],
        next_token: NextToken,
        rank: int,
        blocks: list[KVBlock],
        seconds: float,
    ) -> KVCache:
        spec = self.limits.kv_spec
        return KVCache(
            tokens, next_token, self.layout, self.mesh, rank, spec, tuple(blocks), seconds
        )

    def _read(self, layer: int, coordinates: jax.Array) -> jax.Array:
        """One layer's rows at (page, slot) [dp, 2, T] of each rank, as a block [dp, C, K, T, H]."""
        pages, kind, spec = self._pool.layers[layer], self._pool.spec.layers[layer], self._pool.spec

        def body(pages: tuple[jax.Array, ...], coordinates: jax.Array) -> jax.Array:
            page_T, slot_T = coordinates[0]
            parts = [gather_tokens(part, page_T, slot_T) for part in pages]
            return block_of([kind], [parts], spec)[None]

        specs = (self._pool.specs(range(layer, layer + 1))[0], RANK)
        build = lambda: self.programs.compile(body, (pages, coordinates), specs, BLOCK_SPEC)  # noqa: E731
        key = ("extract", coordinates.shape, kind.components)
        return self.programs.get(key, build)(pages, coordinates)


def _whole(token: int) -> int:
    """A token that was chosen from finite logits."""
    if token == BROKEN_TOKEN:
        raise BrokenModelError()
    return token
