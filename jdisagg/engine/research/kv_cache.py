"""The KV cache of one sequence, as an object that can be inspected, sliced, joined and modified.

The arrays of a cache are never donated and belong to no page pool. Therefore a cache stays valid
until the object is deleted. Caches are immutable: slicing, joining and modifying return a new
cache.

Positions: keys are stored after rotary embedding (rope), for the positions at which they were
computed. In all layers but the first, keys and values depend on every earlier token. A slice that
does not begin at position 0 keeps its positions. Such a slice can be inspected and saved, but not
pushed or decoded from.

Invariants: `blocks` hold the KV of every token of `token_ids`, and each layer covers all positions
once, in order. `chosen` is the model's next token, whose KV is not in the cache."""

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
    """The token chosen after a sequence, the sampling parameters of this choice and, if requested,
    log-probabilities."""

    token_id: int
    sampling: SamplingParams
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """The components of one layer by name: global arrays [K, T, H], with heads sharded by the
    layout. A component without heads is [1, T, H], replicated. fp8 components contain scaled values
    as bytes. Multiply the values by the scale to restore them."""

    components: Mapping[str, jax.Array]

    @property
    def k(self) -> jax.Array:
        """Keys, after rotary embedding."""
        return self.components["k"]

    @property
    def v(self) -> jax.Array:
        return self.components["v"]


@dataclass(frozen=True, eq=False)
class KVCache:
    """The KV cache of one sequence.

    Attributes:
        chosen: The next token. None after a slice, join or change.
        mesh, rank: Mesh with axes ("dp", "kv", "rep"), and the dp rank that holds the sequence.
        seconds: Seconds of the prefill including the next token, or of reading a session's pages.
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
        """Chosen next token. Raises InvalidRequestError if no token has been chosen."""
        if self.chosen is None:
            raise InvalidRequestError(
                f"this cache of {len(self)} tokens was cut, joined or changed and has no next"
                " token; push it into a session and generate"
            )
        return self.chosen

    @property
    def positions(self) -> range:
        """Positions of the tokens in the sequence from which their KV was computed."""
        return range(self.first_position, self.first_position + len(self))

    @property
    def layers(self) -> int:
        return len(self.spec.layers)

    @property
    def place(self) -> KVPlace:
        return KVPlace(self.mesh, self.rank, self.spec)

    @property
    def devices(self) -> list[Device]:
        return self.place.devices

    @property
    def bytes(self) -> int:
        return len(self) * self.spec.bytes_per_token

    def layer(self, index: int) -> LayerKV:
        """Returns the components of one layer, joined on their devices without a transfer.
        `np.asarray(kv.layer(0).k)` gathers the keys to the host."""
        index = self._layer_index(index)
        blocks = [block for block in self.blocks if block.layer == index]
        return LayerKV(self.place.read_layer(index, blocks))

    def __getitem__(self, tokens: slice) -> "KVCache":
        """Returns a slice of the cache at its original positions: `kv[:n]` has the first n tokens,
        `kv[n:]` the others. Whole blocks are shared with this cache. Partial blocks are copied on
        their devices.

        Args:
            tokens: A Python slice with step 1. Negative numbers count from the end.

        Returns:
            A cache on the same devices. It has this cache's next token if it includes the last
                token.

        Raises:
            InvalidRequestError: The slice is empty, or `tokens` is not a slice with step 1.
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
        """Appends another cache, whose first position must follow this cache's last position.

        Args:
            other: A cache of the same model. If it is on another mesh or dp rank, JAX copies its
                blocks.

        Returns:
            A cache on this cache's devices, without a next token.

        Raises:
            IncompatiblePeerError: The other has another KV geometry.
            InvalidRequestError: `other` does not begin at the position where this cache ends.
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
        """Returns this cache with components of one layer replaced: `kv.with_layer(3, v=0 *
        kv.layer(3).v)`.

        No next token was chosen with the changed KV. Therefore decoding from the result first
        recomputes the last token, whose KV is then overwritten in the session. To keep a change of
        the last token's KV, append a token.

        Args:
            index: The layer; negative numbers count from the end.
            components: New arrays by name (`k`, `v`, or `latent`) in the shapes of `layer(index)`,
                on any device. Floating values are rounded to the dtype of the KV; for fp8 divide
                them by the scale first.

        Returns:
            A cache on the same devices, without a next token.

        Raises:
            InvalidRequestError: The layer or component does not exist, or a shape or dtype differs.
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
        """Returns the Euclidean norm of each key, value or latent vector, on the host: float32
        [layers, components, K, T]. Requires equal shapes in all layers."""
        return self._lengths(self._vectors())

    def distances(self, other: "KVCache") -> np.ndarray:
        """Returns, for each key, value or latent vector, the Euclidean distance from the same
        vector of another cache, on the host: float32 [layers, components, K, T]. Requires equal
        shapes in all layers. Divide by `norms()` for relative distances.

        Raises:
            InvalidRequestError: The two caches have different positions.
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
    values = kept.view(jnp.float8_e4m3fn) if kept.dtype == np.uint8 else kept
    return values.astype(np.float32)


def blocks_of_layers(
    place: KVPlace, first_position: int, layers: Sequence[Mapping[str, LayerArray]]
) -> tuple[KVBlock, ...]:
    return tuple(
        block
        for index, components in enumerate(layers)
        for block in place.put_layer(index, first_position, components)
    )
