"""Blocks that a prefill worker fetches from another one that keeps them, for a prompt that would
compute them (`worker/given_kv.py` is the holder's side).

Who may keep them is a hint of the router's. The holder is asked by the blocks' names and says what
it gives; that comes as the KV of a hand-off comes (`worker/incoming_handoff.py`): pulled, written
into pages of its own, read back, compared with the sum from the holder, acknowledged. So it may be
laid out otherwise there. What has come and was verified stays in the pages as any block does; all
else is computed. A prompt waits no longer than computing would take, measured as it goes; then, or
when nobody waits any more, the fetch ends and the holder is told. Whatever fails is counted
(`peer_fetch_failed`, by cause) and costs time at most. Codecs that lose something are not used."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from jdisagg.config import LimitsConfig
from jdisagg.errors import IncompatiblePeerError, JdisaggError
from jdisagg.messages.ports import FetchCall, HandoffSource
from jdisagg.plain import plain
from jdisagg.scheduler.brought_blocks import BroughtBlocks
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.fetch_prices import MOST_FETCHES, FetchPrices
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.background import BackgroundTasks
from jdisagg.worker.incoming_handoff import Destination, IncomingHandoff
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.peers import Peers
from jdisagg.worker.sender_line import SenderLine, SideCalls
from jdisagg.worker.step_loop import StepLoop


@plain
class FetchPlan:
    """The first blocks of a chain, which are to be on a rank, and who may keep them; tokens of
    other prompts that are to be computed before."""

    rank: int
    chain: Chain
    source: HandoffSource
    ahead_tokens: int = 0


class FetchedKv:
    """Of one mesh, in whose pages `kept` stays."""

    def __init__(
        self,
        kept: Residency,
        loop: StepLoop,
        mesh: MeshLimits,
        peers: Peers,
        limits: LimitsConfig,
        context: WorkerContext,
        counters: Counters,
    ) -> None:
        self.prices = FetchPrices(context.tiers.always)
        self._kept = kept
        self._loop = loop
        self._mesh = mesh
        self._peers = peers
        self._limits = limits
        self._context = context
        self._counters = counters
        self._calls = SideCalls(counters, limits.timeouts.handoff)
        self._sources: list[str] = []  # peers that blocks come from, by their names in commands
        self._closed_until = 0.0
        self._fetching = 0
        self._tasks = BackgroundTasks()

    @property
    def quiet(self) -> bool:
        """Nothing is on its way."""
        return self._tasks.quiet

    def close_for(self, seconds: float) -> None:
        """Nothing is fetched for so long: what is to be forgotten may be kept elsewhere still."""
        self._closed_until = self._context.clock.now() + seconds

    def sweep(self, now: float) -> None:
        self._peers.sweep(now, self._sources)

    async def stop(self) -> None:
        self._tasks.cancel()
        await self._calls.stop()

    def worth(
        self, chain: Chain, source: HandoffSource | None, hinted_tokens: int, ahead_tokens: int
    ) -> FetchPlan | None:
        """What of the beginning of a prompt is better fetched than computed, where another worker
        is believed to keep `hinted_tokens` of it and `ahead_tokens` of others are computed before;
        None: nothing."""
        kept, size = self._kept, self._kept.block_tokens
        if source is None or not chain or self._fetching >= MOST_FETCHES:
            return None
        if self._context.clock.now() < self._closed_until:
            return None
        chain = chain[: kept.usable_tokens(hinted_tokens, to_compute=True) // size]
        known = [kept.match(rank, chain) for rank in range(self._mesh.ranks)]
        most = max(known)
        if not self.prices.worth((len(chain) - most) * size, ahead_tokens):
            return None
        return FetchPlan(known.index(most), chain, source, ahead_tokens)

    def begin(
        self, wanted: FetchPlan, brought: BroughtBlocks, done: Callable[[], None]
    ) -> "asyncio.Task[None]":
        """Fetches. `done` is called once, when it is over, or when computing would be. Whoever
        cancels the task wants it no more. What has come is written down in `brought`."""
        return self._tasks.spawn(self._bring(wanted, brought, done))

    async def _bring(
        self, wanted: FetchPlan, brought: BroughtBlocks, done: Callable[[], None]
    ) -> None:
        known = self._kept.match(wanted.rank, wanted.chain)
        tokens = (len(wanted.chain) - known) * self._kept.block_tokens
        patience = self.prices.patience_seconds(tokens, wanted.ahead_tokens)
        seconds = patience or self._most_seconds
        began, cause = self._context.clock.now(), ""
        self._fetching += 1
        try:
            async with asyncio.timeout(seconds):
                cause = await self._fetch(wanted, brought, seconds)
        except TimeoutError:
            cause = "late"
            # what was given up would have taken longer still
            self.prices.fetched_in(tokens, 2 * (self._context.clock.now() - began))
        except asyncio.CancelledError:
            cause = "unwanted"
            raise
        finally:
            self._fetching -= 1
            if cause:
                self._counters.add("peer_fetch_failed", cause=cause)
        done()

    @property
    def _most_seconds(self) -> float:
        """That a fetch may take where nobody knows what computing takes."""
        return self._limits.pull_seconds * self._limits.timeouts.handoff.pull_tries

    async def _fetch(self, wanted: FetchPlan, brought: BroughtBlocks, seconds: float) -> str:
        """Why not all came that was wanted, if not."""
        kept, rank, chain = self._kept, wanted.rank, wanted.chain
        size, page_size = kept.block_tokens, self._mesh.page_size
        known, owner = kept.match(rank, chain), kept.guest()
        pages = kept.reserve(rank, owner, chain, known * size, len(chain) * size // page_size)
        if pages is None:
            return "room"
        epoch, began, handoff, cause = kept.epoch, self._context.clock.now(), None, ""
        try:
            handoff = await self._begin_hand_off(wanted, pages, known, seconds)
            if handoff is None:
                return "gone"
            await self._receive(handoff)
        except JdisaggError as error:
            spoiled = handoff is not None and handoff.spoiled
            refused = isinstance(error, IncompatiblePeerError)
            cause = "spoiled" if spoiled else "refused" if refused else "lost"
        finally:
            back = handoff.kept_tokens() // size if handoff is not None else known
            fresh = epoch == kept.epoch
            kept.let_go(rank, owner, chain[:back] if fresh else ())
            if fresh:
                brought.add(rank, known, ["peer" for _ in range(back - known)])
                self._counters.add("peer_blocks_fetched", back - known)
                self._counters.add("peer_tokens_restored", (back - known) * size)
        if cause or not fresh:
            return cause or "reset"
        self.prices.fetched_in((back - known) * size, self._context.clock.now() - began)
        return "gone" if back < len(chain) else ""

    async def _begin_hand_off(
        self, wanted: FetchPlan, pages: tuple[int, ...], known: int, seconds: float
    ) -> IncomingHandoff | None:
        """Of the blocks behind the `known` ones, into these pages; None: the holder has none."""
        source, kept = wanted.source, self._kept
        peer = self._peers.find(source)
        line = SenderLine(peer, source, 0, self._calls)
        link = await self._peers.greet(source, peer)
        line.link = replace(link, codec="none")
        call = FetchCall(
            source.handoff_id, self._context.name, wanted.chain, known, kept.block_tokens, seconds
        )
        try:
            reply = await peer.fetch(call)
        except BaseException:
            line.give_up("its answer is not waited for")
            raise
        if reply.blocks < 1:
            return None
        return IncomingHandoff(
            self._loop,
            line,
            Destination(
                wanted.rank,
                lambda tokens: pages[: pages_for(tokens, self._mesh.page_size)],
                self._mesh.layer_groups,
                known * kept.block_tokens,
            ),
            self._limits,
            self._counters,
            self._context.clock.now,
        )

    async def _receive(self, handoff: IncomingHandoff) -> None:
        name, whole = handoff.line.link.peer, False
        self._sources.append(name)
        try:
            await handoff.receive()
            whole = True
        finally:
            self._sources.remove(name)
            handoff.close()
            if not whole:
                handoff.line.give_up("the fetch was given up")
