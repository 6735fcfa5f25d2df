"""Room for prompts beside ordinary pages, on a mesh that only prefills: slots for recurrent state,
or pages of sliding-window layers. A model needs at most one of the two. Pure."""

from collections.abc import Sequence

from jdisagg.layout.kv_spec import KvKind
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.scheduler.state_slots import StateSlots
from jdisagg.scheduler.window_pages import Table, WindowPages


class PromptRoom:
    """The state slots, or the pages of sliding-window layers, of the prompts of one mesh. Prompts
    are owners, named by their keys.

    Attributes:
        states: Slots for recurrent state.
        windows: Pages of sliding-window layers of each rank; empty if there are none.
    """

    def __init__(self, limits: MeshLimits) -> None:
        self.states = StateSlots(limits)
        count = limits.ranks if limits.window_pages_per_rank else 0
        self.windows = [WindowPages(limits) for _ in range(count)]

    def needed(self, tokens: int) -> int:
        """Returns the number of slots or pages that a prompt of `tokens` tokens may use."""
        return self.windows[0].needed(tokens) if self.windows else int(self.states.on)

    def available(self, rank: int) -> int:
        """Returns the number of slots or pages that no prompt of a rank uses."""
        return self.windows[rank].available if self.windows else self.states.free_slots(rank)

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
        """Assigns a prompt its pages of sliding-window layers, which begin with the window before
        its cached tokens, and records which of its windows the prefix cache will keep.

        Args:
            kept: Prefix cache of the mesh.
            chain: Names of the prompt's blocks.
            tokens: Number of tokens of the prompt.
            cached: Number of leading tokens that are not computed.
            promised: Number of pages that must stay available to other prompts.

        Returns:
            The page table.
        """
        wanted = kept.wanted_snapshots(rank, chain, tokens, cached)
        window = kept.use_snapshot(rank, chain, cached) if cached else ()
        table = self.windows[rank].begin(owner, tokens, cached, window, wanted, promised)
        for at in wanted:
            kept.begin_snapshot(rank, owner, at)
        if chain:
            kept.begin_all_snapshots(rank, owner, cached, tokens)
        return table

    def place(self, kind: KvKind, rank: int, owner: int, pages: Table) -> Sequence[int]:
        """Returns the pages that hold a kind of a prompt's KV. `pages` are its ordinary ones."""
        if kind is KvKind.STATE:
            return (self.states.slot(rank, owner),)
        return self.windows[rank].table(owner) if kind is KvKind.WINDOW else pages

    def free(self, rank: int, owner: int) -> None:
        """Releases the slot or pages of a prompt."""
        if self.windows:
            self.windows[rank].free(owner)
        else:
            self.states.free(rank, owner)
