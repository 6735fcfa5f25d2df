"""The page arrays of one mesh and their one owner.

Per layer one array for each component: [ranks * pages, K, S, H], pages sharded over dp, kv heads
over kv; K is 1 for a component without heads, which every kv shard has whole. Each rank has, after
its usable pages, a few dummy pages, in which padding rows of a decode batch write side by side. The
arrays are donated to every program that changes them; `layers` is replaced in the same statement,
and nobody else may keep a reference: an old reference whose shard was donated aborts the process
when used (facts measured on JAX 0.10 and 0.12)."""

from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from jdisagg.executor.programs import Programs
from jdisagg.layout.kv_spec import KVComponent, KVSpec
from jdisagg.scheduler.executor import MeshLimits

LayerPages = tuple[jax.Array, ...]
Kept = tuple[list[LayerPages], list[LayerPages]]  # of some layers: pages, states


class PagePool:
    """Owns the pages of all layers. Used by the dispatch thread alone."""

    def __init__(
        self, programs: Programs, spec: KVSpec, pages_per_rank: int, page_size: int, dummy_rows: int
    ) -> None:
        self.page_size = page_size
        self.pages_per_rank = pages_per_rank
        self.rank_rows = pages_per_rank + -(-dummy_rows // page_size)
        self.spec = spec
        rows = programs.mesh.shape["dp"] * self.rank_rows

        def pages(part: KVComponent) -> jax.Array:
            # they must always hold finite values: masked attention multiplies them by zero
            shape = (rows, max(1, part.heads), page_size, part.width)
            return programs.zeros(shape, spec.dtype_of(part), _pages_spec(part))

        self.layers: list[LayerPages] = [
            tuple(pages(part) for part in layer.components) for layer in spec.layers
        ]

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in layer)

    def specs(self, layers: range | None = None) -> list[tuple[PartitionSpec, ...]]:
        """How the pages of these layers lie, or of all."""
        wanted = slice(None) if layers is None else slice(layers.start, layers.stop)
        return [
            tuple(_pages_spec(part) for part in layer.components)
            for layer in self.spec.layers[wanted]
        ]

    def put(self, first: int, layers: list[LayerPages]) -> None:
        """Replaces layers from `first` on by what a program returned for them."""
        self.layers[first : first + len(layers)] = layers


class Pools(NamedTuple):
    """`pages`: of what is kept of each position. `states`: of what is kept of a sequence as a
    whole, a slot of which is a page of one."""

    pages: PagePool
    states: PagePool

    @staticmethod
    def of(programs: Programs, limits: MeshLimits) -> "Pools":
        spec = limits.kv_spec
        return Pools(
            PagePool(
                programs, spec, limits.pages_per_rank, limits.page_size, limits.batch_buckets[-1]
            ),
            # padding rows write nothing there: a dummy state each would be as large as any
            PagePool(programs, spec.state, limits.state_slots_per_rank, 1, 0),
        )

    @property
    def bytes(self) -> int:
        return self.pages.bytes + self.states.bytes

    def kept(self, layers: range | None = None) -> Kept:
        """What these layers (None: all) keep, as arguments of a program that changes it."""
        layers = range(len(self.pages.layers)) if layers is None else layers
        part = slice(layers.start, layers.stop)
        return self.pages.layers[part], self.states.layers[part]

    def specs(self, layers: range | None = None) -> tuple[list, list]:
        return self.pages.specs(layers), self.states.specs(layers)

    def put(self, first: int, kept: Kept) -> None:
        """Replaces what the layers from `first` on keep."""
        self.pages.put(first, kept[0])
        self.states.put(first, kept[1])


def _pages_spec(part: KVComponent) -> PartitionSpec:
    return PartitionSpec("dp", "kv" if part.heads else None, None, None)
