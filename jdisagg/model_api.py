"""The Protocol that a served model implements, so that programs never depend on `models/`.

A model is a stem (embedding, final norm, head) and a list of layers. Each is a Flax NNX module
whose parameters carry logical axes. All calls work on LOCAL shards inside `shard_map`, where
`Shards` names the mesh axes, or on whole arrays if `Shards()` has no axes. Local sizes follow from
the weights. Activations are flattened tokens, `x_TD`, replicated over tp."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax

from jdisagg.layout.axes import ModelGeometry
from jdisagg.layout.kv_spec import KVSpec

if TYPE_CHECKING:

    class Device(Protocol):
        """The attributes of `jax.Device` in use. JAX sets them at run time, so type checkers do not
        find them."""

        id: int
        platform: str
        device_kind: str
        process_index: int

        def memory_stats(self) -> Mapping[str, int] | None: ...
else:
    Device = jax.Device


@dataclass(frozen=True, slots=True)
class Shards:
    """Mesh axis names inside `shard_map`, and the platform that selects each op's implementation.

    Without axes there is one device and no collectives.

    Attributes:
        tp: Axes that split heads, ffn and vocabulary.
        dp: Axes that split the tokens of a step.
        ep: Axes that spread whole experts. If empty, experts are sharded inside, over tp.
        platform: JAX platform name.
        device_kind: JAX device kind, for kernels that differ by device.
    """

    tp: tuple[str, ...] = ()
    dp: tuple[str, ...] = ()
    ep: tuple[str, ...] = ()
    platform: str = "cpu"
    device_kind: str = ""


class Latent(NamedTuple):
    """Matrices that map the cached vector of multi-head latent attention to keys and values.

    The vector has [rank + rope] values. A local head's key has nope + rope values: the first `rank`
    values times the head's matrix in `keys_NRH` [N, rank, nope], then the rope values unchanged.
    The head's value is the first `rank` values times its matrix in `values_NRH` [N, rank, value].
    See `ops/latent_attention.py`."""

    keys_NRH: jax.Array
    values_NRH: jax.Array


class Attend(Protocol):
    """Attention of one layer over the program's cache: writes k and v and returns the mix.

    Args:
        q_TNH, k_TKH, v_TKH: Local heads after rope. If the layer returns only some rows, queries
            are those rows in order, and keys and values are of all tokens.
        scale: Factor of the scores.
        window: Positions attended to, the token's own included. None means all.
        cap: Bound of scaled scores through a tanh (Gemma 2). 0 means none.
        sinks_N: One attention sink per local head: a score in the softmax without a value
            (gpt-oss).
        latent: Matrices of a layer that caches one vector a token. `k_TKH` is then this vector, [T,
            1, rank + rope], and `v_TKH` is None.

    Returns:
        o_TNH in q's dtype, with heads as wide as the values.
    """

    def __call__(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array | None,
        *,
        scale: float,
        window: int | None,
        cap: float = 0.0,
        sinks_N: jax.Array | None = None,
        latent: Latent | None = None,
    ) -> jax.Array: ...


class Runs(NamedTuple):
    """Positions of the sequences of a chunk among its tokens.

    Row r has `count_R[r]` tokens from `first_R[r]` on (possibly none). Token t is the
    `index_T[t]`-th of row `row_T[t]`, or padding if that is -1. Rows start at multiples of `grain`
    tokens, a power of two."""

    row_T: jax.Array
    index_T: jax.Array
    first_R: jax.Array
    count_R: jax.Array
    grain: int


State = tuple[jax.Array, ...]
Advance = Callable[[State, Runs | None], tuple[jax.Array, State]]


class Recur(Protocol):
    """Runs a recurrent layer over its tokens, from the stored state of each sequence.

    Calls `advance` with each row's state of the layer and with the rows' `Runs`. The state is
    local, [R, heads, width] per component of the KV spec, and zero where a sequence starts. `Runs`
    is None if each token is a row. Stores the state that `advance` returns, and returns its output.
    """

    def __call__(self, advance: Advance) -> jax.Array: ...


class Layer(Protocol):
    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        valid_T: jax.Array | None = None,
        rows_R: jax.Array | None = None,
        recur: Recur | None = None,
    ) -> jax.Array:
        """Computes one block.

        Args:
            x_TD: Activations, replicated over tp.
            positions_T: int32 position of each token in its sequence.
            attend: Attention over the program's cache.
            shards: Mesh axes inside `shard_map`.
            valid_T: bool mask of real tokens. Padding is routed to no expert.
            rows_R: int32 indices of the tokens to return, -1 for padding, possibly none. Keys and
                values are still computed for all tokens. The last layer of a prefill uses this.
            recur: Access to the stored state, for recurrent layers.

        Returns:
            x [T, D], or [R, D] with `rows_R`.
        """
        ...


class Stem(Protocol):
    def embed(self, tokens_T: jax.Array, shards: Shards) -> jax.Array:
        """Maps int32 token ids [T] to x [T, D], replicated over tp."""
        ...

    def logits(self, x_RD: jax.Array, shards: Shards) -> jax.Array:
        """Applies final norm and head: [R, D] to float32 [R, V_padded], gathered over tp. Padded
        columns are -inf."""
        ...


class Model(Protocol):
    """An NNX module that can be served. `vocabulary` is the unpadded size. `context_tokens` is the
    longest sequence that the model supports."""

    @property
    def stem(self) -> Stem: ...
    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def kv_spec(self) -> KVSpec: ...
    @property
    def geometry(self) -> ModelGeometry: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
