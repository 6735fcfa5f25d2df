"""Slots of state on a fake mesh: of a sequence how many tokens it has seen, and their chain.

Each use is verified: what lies in the slot must be the state after exactly the tokens before, so a
slot that two sequences share, a missing copy, a step too many or one left out fails at once."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from jdisagg.messages.step_commands import ExtractBlock, InsertBlock
from jdisagg.scheduler.executor import MeshLimits
from tests.fakes.toy_model import Entry


class FakeStates:
    def __init__(self, limits: MeshLimits) -> None:
        nothing: Entry = (-1, -1, -1)
        slots = limits.state_rows
        self._on = limits.kv_spec.has_state
        self._sequences = limits.state_slots_per_rank
        self._slots = [[nothing] * slots for _ in range(limits.ranks)]

    def advance(
        self, rank: int, slot: int, before: tuple[int, int], after: tuple[int, int]
    ) -> None:
        """(tokens, chain) before and after a pass; a sequence that begins has no state yet."""
        if not self._on:
            return
        tokens, chain = before
        found = self._slots[rank][slot]
        assert not tokens or found == (tokens, 0, chain), (
            f"rank {rank}, slot of state {slot} holds {found}, not that after {tokens} tokens"
        )
        self._slots[rank][slot] = (after[0], 0, after[1])

    def keep(self, rank: int, slot: int, tokens: int, chain: int) -> None:
        """A snapshot after `tokens` tokens, in a slot beside those of sequences."""
        assert self._on and slot >= self._sequences
        self._slots[rank][slot] = (tokens, 0, chain)

    def copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        for rank, source, destination in copies:
            assert source != destination
            self._slots[rank][destination] = self._slots[rank][source]

    def extract(self, command: ExtractBlock) -> list[Entry]:
        return [self._slots[command.rank][_only_slot(command)]]

    def insert(self, command: InsertBlock, entries: list[Entry]) -> None:
        (self._slots[command.rank][_only_slot(command)],) = entries


Keeps = Callable[[MeshLimits], MeshLimits]


def kept_as_it_is(limits: MeshLimits) -> MeshLimits:
    return limits


def with_state(limits: MeshLimits, snapshots: int = 0, every: int = 0) -> MeshLimits:
    """The same mesh of a model whose second layer keeps state, too, with room for that of the
    sequences in its slots and of a few ahead, and for snapshots at multiples of `every` tokens."""
    spec = limits.kv_spec
    first, second = spec.layers
    kept = KVLayer(second.components, state=(KVComponent("recurrent", 1, 2),))
    spec = KVSpec((first, kept), spec.dtype)
    return replace(
        limits,
        kv_spec=spec,
        state_slots_per_rank=limits.slots_per_rank + 4,
        snapshots_per_rank=snapshots,
        snapshot_tokens=every,
    )


def _only_slot(command: ExtractBlock | InsertBlock) -> int:
    assert (command.start, command.valid_tokens, command.block_tokens) == (0, 1, 1)
    assert (command.group, command.groups) == (0, 1)
    (slot,) = command.pages
    return slot
