"""Fetches cached KV blocks from other workers. The serving side is `worker/given_kv.py`.

For each prompt, the router identifies a worker that may hold the blocks. The request to that worker
lists block names, and the reply is the number of blocks that it sends. The blocks are received by
an ordinary KV transfer (`worker/incoming_handoff.py`), so the other worker may use another page
size or sharding. Lossy compression is not used. Failures are counted (`peer_fetch_failed`, by
cause)."""

from jdisagg.config import LimitsConfig
from jdisagg.errors import IncompatiblePeerError, JdisaggError
from jdisagg.messages.ports import FetchCall
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.residency import Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import Destination, WindowDestination
from jdisagg.worker.incoming_handoff import IncomingHandoff
from jdisagg.worker.kv_sources import KvSource, Origin, Restore, RestorePlan, RestoreQuery
from jdisagg.worker.outgoing_kv import state_weight
from jdisagg.worker.peers import Peers
from jdisagg.worker.step_loop import StepLoop

MOST_FETCHES = 4  # simultaneous restores; their blocks in flight need memory besides the pages


class PeerFetch(KvSource):
    """Other workers as a source of cached blocks (`KvSource`)."""

    name: Origin = "peer"
    most_restores = MOST_FETCHES

    def __init__(
        self,
        kept: Residency,
        loop: StepLoop,
        mesh: MeshLimits,
        peers: Peers,
        limits: LimitsConfig,
        prices: Prices,
        counters: Counters,
    ) -> None:
        self.prices = prices
        self._fetch_seconds = limits.pull_seconds * limits.timeouts.handoff.pull_tries
        self.most_seconds = self._fetch_seconds
        self._kept = kept
        self._loop = loop
        self._mesh = mesh
        self._peers = peers
        self._limits = limits
        self._counters = counters
        self._now = peers.now
        self._closed_until = 0.0
        self._senders: list[str] = []  # peers that blocks are arriving from, by connection name

    def clear(self, cause: str) -> int:
        # while a reset of all workers runs, a peer may still hold blocks that this worker has
        # dropped
        self._closed_until = self._now() + self._limits.timeouts.request.status_seconds
        return 0

    def expire(self, now: float) -> None:
        self._peers.sweep(now, self._senders)

    def failed(self, cause: str) -> None:
        self._counters.add("peer_fetch_failed", cause=cause)

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        if query.peer is None or self._now() < self._closed_until:
            return None
        size = self._kept.block_tokens
        to_compute = query.instead == "compute"
        usable = self._kept.usable_tokens(query.peer_tokens, to_compute)
        chain = query.chain[: usable // size]
        known = {rank: min(query.known[rank], len(chain)) for rank in query.ranks}
        rank, ahead = max(known, key=known.__getitem__), query.ahead_tokens
        tokens = moved = (len(chain) - known[rank]) * size
        if with_state := bool(self._kept.snapshots and chain):
            whole = len(chain) * size
            tokens = whole - self._kept.cached_tokens(rank, chain, whole, to_compute=True)
            moved += self._snapshot_tokens(whole) if tokens else 0
        if not self.prices.worth(moved, tokens + ahead, query.instead):
            return None
        return RestorePlan(
            self, rank, chain, tokens, moved, ahead, query.peer, with_state, query.instead
        )

    async def bring(self, restore: Restore) -> str:
        size, handoff = self._kept.block_tokens, None
        whole = len(restore.plan.chain) * size
        if restore.plan.snapshot and restore.place(self._kept, whole) is None:
            return "room"
        try:
            handoff = await self._begin_hand_off(restore)
            if handoff is None:
                return "gone"
            restore.closing.append(handoff.close)
            await self._receive(handoff)
            restore.restored = restore.plan.snapshot
        except JdisaggError as error:
            spoiled = handoff is not None and handoff.spoiled
            refused = isinstance(error, IncompatiblePeerError)
            return "spoiled" if spoiled else "refused" if refused else "lost"
        finally:
            blocks = handoff.kept_tokens() // size if handoff is not None else 0
            restore.origins.update(dict.fromkeys(range(restore.first, blocks), "peer"))
        restore.moved_tokens = (blocks - restore.first) * size
        if restore.restored:
            restore.moved_tokens += self._snapshot_tokens(blocks * size)
            self._counters.add("peer_snapshots_fetched")
        return "gone" if blocks < len(restore.plan.chain) else ""

    async def _begin_hand_off(self, restore: Restore) -> IncomingHandoff | None:
        plan, size, source = restore.plan, self._kept.block_tokens, restore.plan.peer
        assert source is not None, "`worth` plans with a peer only"
        line = self._peers.line_to(source, 0)
        await line.greet(self._peers, codec="none")
        seconds = plan.patience_seconds
        call = FetchCall(
            source.handoff_id,
            self._peers.own_name,
            plan.chain,
            restore.first,
            size,
            seconds or self._fetch_seconds,
        )
        try:
            reply = await line.peer.fetch(call)
        except BaseException:
            line.give_up("its answer is not waited for")
            raise
        if plan.snapshot and not reply.snapshot:
            line.give_up("its blocks come without a snapshot")
            return None
        if reply.blocks < 1 and not reply.snapshot:
            return None
        start, mesh = restore.first * size, self._mesh
        place = restore.place(self._kept, start + reply.blocks * size)

        def pages(tokens: int) -> tuple[int, ...]:
            return restore.pages[: pages_for(tokens, mesh.page_size)]

        windows = WindowDestination(lambda _: place or (), mesh.window_groups, mesh.seen_from)
        to = Destination(
            plan.rank,
            pages,
            mesh.layer_groups,
            start,
            state=(lambda: place[0]) if place and mesh.kv_spec.has_state else None,
            windows=windows if place and mesh.windows_apart else None,
        )
        return IncomingHandoff(self._loop, line, to, self._limits, self._counters, self._now)

    def _snapshot_tokens(self, end: int) -> int:
        mesh = self._mesh
        seen, spec = end - mesh.seen_from(end), mesh.kv_spec.windowed
        windows = seen * spec.bytes_per_token // mesh.sent.bytes_per_token
        return state_weight(mesh) // mesh.layer_groups + (windows if mesh.windows_apart else 0)

    async def _receive(self, handoff: IncomingHandoff) -> None:
        name, whole = handoff.line.link.peer, False
        self._senders.append(name)
        try:
            await handoff.receive()
            whole = True
        finally:
            self._senders.remove(name)
            handoff.close()
            if not whole:
                handoff.give_up("the fetch was given up")
