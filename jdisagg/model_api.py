"""The Protocol that a served model implements, so that compiled programs never depend on `models/`.

A model is a stem (embedding, final norm, head) and a list of layers. Each is a Flax NNX module
whose parameters have logical axes. Inside `shard_map`, all calls work on local shards, and `Shards`
names the mesh axes. If `Shards` has no axes, they work on whole arrays. The sizes of the local
shard follow from the weights. Activations `x_TD` are replicated over tp.

Suffixes of array names give the dimensions: T tokens of a step, R rows, D model width, N query
heads, K kv heads, H head width, V vocabulary, E experts. In shapes, r is the rank of an adapter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.layout.axes import LogicalAxis, ModelGeometry
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.prompt.images import ImageFormat

if TYPE_CHECKING:

    class Device(Protocol):
        """The attributes of `jax.Device` that jdisagg uses. JAX sets them at run time, where type
        checkers cannot see them."""

        id: int
        platform: str
        device_kind: str
        process_index: int

        def memory_stats(self) -> Mapping[str, int] | None: ...
else:
    Device = jax.Device


class AdapterRows(NamedTuple):
    """The adapter slot of each token of a step.

    Attributes:
        slot_T: int32 number of each token's adapter slot. 0 is the base model without an adapter.
        alike: Whether all tokens except padding have the same slot.
    """

    slot_T: jax.Array
    alike: bool = False

    def of_rows(self, rows_R: jax.Array) -> "AdapterRows":
        """Returns the slots of the tokens with the indices `rows_R`. An index of -1 is padding."""
        return self if self.alike else AdapterRows(jnp.take(self.slot_T, rows_R, mode="clip"))


@dataclass(frozen=True, slots=True)
class Shards:
    """Names of the mesh axes inside `shard_map`, with the platform for which each op chooses its
    implementation.

    If all axes are empty, there is one device and no collective.

    Attributes:
        tp: Axes that split heads, ffn and vocabulary.
        dp: Axes that split the tokens of a step.
        ep: Axes over which whole experts are distributed. If empty, each expert is sharded over tp.
        platform: JAX platform name.
        device_kind: JAX device kind, for kernels that differ by device.
        adapters: Adapter slots of the step's tokens. None if the mesh has no adapter slots.
        record: Function that a layer with experts calls with the experts that it chooses for each
            token, int32 [T, J]. None if they are not recorded.
    """

    tp: tuple[str, ...] = ()
    dp: tuple[str, ...] = ()
    ep: tuple[str, ...] = ()
    platform: str = "cpu"
    device_kind: str = ""
    adapters: AdapterRows | None = None
    record: Callable[[jax.Array], None] | None = field(default=None, compare=False)

    def of_rows(self, rows_R: jax.Array | None) -> "Shards":
        """Returns a copy for a computation on the tokens with the indices `rows_R` only, with the
        adapter slots of these tokens. None means all tokens."""
        if self.adapters is None or rows_R is None:
            return self
        return replace(self, adapters=self.adapters.of_rows(rows_R))


class Latent(NamedTuple):
    """Matrices that map the cached vector of multi-head latent attention to keys and values.

    The vector has rank + rope numbers: a compressed part of size `rank`, and a part of size `rope`
    to which rotary positions are applied. The key of a local head has nope + rope numbers: the
    compressed part times the head's matrix in `keys_NRH` [N, rank, nope], then the rope part
    unchanged. The head's value is the compressed part times its matrix in `values_NRH` [N, rank,
    value]. See `ops/latent_attention.py`."""

    keys_NRH: jax.Array
    values_NRH: jax.Array


class Index(NamedTuple):
    """Inputs of an indexer, which selects the positions that each token attends to.

    With `block` 0 (DeepSeek Sparse Attention; see `ops/sparse_attention.py`) the score of position
    s for token t is the sum over heads h of `weights_TH[t, h] * relu(queries_THD[t, h] . keys[s])`.
    Token t attends to the `top` positions with the largest scores of those up to its own. Heads are
    not sharded, so that the selection does not depend on the layout.

    With `block` above 0 (MiniMax M3; see `ops/block_attention.py`) each kv head selects blocks of
    `block` positions, by the query head of `queries_THD` with its index. `weights_TH` is None. The
    score of a block is the largest `queries_THD[t, h] . keys[s]` of its positions s up to t's own.
    Token t attends to the `top` blocks with the largest scores. The last `local` blocks up to its
    own are always among these.

    Of equal scores, the one at the smallest position is selected. `keys_T1D` are the indexer's keys
    of all tokens, which are cached. Queries and weights have the same tokens as the `q_TNH` of
    `Attend`."""

    queries_THD: jax.Array
    keys_T1D: jax.Array
    weights_TH: jax.Array | None
    top: int
    block: int = 0
    local: int = 0

    @property
    def positions(self) -> int:
        """Number of positions that a token can select. Shorter sequences are attended to in
        full."""
        return self.top * max(1, self.block)

    def of_queries(self, change: Callable[[jax.Array], jax.Array]) -> "Index":
        """Returns a copy with `change` applied to the queries and the weights."""
        weights = None if self.weights_TH is None else change(self.weights_TH)
        return self._replace(queries_THD=change(self.queries_THD), weights_TH=weights)


class AttentionOptions(TypedDict, total=False):
    """How a layer computes attention.

    Attributes:
        scale: Number by which the attention scores are multiplied.
        window: Number of positions that a token attends to, including its own. None means all.
        cap: Soft cap of the scaled scores by a tanh (Gemma 2). 0 means no cap.
        sinks_N: One attention sink per local head: a score in the softmax without a value
            (gpt-oss).
        latent: Matrices of a layer that caches one vector per token. `k_TKH` is then this vector,
            [T, 1, rank + rope], and `v_TKH` is None.
        index: Inputs of the layer's indexer. Its keys are cached too. An indexer that selects
            positions is used with `latent`, one that selects blocks without.
    """

    scale: Required[float]
    window: Required[int | None]
    cap: float
    sinks_N: jax.Array | None
    latent: Latent | None
    index: Index | None


class AttendOptions(AttentionOptions, total=False):
    """
    Attributes:
        follows: Whether each token attends to the positions that the indexer of an earlier layer
            selected for it. It is the last layer before this one that has an indexer.
        source: Index of the model's layer whose KV a layer that drafts tokens attends to. Given by
            layers of a `DraftLayer` with `reads` only.
    """

    follows: bool
    source: int


class Attend(Protocol):
    """Attention of one layer over the KV cache: writes keys and values to the cache and returns the
    attention output.

    Args:
        q_TNH, k_TKH, v_TKH: Queries, keys and values of the local heads, after rope. If the layer
            returns only some tokens, `q_TNH` has only these tokens, while keys and values are of
            all tokens. `k_TKH` and `v_TKH` are None in a layer that reads the KV of an earlier
            layer (`KVLayer.source`).

    Returns:
        o_TNH in q's dtype, with heads as wide as the values.
    """

    def __call__(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        **how: Unpack[AttendOptions],
    ) -> jax.Array: ...


class Runs(NamedTuple):
    """The positions of the sequences in a packed prefill chunk.

    A row is one sequence's part of the chunk. Row r has `count_R[r]` tokens (possibly none) from
    index `first_R[r]` on. Token t is token number `index_T[t]` of row `row_T[t]`. It is padding if
    `row_T[t]` is -1. Rows start at multiples of `grain` tokens, a power of two.

    `stop_R` requests the recurrent state at a second place of a row: after the first `stop_R[r]`
    tokens of row r. The value is a multiple of `grain`, or `count_R[r]`, or 0 to request no state.
    `stop_R` is None if no row requests a state.

    `short`: Row r consists of the `grain` tokens from r * `grain` on, of which the first
    `count_R[r]` are real."""

    row_T: jax.Array
    index_T: jax.Array
    first_R: jax.Array
    count_R: jax.Array
    grain: int
    stop_R: jax.Array | None = None
    short: bool = False

    @property
    def ends(self) -> tuple[jax.Array, ...]:
        """Numbers of tokens of each row after which states are returned: first all tokens of each
        row, then the entries of `stop_R`."""
        return (self.count_R,) if self.stop_R is None else (self.count_R, self.stop_R)


class GivenTokens(NamedTuple):
    """The tokens of a step, int32 [T], and their embeddings [T, D], for layers that read them in
    addition to the activations before the layer."""

    tokens_T: jax.Array
    embedded_TD: jax.Array

    def of_rows(self, rows_R: jax.Array | None) -> "GivenTokens":
        """Returns the tokens with the indices `rows_R`; -1 is padding. None means all tokens."""
        if rows_R is None:
            return self
        return GivenTokens(*(jnp.take(part, rows_R, axis=0, mode="clip") for part in self))


State = tuple[jax.Array, ...]
Inputs = tuple[jax.Array, ...]  # arrays [T, ...]
Advance = Callable[[Inputs, State, Runs | None], tuple[jax.Array, State]]


class Recur(Protocol):
    """Runs a recurrent layer over its tokens, from the stored state of each sequence.

    Calls `advance` with `inputs`, the arrays of all tokens from which outputs and states are
    computed, with the layer's state of each row (sequence), and with `Runs`, which locates the
    rows. The state is the local shard, [R, heads, width] for each component. It is zero for a row
    at the start of a sequence. `Runs` is None if each token is a row. Stores the new state that
    `advance` returns, and returns the output of `advance`. If `Runs` has `stop_R`, the new state
    has 2R rows: first the states at the ends of the rows, then those after `stop_R` tokens.

    In a step with drafts, `advance` is called with the inputs in another order, and twice: the new
    state is that after the accepted tokens.
    """

    def __call__(self, inputs: Inputs, advance: Advance) -> jax.Array: ...


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
        given: GivenTokens | None = None,
    ) -> jax.Array:
        """Computes one layer.

        Args:
            x_TD: Activations, replicated over tp.
            positions_T: int32 rotary position of each token, or [T, 3] with the time, row and
                column of each token if the model reads images with spatial positions.
            attend: Attention over the program's cache.
            shards: Mesh axes inside `shard_map`.
            valid_T: bool mask of real tokens. Padding is routed to no expert.
            rows_R: int32 indices of the tokens to return, -1 for padding, possibly empty. None
                returns all tokens. Keys and values are computed for all tokens in any case. The
                last layer of a prefill needs only the tokens to sample from.
            recur: Runs a recurrent layer from the stored state of each sequence. Only recurrent
                layers use it.
            given: The step's tokens. Only layers of a model with `reads_tokens` use it.

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

    def normed(self, x_RD: jax.Array) -> jax.Array:
        """Applies the final norm alone."""
        ...

    def project(self, y_RD: jax.Array, shards: Shards, *, apart: bool = False) -> jax.Array:
        """Applies the head alone: `logits` of activations after the norm. With `apart`, returns
        this device's share of the rows only (`ops.embedding.gather_logits`)."""
        ...


