"""A KV cache as a value: blocks of one sequence on one mesh, in the form of a hand-off, to inspect,
cut, join and change.

The blocks' arrays are never donated and belong to no page pool, so a cache stays valid whatever the
engine does next, and its memory is freed with it. A cache never changes: cutting, joining and
changing return another. This module knows arrays and token ids, but no executors, channels or
pages.

Positions: keys are kept after rope, for the positions at which they were computed, and all but the
first layer's keys and values depend on every earlier token. A part that does not begin at 0 keeps
its positions. It can be inspected, saved, and joined behind a cache that ends where it begins, but
not pushed or decoded from by itself. Joined behind other tokens than those before it at its
computation, it is KV that the model would not have computed. Layers with a window are no exception:
a cache holds all their positions, including those that no window reaches.

Invariants: every token of `token_ids` has its KV in `blocks`, and each layer covers all positions
once, in order. `chosen` is the model's choice after them, whose KV is not there yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdisagg.engine.research.kv_blocks import KVBlock, KVPlace, LayerArray
from jdisagg.errors import IncompatiblePeerError, InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_NAMES, KVComponent, KVSpec
from jdisagg.model_api import Device
from jdisagg.ops.kv_pages import as_kept
from jdisagg.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NextToken:
    """The token chosen after a sequence, its sampling parameters and, if requested,
    log-probabilities."""

    token_id: int
    sampling: SamplingParams
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """The components of one layer by name: global arrays [K, T, H], heads sharded by the layout. A
    component without heads is [1, T, H], replicated. fp8 components are the bytes of the values
    divided by their scale."""

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
    """The KV of one sequence.

    Attributes:
        token_ids: Tokens of positions [first_position, first_position + T).
        chosen: The next token, or None after a cut, join or change.
        mesh, rank: Mesh with axes ("dp", "kv", "rep"), and the sequence's dp rank on it.
        seconds: Time of the prefill with its first token, or of reading a session's pages.
    """

    token_ids: tuple[int, ...]
    chosen: NextToken | None
    layout: Layout
    mesh: Mesh
    rank: int
    spec: KVSpec
    blocks: tuple[KVBlock, ...]
    seconds: float = 0.0
    first_position: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        since = f" from position {self.first_position} on" if self.first_position else ""
        following = f"next token {self.chosen.token_id}" if self.chosen else "no next token"
        return (
            f"KVCache({len(self)} tokens{since} x {self.layers} layers x {self.spec.row_heads} kv"
            f" heads, {self.spec.dtype}, {self.bytes} bytes, {self.layout}, on devices"
            f" {', '.join(str(device.id) for device in self.devices)}, {following})"
        )

    @property
    def next_token(self) -> NextToken:
        """Raises InvalidRequestError if none has been chosen."""
        if self.chosen is None:
            raise InvalidRequestError(
                f"this cache of {len(self)} tokens was cut, joined or changed and has no next"
                " token; push it into a session and generate"
            )
        return self.chosen

    @property
    def positions(self) -> range:
        """The positions at which the tokens' KV was computed."""
        return range(self.first_position, self.first_position + len(self))

    @property
    def layers(self) -> int:
        return len(self.spec.layers)

    @property
    def place(self) -> KVPlace:
        return KVPlace(self.mesh, self.rank, self.spec)

    @property
    def devices(self) -> list[Device]:
        """The devices of the rank that holds the sequence."""
        return self.place.devices

    @property
    def bytes(self) -> int:
        """Bytes of the tokens' KV without replicas and padding."""
        return len(self) * self.spec.bytes_per_token

    def layer(self, index: int) -> LayerKV:
        """The components of one layer, assembled from the blocks on their devices without a
        transfer. `np.asarray(kv.layer(0).k)` gathers one to the host."""
        index = self._layer_index(index)
        blocks = [block for block in self.blocks if block.layer == index]
        return LayerKV(self.place.read_layer(index, blocks))

    def __getitem__(self, tokens: slice) -> "KVCache":
        """A part of the tokens at their positions: `kv[:n]` is the KV of the first n tokens,
        `kv[n:]` that of the others (the module's docstring explains such parts). Whole blocks are
        shared; others are copied on their devices.

        Args:
            tokens: A slice as for sequences; negative numbers count from the end, and the step is
                1.

        Returns:
            A cache on the same devices. It has a next token if it ends with this cache.

        Raises:
            InvalidRequestError: The part is empty, has another step, or is not a slice.
        """
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            raise InvalidRequestError(
                f"kv[{tokens}] is not a run of tokens; give kv[start:stop] with step 1"
            )
        first, stop, _ = tokens.indices(len(self))
        if first >= stop:
            raise InvalidRequestError(
                f"kv[{first}:{stop}] of {len(self)} tokens is empty; a cache has one token or more"
            )
        span = (self.first_position + first, self.first_position + stop)
        return replace(
            self,
            token_ids=self.token_ids[first:stop],
            chosen=self.chosen if stop == len(self) else None,
            blocks=tuple(part for block in self.blocks for part in block.within(*span)),
            first_position=span[0],
        )

    def join(self, other: "KVCache") -> "KVCache":
        """Joins this cache and one whose positions follow it.

        Args:
            other: A cache of the same model. From another mesh or rank it is copied here by JAX,
                not over the channel.

        Returns:
            A cache on this one's devices, without a next token.

        Raises:
            IncompatiblePeerError: The other has another KV geometry.
            InvalidRequestError: It begins at another position than this one ends.
        """
        if other.spec != self.spec:
            raise IncompatiblePeerError(
                f"the KV geometry of one cache is {self.spec} and of the other {other.spec}; join"
                " caches of the same model"
            )
        if other.first_position != self.positions.stop:
            raise InvalidRequestError(
                f"the other cache begins at position {other.first_position} and this one ends"
                f" before {self.positions.stop}: its keys are rotated for their own positions; join"
                " one that begins there"
            )
        if (other.mesh, other.rank) == (self.mesh, self.rank):
            blocks = other.blocks
        else:
            blocks = blocks_of_layers(
                self.place,
                other.first_position,
                [other.layer(index).components for index in range(self.layers)],
            )
        return replace(
            self,
            token_ids=self.token_ids + other.token_ids,
            chosen=None,
            blocks=self.blocks + blocks,
            seconds=0.0,
        )

    def with_layer(self, index: int, **components: LayerArray) -> "KVCache":
        """This cache with other components in one layer: `kv.with_layer(3, v=0 * kv.layer(3).v)`.

        Decoding from the result first recomputes its last token, because no token was chosen over
        the changed KV. This also recomputes that token's own KV (in the session). To keep a change
        there, append a token.

        Args:
            index: The layer; negative numbers count from the end.
            components: Arrays by name (`k`, `v`, or `latent`) in the shapes of `layer(index)`, on
                any device; others stay. Floating values are rounded to the dtype of the KV; for fp8
                they must be divided by their scale.

        Returns:
            A cache on the same devices, without a next token.

        Raises:
            InvalidRequestError: There is no such layer or component, or a shape or dtype does not
                fit.
        """
        index = self._layer_index(index)
        held: dict[str, LayerArray] = dict(self.layer(index).components)
        kinds = {part.name: part for part in self.spec.layers[index].components}
        for name, array in components.items():
            if name not in kinds:
                raise InvalidRequestError(
                    f"layer {index} has no component {name!r}; it has {', '.join(kinds)}"
                )
            held[name] = self._fitting(kinds[name], array)
        fresh = self.place.put_layer(index, self.first_position, held)
        others = tuple(block for block in self.blocks if block.layer != index)
        return replace(self, chosen=None, blocks=others + tuple(fresh))

    def norms(self) -> np.ndarray:
        """The length of each vector (of keys and values, or of a latent) on the host: float32
        [layers, components, K, T], if all layers are alike."""
        return self._lengths(self._vectors())

    def distances(self, other: "KVCache") -> np.ndarray:
        """The distance of each vector from the other cache's, on the host: float32 [layers,
        components, K, T], if all layers are alike. Divide by `norms()` for relative distances.

        Raises:
            InvalidRequestError: The other has other positions.
            IncompatiblePeerError: The other has another KV geometry.
        """
        if other.spec != self.spec:
            raise IncompatiblePeerError(
                f"the KV geometry of one cache is {self.spec} and of the other {other.spec};"
                " compare caches of the same model"
            )
        if other.positions != self.positions:
            raise InvalidRequestError(
                f"one cache has positions {self.positions} and the other {other.positions};"
                " compare caches of the same positions, as kv[start:stop] gives them"
            )
        theirs = iter(other._vectors())
        return self._lengths([ours - next(theirs) for ours in self._vectors()])

    def _lengths(self, vectors: list[np.ndarray]) -> np.ndarray:
        lengths = np.stack([np.linalg.norm(x_KTH, axis=-1) for x_KTH in vectors])
        return lengths.reshape(self.layers, -1, *lengths.shape[1:])

    def _vectors(self) -> list[np.ndarray]:
        """All layers, [K, T, H] of each component, on the host."""
        layers = [self.layer(index).components for index in range(self.layers)]
        return [_values(np.asarray(x)) for layer in layers for x in layer.values()]

    def _layer_index(self, index: int) -> int:
        if not -self.layers <= index < self.layers:
            raise InvalidRequestError(f"layer {index} must be in [{-self.layers}, {self.layers})")
        return index % self.layers

    def _fitting(self, part: KVComponent, array: LayerArray) -> LayerArray:
        wanted, shape = jnp.dtype(self.spec.dtype_of(part)), self.place.shape(part, len(self))
        if tuple(np.shape(array)) != shape:
            raise InvalidRequestError(
                f"component {part.name!r} has shape {tuple(np.shape(array))}; it must be {shape}:"
                " kv heads, tokens, values"
            )
        if array.dtype == wanted:
            return array
        kept = KEPT_NAMES.get(wanted.name, wanted.name)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise InvalidRequestError(
                f"component {part.name!r} is of type {array.dtype}; KV is kept as {kept}"
            )
        return as_kept(jnp.asarray(array), wanted)


def _values(kept: np.ndarray) -> np.ndarray:
    """Values in float32; bytes are fp8."""
    values = kept.view(jnp.float8_e4m3fn) if kept.dtype == np.uint8 else kept
    return values.astype(np.float32)


def blocks_of_layers(
    place: KVPlace, first_position: int, layers: Sequence[Mapping[str, LayerArray]]
) -> tuple[KVBlock, ...]:
    """All layers' blocks on a place, from components [K, T, H] on any device."""
    return tuple(
        block
        for index, components in enumerate(layers)
        for block in place.put_layer(index, first_position, components)
    )
