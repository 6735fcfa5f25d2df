"""Allocates what a prompt needs besides ordinary pages, on a mesh that only prefills: a slot for
recurrent state, or pages for sliding-window layers. A model needs at most one of the two. Does no
I/O."""

from collections.abc import Sequence

from jdisagg.layout.kv_spec import KvKind
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.scheduler.state_slots import StateSlots
from jdisagg.scheduler.window_pages import Table, WindowPages


class PromptRoom:
    """The state slots, or the pages of sliding-window layers, that the prompts of one mesh use. A
    prompt is identified by its key (`owner`)."""

    def __init__(self, limits: MeshLimits) -> None:
        self.states = StateSlots(limits)
        count = limits.ranks if limits.window_pages_per_rank else 0
        self.windows = [WindowPages(limits) for _ in range(count)]

    def needed(self, tokens: int) -> int:
        return self.windows[0].needed(tokens) if self.windows else int(self.states.on)

    def available(self, rank: int) -> int:
        return self.windows[rank].available if self.windows else self.states.free_slots(rank)

    def own(self, rank: int, owner: int) -> int:
        """Returns how many more are available when a prompt releases what it has."""
        return self.windows[rank].own(owner) if self.windows else int(self.states.on)

    def begin_windows(
        self,
        kept: Residency,
        rank: int,
        owner: int,
        chain: Chain,
        tokens: int,
        cached: int,
        promised: int,
    ) -> Table:
        """Assigns a prompt its pages of sliding-window layers. If a prefix of the prompt is cached,
        the first of these pages hold the window before its end. Records at which positions the
        prompt's window will be cached."""
        wanted = kept.wanted_snapshots(rank, chain, tokens, cached)
        window = kept.use_snapshot(rank, chain, cached) if cached else ()
        table = self.windows[rank].begin(owner, tokens, cached, window, wanted, promised)
        for at in wanted:
            kept.begin_snapshot(rank, owner, at)
        if chain:
            kept.begin_all_snapshots(rank, owner, cached, tokens)
        return table

    def place(self, kind: KvKind, rank: int, owner: int, pages: Table) -> Sequence[int]:
        """Returns the pages that hold one kind of a prompt's KV, given its ordinary pages. For
        recurrent state, the only element is the state slot."""
        if kind is KvKind.STATE:
            return (self.states.slot(rank, owner),)
        return self.windows[rank].table(owner) if kind is KvKind.WINDOW else pages

    def free(self, rank: int, owner: int) -> None:
        if self.windows:
            self.windows[rank].free(owner)
        else:
            self.states.free(rank, owner)
