"""Holds the KV page arrays of one mesh. `PagePool` is their only owner.

Each layer has one array [ranks * pages, K, S, H] for each cached component, with S tokens per page.
Pages are sharded over mesh axis dp, KV heads over kv. A component without heads has K = 1 and is
replicated over kv. After its usable pages, each dp rank has a few dummy pages, to which padding
rows of a decode batch write. The arrays are donated to every program that updates them. No other
code may keep a reference: using an array whose shard was donated aborts the process (measured with
JAX 0.10 and 0.12)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from jdisagg.executor.programs import Programs
from jdisagg.layout.kv_spec import KVComponent, KVSpec
from jdisagg.ops.kv_pages import kept_dtype
from jdisagg.scheduler.executor import MeshLimits

LayerPages = tuple[jax.Array, ...]
# For some layers: the arrays of pages, of recurrent states and of ring buffers.
Kept = tuple[list[LayerPages], list[LayerPages], list[LayerPages]]


class PagePool:
    """The only owner of the page arrays of all layers. Used by the dispatch thread only.

    Args:
        held: Layers of this mesh; None means all. Other layers have no arrays here.
    """

    def __init__(
        self,
        programs: Programs,
        spec: KVSpec,
        pages_per_rank: int,
        page_size: int,
        dummy_rows: int,
        held: range | None = None,
    ) -> None:
        self.page_size = page_size
        self.pages_per_rank = pages_per_rank
        self.rank_rows = pages_per_rank + -(-dummy_rows // page_size)
        self.spec = spec
        self.held = range(len(spec.layers)) if held is None else held
        rows = programs.mesh.shape["dp"] * self.rank_rows

        def pages(part: KVComponent) -> jax.Array:
            # Pages must always hold finite values, because masked attention multiplies them by
            # zero.
            shape = (rows, max(1, part.heads), page_size, part.width)
            dtype = kept_dtype(spec.dtype_of(part), programs.platform)
            return programs.zeros(shape, dtype, _pages_spec(part))

        self._new: Callable[[], list[LayerPages]] = lambda: [
            tuple(pages(part) for part in layer.components) if index in self.held else ()
            for index, layer in enumerate(spec.layers)
        ]
        self.layers: list[LayerPages] = self._new()

    def drop(self) -> None:
        """Frees the arrays, while the mesh sleeps. No command may use them until `make` is
        called."""
        self.layers = []

    def make(self) -> None:
        self.layers = self._new()

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in layer)

    def view(self, spec: KVSpec) -> "PagePool | PageView":
        """Returns a view of the layers in `spec`. All other layers of the view are empty."""
        return self if spec == self.spec else PageView(self, spec)

    def specs(self, layers: range | None = None) -> list[tuple[PartitionSpec, ...]]:
        return _layer_specs(self.spec, self.held, layers)

    def put(self, first: int, layers: list[LayerPages]) -> None:
        self.layers[first : first + len(layers)] = layers


class PageView:
    """A view of some layers of a page pool. Holds no array."""

    def __init__(self, pool: PagePool, spec: KVSpec) -> None:
        self._pool = pool
        self.spec = spec
        self.page_size, self.rank_rows, self.held = pool.page_size, pool.rank_rows, pool.held

    @property
    def layers(self) -> list[LayerPages]:
        return [
            pages if kind.components else ()
            for pages, kind in zip(self._pool.layers, self.spec.layers, strict=True)
        ]

    def specs(self, layers: range | None = None) -> list[tuple[PartitionSpec, ...]]:
        return _layer_specs(self.spec, self.held, layers)

    def put(self, first: int, layers: list[LayerPages]) -> None:
        for index, pages in enumerate(layers, first):
            if self.spec.layers[index].components:
                self._pool.put(index, [pages])


class Pools(NamedTuple):
    """The page pools of a mesh.

    Attributes:
        rings: Pages of sliding-window layers, if these layers do not use `pages`. On decode meshes
            each slot has `MeshLimits.ring_pages` consecutive pages, a ring buffer.
    """

    pages: PagePool
    states: PagePool
    rings: PagePool

    @staticmethod
    def of(programs: Programs, limits: MeshLimits, held: range | None = None) -> "Pools":
        spec, size, largest = limits.kv_spec, limits.page_size, limits.batch_buckets[-1]
        padding = largest + limits.extra_rows(largest)
        rings = limits.window_pages_per_rank or limits.state_rows * limits.ring_pages
        return Pools(
            PagePool(programs, limits.sent, limits.pages_per_rank, size, padding, held),
            # There are no dummy states, because each would be as large as a real one. Padding rows
            # write no state.
            PagePool(programs, spec.state, limits.state_rows, 1, 0, held),
            PagePool(
                programs, spec.windowed if rings else limits.nothing, rings, size, padding, held
            ),
        )

    @property
    def bytes(self) -> int:
        return self.pages.bytes + self.states.bytes + self.rings.bytes

    def drop(self) -> None:
        for pool in self:
            pool.drop()

    def make(self) -> None:
        for pool in self:
            pool.make()

    @property
    def attended(self) -> "PagePool | JoinedPools":
        """The pages of all layers, of `pages` and `rings` together."""
        return JoinedPools(self.pages, self.rings) if self.rings.pages_per_rank else self.pages

    def kept(self, layers: range | None = None) -> Kept:
        """None selects all layers."""
        layers = range(len(self.pages.layers)) if layers is None else layers
        part = slice(layers.start, layers.stop)
        return self.pages.layers[part], self.states.layers[part], self.rings.layers[part]

    def specs(self, layers: range | None = None) -> tuple[list, list, list]:
        return self.pages.specs(layers), self.states.specs(layers), self.rings.specs(layers)

    def put(self, first: int, kept: Kept) -> None:
        self.pages.put(first, kept[0])
        self.states.put(first, kept[1])
        self.rings.put(first, kept[2])


class JoinedPools:
    """The layers of two pools that hold different layers of one mesh. Holds no array."""

    def __init__(self, pages: PagePool, rings: PagePool) -> None:
        self._both = pages, rings
        layers = zip(pages.spec.layers, rings.spec.layers, strict=True)
        self.spec = KVSpec(
            tuple(own if own.components else other for own, other in layers), pages.spec.dtype
        )
        self.page_size, self.held = pages.page_size, pages.held

    @property
    def layers(self) -> list[LayerPages]:
        pages, rings = self._both
        return [own or other for own, other in zip(pages.layers, rings.layers, strict=True)]

    def specs(self, layers: range | None = None) -> list[tuple[PartitionSpec, ...]]:
        return _layer_specs(self.spec, self.held, layers)

    def put(self, first: int, layers: list[LayerPages]) -> None:
        for pool in self._both:
            PageView(pool, pool.spec).put(first, layers)


def _layer_specs(
    spec: KVSpec, held: range, layers: range | None
) -> list[tuple[PartitionSpec, ...]]:
    return [
        tuple(_pages_spec(part) for part in spec.layers[index].components) if index in held else ()
        for index in (range(len(spec.layers)) if layers is None else layers)
    ]


def _pages_spec(part: KVComponent) -> PartitionSpec:
    return PartitionSpec("dp", "kv" if part.heads else None, None, None)