class DraftLayer(Protocol):
    """A layer that drafts tokens for speculative decoding: it predicts the token after the next
    one.

    The layer uses the model's embedding. A checkpoint's own layer (multi-token prediction) also
    uses the model's head.

    A layer has KV of its own, or it `reads` that of the model's layers. It then computes drafts
    only: all drafts of a chain attend to the positions that the model has computed, and have the
    rotary position of the chain's first token.

    Attributes:
        source: Name of this kind of draft in metrics.
        taps: Indices of model layers. The input hidden state of the draft layer is the
            concatenation of the activations before these layers. If `taps` is empty, the input is
            the model's activations after the final norm.
        reads: Indices of model layers whose KV the layer attends to. Empty if it has KV of its own.
    """

    source: str
    taps: tuple[int, ...]
    reads: tuple[int, ...]

    def fused(self, y_TD: jax.Array, shards: Shards) -> jax.Array:
        """Maps the model's hidden states (see `taps`) to the layer's width."""
        ...

    def logits(self, y_RD: jax.Array, shards: Shards) -> jax.Array | None:
        """Returns the logits of the next token, float32 [R, V], from the layer's results. Returns
        None if `Stem.project` computes the logits."""
        ...

    def carried(self, y_RD: jax.Array, shards: Shards) -> jax.Array:
        """Maps the layer's results to the hidden states from which the next token is drafted."""
        ...

    def __call__(
        self,
        embedded_TD: jax.Array,
        y_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        valid_T: jax.Array | None = None,
        rows_R: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the layer.

        Args:
            embedded_TD: Embedding of each token.
            y_TD: Hidden state at the position before each token: the result of `fused`, or that
                of `carried`. For an unknown state, both `y_TD` and `embedded_TD` are zero, and so
                are the keys and values.
            positions_T, attend, shards, valid_T, rows_R: As in `Layer`.

        Returns:
            The hidden state at each token, [T, D] or [R, D].
        """
        ...


# Creates the array that holds one LoRA matrix (A or B) of all adapter slots, from its shape and the
# logical axes of its dimensions.
MakeStack = Callable[[tuple[int, ...], tuple[LogicalAxis, ...]], object]
# Path of an adapter's module in its layer, such as ("mlp", "gate", "adapter").
ModulePath = tuple[str, ...]


class AdapterSize(NamedTuple):
    """Size of the memory for LoRA adapters on a mesh.

    Attributes:
        slots: Number of adapters that are in memory at the same time. 0 means no memory.
        rank: Largest rank of an adapter.
        experts: Whether adapters may also change the matrices of routed experts.
    """

    slots: int = 0
    rank: int = 0
    experts: bool = False


class AdapterContent(NamedTuple):
    """A LoRA adapter as host arrays.

    Attributes:
        digest: Hash of the adapter's files.
        layers: For each layer of the model, the two LoRA matrices of each adapted module: A [in, r]
            and B [r, out]. B includes the LoRA scale. Matrices of experts have a leading dimension
            [E].
    """

    digest: str
    layers: tuple[Mapping[ModulePath, tuple[np.ndarray, np.ndarray]], ...]


class Vision(Protocol):
    """A vision encoder, which maps the patches of an image to activations of the text model
    (`executor/image_programs.py`).

    The modules `patches`, `blocks` and the mergers are called as in `models/vision.py`. `format` is
    how the model represents images in a prompt. `deep_mergers[n]` maps the output of block
    `deep_after[n]` to activations that are added after layer n of the text model. An instance
    caches the activations of `kept_rows` image tokens on each device."""

    @property
    def patches(self) -> object: ...
    @property
    def blocks(self) -> Sequence[object]: ...
    @property
    def merger(self) -> object: ...
    @property
    def deep_mergers(self) -> Sequence[object]: ...
    @property
    def deep_after(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> ImageFormat: ...
    @property
    def kept_rows(self) -> int: ...


class Model(Protocol):
    """An NNX module that can be served.

    `vocabulary` is the unpadded size. `context_tokens` is the length of the longest sequence that
    the model supports. `head` is the stem with final norm and head. It differs from `stem` only if
    the weights are loaded for several pipeline stages. `next_token` is the layer that drafts
    tokens, or None without such a layer. KV of its own is the last entry of `kv_spec`.
    `vision` is None if the model reads no images. `reads_tokens` is whether layers read the
    step's tokens (`GivenTokens`)."""

    @property
    def stem(self) -> Stem: ...
    @property
    def head(self) -> Stem: ...
    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def next_token(self) -> DraftLayer | None: ...
    @property
    def vision(self) -> Vision | None: ...
    @property
    def reads_tokens(self) -> bool: ...
    @property
    def kv_spec(self) -> KVSpec: ...
    @property
    def geometry(self) -> ModelGeometry: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...

    def adapted_layers(self, adapters: AdapterSize, make: MakeStack) -> Sequence[Layer]:
        """Returns copies of `layers` that also have memory for LoRA adapters.

        The copies share the weights of `layers`. Beside each weight matrix that an adapter may
        change is a module whose name ends with "adapter". `make` creates its parameters `a` [in,
        slots, rank] and `b` [slots, rank, out]. The parameters of experts have a leading dimension
        [E]."""
        ...

    def read_adapter(self, directory: Path, adapters: AdapterSize) -> AdapterContent:
        """Reads an adapter from a folder. Raises `InvalidRequestError` if its rank or its modules
        do not fit the slots that `adapters` describes."""
        ...
