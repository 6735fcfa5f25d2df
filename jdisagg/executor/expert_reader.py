"""Reads the experts that the model chose from the KV pages (`KVSpec.recording`), for requests that
ask for them. The first token of an answer has those of all positions before it, cached or not, and
each later token those of the position before it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.page_pool import Pools
from jdisagg.executor.programs import RANK, Programs
from jdisagg.layout.kv_spec import EXACT
from jdisagg.messages.step_commands import DecodeSteps, PrefillChunk
from jdisagg.ops.kv_pages import as_read
from jdisagg.prompt.experts import ChosenExperts
from jdisagg.scheduler.executor import MeshLimits

PAGES_PER_READ = 32


def experts_as_values(experts_TJ: jax.Array, width: int) -> jax.Array:
    """Returns the numbers as [T, 1, width]: the remainders by `EXACT`, then the quotients, as far
    as the width goes. A layer of at most `EXACT` experts has quotients of zero."""
    low_TJ, high_TJ = experts_TJ % EXACT, experts_TJ // EXACT
    values_TW = jnp.concatenate((low_TJ, high_TJ), axis=1)[:, :width]
    padding = ((0, 0), (0, width - values_TW.shape[1]))
    return jnp.pad(values_TW, padding)[:, None].astype(jnp.float32)


def values_as_experts(values: jax.Array, chosen: int) -> jax.Array:
    """Returns the numbers int32 [..., chosen] from their values [..., width]."""
    numbers = values.astype(jnp.int32)
    low, high = numbers[..., :chosen], numbers[..., chosen : 2 * chosen]
    missing = [(0, 0)] * (low.ndim - 1) + [(0, chosen - high.shape[-1])]
    return low + EXACT * jnp.pad(high, missing)


@dataclass
class ExpertArrays:
    """Device arrays [ranks, ..., positions, layers, chosen] of consecutive positions, in order.
    `asked` has the (rank, slot) of the decode slots that ask for them."""

    parts: list[jax.Array]
    dtype: str
    asked: frozenset[tuple[int, int]] = frozenset()

    def host(self, rank: int) -> np.ndarray:
        own = [np.asarray(jax.device_get(part))[rank] for part in self.parts]
        return np.concatenate(own, axis=-3)

    def record(self, of_positions: np.ndarray) -> ChosenExperts:
        _, layers, chosen = of_positions.shape
        return ChosenExperts(layers, chosen, of_positions.tobytes(), self.dtype)


class ExpertReader:
    """Builds and runs the programs that read chosen experts. Used by the dispatch thread only."""

    def __init__(self, programs: Programs, pools: Pools, limits: MeshLimits) -> None:
        self._programs, self._pool, self._limits = programs, pools.pages, limits
        layers = enumerate(limits.kv_spec.layers)
        self._layers = [(at, layer.experts) for at, layer in layers if layer.experts]
        most = max(experts for _, experts in limits.kv_spec.choices)
        self._dtype = "int16" if most <= np.iinfo(np.int16).max else "int32"
        columns = -(-limits.context_tokens // limits.page_size)
        self._width = min(columns, PAGES_PER_READ)
        self._asked: set[tuple[int, int]] = set()  # (rank, slot)
        self._table = np.zeros((limits.ranks, limits.slots_per_rank, columns), np.int32)
        self._on_mesh: jax.Array | None = None

    def of_prompts(self, command: PrefillChunk) -> dict[int, ExpertArrays]:
        """Returns the experts of all positions of the sequences that sample and ask."""
        read: dict[int, ExpertArrays] = {}
        for row in command.rows:
            if any(spec.sampling.return_routed_experts for spec in row.samples):
                count = -(-(row.start + len(row.tokens)) // self._limits.page_size)
                read[row.sequence] = self._of_pages(row.rank, row.pages[:count])
        return read

    def note(self, command: DecodeSteps) -> None:
        """Takes over the pages of slots that ask. Must be called before the command's steps."""
        changes = [(one.rank, one.slot, one.pages) for one in command.grows]
        for admit in command.admits:
            at = admit.rank, admit.slot
            self._asked.discard(at)
            if admit.sample.sampling.return_routed_experts:
                self._asked.add(at)
            changes.append((*at, admit.pages))
        for rank, slot, pages in changes:
            if (rank, slot) in self._asked:
                self._table[rank, slot, : len(pages)] = pages
                self._on_mesh = None

    def of_steps(self, command: DecodeSteps, hot: jax.Array) -> ExpertArrays | None:
        """Returns the experts of the last positions of each slot after the command's steps, or None
        if no slot in the steps asks. `hot` is as in `SlotState`."""
        in_steps = {(rank, slot) for rank, row in enumerate(command.slots) for slot in row}
        if not (asked := self._asked & in_steps):
            return None
        run = self._limits.longest_run
        most = command.steps * (run if command.masked or command.drafts else 1)
        first = -(-most // run) - 1
        parts = [self._of_slots(hot, number * run) for number in range(first, -1, -1)]
        return ExpertArrays(parts, self._dtype, frozenset(asked))

    def warm_up(self, hot: jax.Array | None) -> None:
        """`hot` is None on a mesh without decode slots."""
        if hot is not None:
            self._of_slots(hot, 0).block_until_ready()
        self._of_pages(0, (0,)).parts[0].block_until_ready()

    def _of_pages(self, rank: int, pages: tuple[int, ...]) -> ExpertArrays:
        parts: list[jax.Array] = []
        for first in range(0, len(pages), self._width):
            some = pages[first : first + self._width]
            ids = np.zeros((self._limits.ranks, self._width), np.int32)
            ids[rank, : len(some)] = some
            parts.append(self._run("experts of pages", self._pages_body, ids))
        return ExpertArrays(parts, self._dtype)

    def _pages_body(self, pages_PKSH: jax.Array, page_C: jax.Array) -> jax.Array:
        held = pages_PKSH.at[page_C, 0].get(mode="clip")
        return held.reshape(-1, held.shape[-1])

    def _of_slots(self, hot: jax.Array, back: int) -> jax.Array:
        if self._on_mesh is None:
            self._on_mesh = self._programs.put(self._table.copy())
        places = self._on_mesh, hot, np.full((self._limits.ranks,), back, np.int32)
        return self._run("experts of slots", self._slots_body, *places)

    def _slots_body(
        self, pages_PKSH: jax.Array, table_BN: jax.Array, hot_B2: jax.Array, back: jax.Array
    ) -> jax.Array:
        run, size = self._limits.longest_run, self._limits.page_size
        at_BQ = hot_B2[:, 1:] - back - run + jnp.arange(run, dtype=jnp.int32)[None]
        at_BQ = jnp.maximum(at_BQ, 0)
        page_BQ = jnp.take_along_axis(table_BN, at_BQ // size, axis=1, mode="clip")
        return pages_PKSH.at[page_BQ, 0, at_BQ % size].get(mode="clip")

    def _run(self, key: str, read: Any, *where: Any) -> jax.Array:
        programs, layers = self._programs, self._layers
        pages = [self._pool.layers[at][-1] for at, _ in layers]
        most = max(chosen for _, (chosen, _) in layers)

        def body(pages: list[jax.Array], *where: jax.Array) -> jax.Array:
            found: list[jax.Array] = []
            for of_layer, (_, (chosen, _)) in zip(pages, layers, strict=True):
                values = as_read(read(of_layer, *(one[0] for one in where)), jnp.dtype("float32"))
                experts = values_as_experts(values, chosen)
                padding = [(0, 0)] * (experts.ndim - 1) + [(0, most - chosen)]
                found.append(jnp.pad(experts, padding, constant_values=-1))
            return programs.readable(jnp.stack(found, axis=-2).astype(self._dtype)[None])

        on_mesh = tuple(
            programs.argument(one) if isinstance(one, np.ndarray) else one for one in where
        )
        specs = self._pool.specs()
        in_specs = ([specs[at][-1] for at, _ in layers], *(RANK,) * len(where))
        build = partial(programs.compile, body, (pages, *on_mesh), in_specs, programs.readable_spec)
        return programs.get((key, *(one.shape for one in on_mesh)), build)(pages, *on_mesh)
