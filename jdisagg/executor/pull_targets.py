"""Where pulled blocks go on one mesh: which peers are connected, in pieces of how many heads each
sends, and the arrays of zeros that stand in for ranks which receive nothing (made once a shape).

Used on the dispatch thread alone."""

import jax
import jax.numpy as jnp

from jdisagg.errors import HandoffError
from jdisagg.executor.programs import BLOCK_SPEC, Programs
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import PullBlock
from jdisagg.transfer.boxes import head_granule
from jdisagg.transfer.channel import PullTarget
from jdisagg.transfer.codec import codec


class PullTargets:
    def __init__(self, programs: Programs, spec: KVSpec) -> None:
        """`spec`: what blocks are of."""
        self._programs, self._mesh = programs, programs.mesh
        self.spec = spec
        self._granules: dict[str, int] = {}
        self._zeros: dict[tuple[int, int, int], jax.Array] = {}
        self._leaves: dict[tuple[int, int, int, str], tuple[jax.Array, ...]] = {}

    def connect(self, peer: str, card: MeshCard) -> None:
        """Blocks will come from `peer`. "": a mesh for which warm-up prepares, and which a pull
        that names no peer means."""
        self._granules[peer] = head_granule(
            self.spec.row_heads, card.head_shards, self._mesh.shape["kv"]
        )

    def disconnect(self, peer: str) -> None:
        self._granules.pop(peer, None)

    def granules(self) -> set[int]:
        """Heads of a piece, of all connected peers; while none is connected, of all that there can
        be."""
        heads = self.spec.row_heads
        shards = (count for count in range(1, heads + 1) if heads % count == 0)
        return set(self._granules.values()) or {
            head_granule(heads, count, self._mesh.shape["kv"]) for count in shards
        }

    def of_pull(self, block: PullBlock, layers: range) -> PullTarget:
        """The target of a pull of these layers.

        Raises:
            HandoffError: its peer is not connected.
        """
        return self.target(block, layers, self._granule(block.peer))

    def target(self, block: PullBlock, layers: range, granule: int) -> PullTarget:
        """As `of_pull`, in pieces of `granule` heads."""
        spec, how = self.spec, codec(block.codec)
        rows, width = spec.rows(layers), spec.row_width
        key = (rows, block.block_tokens, granule)
        if key not in self._zeros:
            self._zeros[key] = self._resident(
                rows, granule, block.block_tokens, width, jnp.dtype(spec.row_dtype)
            )
        zeros, leaves = self._zeros[key], ()
        if how.lossy:
            if (*key, block.codec) not in self._leaves:
                shape = (1, rows, granule, block.block_tokens, width)
                self._leaves[*key, block.codec] = tuple(
                    self._resident(c, g, t, x, leaf.dtype)
                    for leaf in how.leaves(jax.ShapeDtypeStruct(shape, zeros.dtype))
                    for _, c, g, t, x in [leaf.shape]
                )
            leaves = self._leaves[*key, block.codec]
        return PullTarget(
            zeros,
            block.rank,
            block.peer,
            codec=block.codec if how.lossy else "none",
            leaves=leaves,
            heads=spec.row_heads,
            source_rank=block.source_rank,
        )

    def _resident(
        self, components: int, granule: int, tokens: int, width: int, dtype: jnp.dtype
    ) -> jax.Array:
        """As `transfer.channel.resident_zeros`."""
        ranks, shards = self._mesh.shape["dp"], self._mesh.shape["kv"]
        shape = ranks, components, granule * shards, tokens, width
        return self._programs.zeros(shape, dtype, BLOCK_SPEC)

    def _granule(self, peer: str) -> int:
        known = set(self._granules.values())
        if not peer and len(known) == 1:
            return known.pop()
        if peer not in self._granules:
            raise HandoffError(
                f"nothing can be pulled from {peer!r}: it is not connected; hello first"
            )
        return self._granules[peer]
