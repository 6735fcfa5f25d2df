"""A KV cache that can be held in the hand: blocks of one sequence on one mesh, as the hand-off
between meshes moves them.

A block is what a channel offers: a global array [dp, 2, K, T, H] of one layer, K and V, of which dp
rank `rank` counts. The arrays are never donated and belong to nobody's page pool, so a cache stays
valid whatever the engine does next, and its memory is freed with it. It knows arrays and token ids;
nothing of executors, channels or pages.

Invariants: every token of `token_ids` has its KV in `blocks`, each layer covers all positions once,
in order; `next_token` is the model's choice after them, whose KV is not there yet."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.errors import InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.model_api import Device
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
    """`array` [dp, 2, K, T, H]: layer `layer`, positions [start, start + valid_tokens); the rest of
    T is padding."""

    layer: int
    start: int
    valid_tokens: int
    array: jax.Array

    @property
    def block_tokens(self) -> int:
        return self.array.shape[3]


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys (after rope) and values of one layer: global arrays k_KTH and v_KTH [K, T, H], heads
    sharded as the layout says."""

    k: jax.Array
    v: jax.Array


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
            f"KVCache({len(self)} tokens x {self.layers} layers x {self.spec.kv_heads} kv heads,"
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
        """K and V of one layer, put together from the blocks on the devices where they lie: nothing
        moves between devices.

        `np.asarray(kv.layer(0).k)` gathers one to the host."""
        if not -self.layers <= index < self.layers:
            raise InvalidRequestError(f"layer {index} must be in [{-self.layers}, {self.layers})")
        blocks = [block for block in self.blocks if block.layer == index % self.layers]
        rank_mesh = Mesh(self.mesh.devices[self.rank], ("kv", "rep"))
        shards = [
            {shard.device: shard.data for shard in block.array.addressable_shards}
            for block in blocks
        ]
        local = [_join([shard[device] for shard in shards], len(self)) for device in self.devices]
        sharding = NamedSharding(rank_mesh, PartitionSpec("kv"))
        heads = local[0][0].shape[0] * rank_mesh.shape["kv"]
        k, v = (
            jax.make_array_from_single_device_arrays(
                (heads, *parts[0].shape[1:]), sharding, list(parts)
            )
            for parts in zip(*local, strict=True)
        )
        return LayerKV(k, v)

    def norms(self) -> np.ndarray:
        """The length of each key and value vector, on the host: float32 [layers, 2, K, T]."""
        return np.stack(
            [[_norms(layer.k), _norms(layer.v)] for layer in map(self.layer, range(self.layers))]
        )


def _join(shards_12KTH: Sequence[jax.Array], tokens: int) -> tuple[jax.Array, jax.Array]:
    """One device's blocks of a layer, joined along the tokens, without the padding at the end: k
    and v [K, T, H]."""
    whole_2KTH = (
        shards_12KTH[0][0]
        if len(shards_12KTH) == 1
        else jnp.concatenate([shard[0] for shard in shards_12KTH], axis=2)
    )
    return whole_2KTH[0, :, :tokens], whole_2KTH[1, :, :tokens]


def _norms(x_KTH: jax.Array) -> np.ndarray:
    return np.linalg.norm(np.asarray(x_KTH).astype(np.float32), axis=-1)
