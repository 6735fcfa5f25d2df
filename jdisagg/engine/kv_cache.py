"""A KV cache that can be held in the hand: blocks of one sequence on one mesh, as the hand-off
between meshes moves them.

A block is what a channel offers: a global array [dp, rows, K, T, H] of one layer's components (see
`layout/kv_spec.py`), of which dp rank `rank` counts. The arrays are never donated and belong to
nobody's page pool, so a cache stays valid whatever the engine does next, and its memory is freed
with it. It knows arrays and token ids; nothing of executors, channels or pages.

Invariants: every token of `token_ids` has its KV in `blocks`, each layer covers all positions once,
in order; `next_token` is the model's choice after them, whose KV is not there yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.errors import InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.model_api import Device
from jdisagg.ops.kv_rows import components_of
from jdisagg.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NextToken:
    """The token chosen after a sequence, how it was chosen, and, where asked for, how likely it and
    others were."""

    token_id: int
    sampling: SamplingParams
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """`array` [dp, rows, K, T, H]: layer `layer`, positions [start, start + valid_tokens); the rest
    of T is padding."""

    layer: int
    start: int
    valid_tokens: int
    array: jax.Array

    @property
    def block_tokens(self) -> int:
        return self.array.shape[3]


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """The components of one layer by their names: global arrays [K, T, H], heads sharded as the
    layout says. A component without heads is [1, T, H], replicated."""

    components: Mapping[str, jax.Array]

    @property
    def k(self) -> jax.Array:
        """Keys, after rope."""
        return self.components["k"]

    @property
    def v(self) -> jax.Array:
        return self.components["v"]


@dataclass(frozen=True, eq=False)
class KVCache:
    """The KV of one sequence. `mesh` has the axes ("dp", "kv", "rep"); the sequence lies on dp rank
    `rank` of it.

    `seconds` is what making it took: the prefill, first token included, or the reading of a
    session's pages."""

    token_ids: tuple[int, ...]
    next_token: NextToken
    layout: Layout
    mesh: Mesh
    rank: int
    spec: KVSpec
    blocks: tuple[KVBlock, ...]
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"KVCache({len(self)} tokens x {self.layers} layers x {self.spec.row_heads} kv heads,"
            f" {self.spec.dtype}, {self.bytes} bytes, {self.layout}, on devices"
            f" {', '.join(str(device.id) for device in self.devices)}, next token"
            f" {self.next_token.token_id})"
        )

    @property
    def layers(self) -> int:
        return len(self.spec.layers)

    @property
    def devices(self) -> list[Device]:
        """The devices of the rank that holds the sequence."""
        return list(self.mesh.devices[self.rank].flat)

    @property
    def bytes(self) -> int:
        """Bytes of the tokens' KV, counted once: without replicas and padding."""
        return len(self) * self.spec.bytes_per_token

    def layer(self, index: int) -> LayerKV:
        """The components of one layer, put together from the blocks on the devices where they lie:
        nothing moves between devices.

        `np.asarray(kv.layer(0).k)` gathers one to the host."""
        if not -self.layers <= index < self.layers:
            raise InvalidRequestError(f"layer {index} must be in [{-self.layers}, {self.layers})")
        blocks = [block for block in self.blocks if block.layer == index % self.layers]
        rank_mesh = Mesh(self.mesh.devices[self.rank], ("kv", "rep"))
        shards = [
            {shard.device: shard.data for shard in block.array.addressable_shards}
            for block in blocks
        ]
        rows = [_join([shard[device] for shard in shards], len(self)) for device in self.devices]
        kind, found = self.spec.layers[index], {}
        local = [list(components_of(one, [kind], self.spec, gather=False)) for one in rows]
        for part, arrays in zip(kind.components, zip(*local, strict=True), strict=True):
            # one that is cut lies in parts of its values
            axes = (None, None, "kv") if self.spec.is_cut(part) else ("kv" if part.heads else None,)
            found[part.name] = jax.make_array_from_single_device_arrays(
                (max(1, part.heads), len(self), part.width),
                NamedSharding(rank_mesh, PartitionSpec(*axes)),
                list(arrays),
            )
        return LayerKV(found)

    def norms(self) -> np.ndarray:
        """The length of each vector (of keys and values, or of a latent), on the host: float32
        [layers, components, K, T], where all layers are alike."""
        layers = map(self.layer, range(self.layers))
        return np.stack([list(map(_norms, layer.components.values())) for layer in layers])


def _join(shards_1RKTH: Sequence[jax.Array], tokens: int) -> jax.Array:
    """One device's blocks of a layer, joined along the tokens, without the padding at the end:
    [R, K, T, H]."""
    whole_RKTH = (
        shards_1RKTH[0][0]
        if len(shards_1RKTH) == 1
        else jnp.concatenate([shard[0] for shard in shards_1RKTH], axis=2)
    )
    return whole_RKTH[:, :, :tokens]


def _norms(x_KTH: jax.Array) -> np.ndarray:
    return np.linalg.norm(np.asarray(x_KTH).astype(np.float32), axis=-1)
