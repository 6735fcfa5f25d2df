"""What a model must offer to be served: a Protocol, so that programs depend on this and never on
`models/`.

A model is a stem (embedding, final norm, head) and a list of layers, each a Flax NNX module whose
parameters carry logical axes. All calls work on LOCAL shards inside `shard_map` (`Shards` names the
mesh axes), or on whole arrays when `Shards()` has no axes; local sizes are read off the weights.
Activations are flattened tokens, `x_TD`, replicated over tp."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax

from jdisagg.layout.axes import ModelGeometry
from jdisagg.layout.kv_spec import KVSpec

if TYPE_CHECKING:

    class Device(Protocol):
        """What we use of `jax.Device`, which JAX sets at run time and type checkers do not know."""

        id: int
        platform: str
        device_kind: str
        process_index: int

        def memory_stats(self) -> Mapping[str, int] | None: ...
else:
    Device = jax.Device


@dataclass(frozen=True, slots=True)
class Shards:
    """Mesh axis names inside `shard_map`, and the platform whose implementation of each op is
    wanted.

    `tp`: axes that split heads, ffn and vocabulary. `dp`: axes that split the tokens of a step.
    `ep`: axes that spread whole experts (empty: experts are sharded inside, over tp). All empty:
    one device, no collectives. `device_kind`: as JAX names the devices, where kernels differ."""

    tp: tuple[str, ...] = ()
    dp: tuple[str, ...] = ()
    ep: tuple[str, ...] = ()
    platform: str = "cpu"
    device_kind: str = ""


class Latent(NamedTuple):
    """How the vector that multi-head latent attention caches of a token becomes keys and values:
    [rank + rope] -> for each local head a key of nope + rope values, its first ones the vector's
    first `rank` times `keys_NRH` [N, rank, nope], the last ones the vector's last; and a value, the
    first `rank` times `values_NRH` [N, rank, value]. See `ops/latent_attention.py`."""

    keys_NRH: jax.Array
    values_NRH: jax.Array


class Attend(Protocol):
    """Attention of one layer over whatever cache the program keeps: writes k, v and returns the
    mix.

    Args:
        q_TNH, k_TKH, v_TKH: local heads, after rope. A layer that was asked for some rows alone has
            queries of these, in their order, and keys and values of all tokens.
        scale: of the scores.
        window: positions seen, the token's own included; None: all.
        cap: scaled scores are bounded by it through a tanh (Gemma 2); 0: they are not.
        sinks_N: of each local head a score that takes its part of the softmax and mixes nothing
            in (gpt-oss).
        latent: of a layer that caches one vector a token: `k_TKH` is this, [T, 1, rank + rope], and
            there is no `v_TKH`.

    Returns:
        o_TNH, in q's dtype, heads as wide as the values.
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
    """Where the sequences of a chunk lie among its tokens: row r has `count_R[r]` tokens from
    `first_R[r]` on (perhaps none), and token t is the `index_T[t]`-th of row `row_T[t]` (-1:
    padding). Rows begin at multiples of `grain` tokens, a power of two."""

    row_T: jax.Array
    index_T: jax.Array
    first_R: jax.Array
    count_R: jax.Array
    grain: int


State = tuple[jax.Array, ...]
Advance = Callable[[State, Runs | None], tuple[jax.Array, State]]


class Recur(Protocol):
    """A layer's pass over its tokens from the state in which each sequence left it.

    Calls `advance` with the layer's state of each row, local [R, heads, width] by component of its
    KV spec (zeros where a sequence begins), and how rows lie among the tokens (None: each token is
    a row); keeps the state that it returns, and returns its output.
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
        """One block.

        Args:
            x_TD: activations, replicated over tp.
            positions_T: int32, of each token in its sequence.
            attend: attention over the program's cache.
            shards: the mesh axes inside `shard_map`.
            valid_T: bool, marks real tokens: padding is routed to no expert.
            rows_R: int32, indices of tokens, -1 for padding, perhaps none at all: only these leave
                the layer. Keys and values are still those of all tokens; nothing else is computed
                for the others. What the last layer of a prefill is asked.
            recur: the program's state, for a layer that keeps some.

        Returns:
            x [T, D], or [R, D] where `rows_R` is given.
        """
        ...


class Stem(Protocol):
    def embed(self, tokens_T: jax.Array, shards: Shards) -> jax.Array:
        """Token ids int32 [T] -> x [T, D], replicated over tp."""
        ...

    def logits(self, x_RD: jax.Array, shards: Shards) -> jax.Array:
        """Final norm and head: [R, D] -> float32 [R, V_padded], gathered over tp; padded columns
        are -inf."""
        ...


class Model(Protocol):
    """An NNX module. `vocabulary` is the unpadded size; `context_tokens` the longest sequence it
    was built for."""

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
