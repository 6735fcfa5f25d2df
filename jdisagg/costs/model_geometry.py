"""Sizes that determine the memory and the speed of a model: attention, feed-forward, experts,
vocabulary.

A `CostGeometry` comes from a catalogue of published models, from the configuration of a model
served by `models/`, or from a config.json of another family. Planning and simulation need no
weights. Numbers of parameters and KV bytes are exact, except that norms, biases and the position
embedding of OPT are not counted. This module must not depend on hardware or layout."""

import math
from dataclasses import dataclass, field

from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.errors import ConfigError
from jdisagg.layout.kv_spec import DTYPE_BYTES
from jdisagg.plain import Message


class GroupedAttention(Message, frozen=True):
    """Sizes of multi-head, grouped-query or multi-query attention, depending on `kv_heads`.

    Attributes:
      window: Number of positions that a token attends to in `windowed_layers` layers, including its
        own position.
      full_kv_heads, full_head_dim: Number of kv heads and head size of the layers without a window;
        0 if all layers have `kv_heads` and `head_dim`.
      full_query_heads: Number of query heads of the layers without a window; 0 if this number is
        also `query_heads`.
      keys_are_values: Whether one matrix computes both keys and values, in the layers without a
        window, or in all layers if `full_kv_heads` is 0.
      indexed_layers: Number of layers with an indexer. An indexer has one query of `index_dim`
        values for each kv head, and selects `index_top` positions for each token. The indexer's
        key is part of the KV.
      value_dim: Head size of values; 0 if it equals `head_dim`.
      shared_layers, shared_windowed: Number of layers that read the keys and values of an earlier
        layer, and number of those with a window. They are the last layers.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    windowed_layers: int = 0
    gated: bool = False
    full_kv_heads: int = 0
    full_head_dim: int = 0
    keys_are_values: bool = False
    indexed_layers: int = 0
    index_dim: int = 0
    index_top: int = 0
    value_dim: int = 0
    full_query_heads: int = 0
    head_gates: bool = False
    shared_layers: int = 0
    shared_windowed: int = 0

    @property
    def value_size(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def mean_size(self) -> int:
        return (self.head_dim + self.value_size) // 2

    @property
    def full(self) -> "GroupedAttention | None":
        """Attention sizes of the layers without a window, or None if all layers have the same
        sizes."""
        if not self.full_kv_heads:
            return None
        return GroupedAttention(
            self.full_query_heads or self.query_heads,
            self.full_kv_heads,
            self.full_head_dim,
            gated=self.gated,
            keys_are_values=self.keys_are_values,
            value_dim=self.value_dim,
            head_gates=self.head_gates,
        )

    @property
    def made_heads(self) -> int:
        """Number of key and value heads that the projections of one layer compute."""
        return self.kv_heads * (1 if self.keys_are_values and not self.full_kv_heads else 2)

    @property
    def shared_kv_heads(self) -> int:
        """Largest number of shards among which the kv heads of every layer can be divided
        evenly."""
        return math.gcd(self.kv_heads, self.full_kv_heads)

    def parameters(self, width: int) -> int:
        keys = (1 + self.gated) * self.query_heads + self.kv_heads
        values = self.query_heads + self.made_heads - self.kv_heads
        gates = self.head_gates * self.query_heads
        return width * (self.head_dim * keys + self.value_size * values + gates)

    def kv_parameters(self, width: int) -> int:
        keys = self.head_dim * self.kv_heads
        return width * (keys + self.value_size * (self.made_heads - self.kv_heads))

    def index_parameters(self, width: int) -> int:
        return width * self.index_dim * (self.kv_heads + 1)

    @property
    def row_values(self) -> int:
        """Number of values of a row of KV (`layout/kv_spec.py`)."""
        return math.gcd(self.head_dim, self.value_size, self.index_dim // self.kv_heads)

    @property
    def kv_values(self) -> int:
        return self.kv_heads * (self.head_dim + self.value_size)


class LatentAttention(Message, frozen=True):
    """Sizes of MLA (DeepSeek-V2, arXiv 2405.04434). The KV of a token is a latent of `kv_rank`
    values and a part with rotary embedding; all heads share both.

    Attributes:
      index_heads, index_dim, index_top: Number of heads and key size of an indexer, and number of
        positions that it selects for each token. All are 0 without an indexer. The indexer's key
        is part of the KV.
      shared_layers: Number of layers that have no indexer, but attend to the positions that the
        indexer of an earlier layer selected.
      head_gates: Whether each head's output has a gate.
    """

    query_heads: int
    query_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    index_heads: int = 0
    index_dim: int = 0
    index_top: int = 0
    shared_layers: int = 0
    head_gates: bool = False

    @property
    def shared(self) -> "LatentAttention":
        """Sizes of a layer without an indexer."""
        sizes = (self.query_rank, self.kv_rank, self.rope_dim, self.nope_dim, self.value_dim)
        return LatentAttention(self.query_heads, *sizes, head_gates=self.head_gates)

    def parameters(self, width: int) -> int:
        query = width * self.query_rank + self.query_rank * self.query_heads * (
            self.nope_dim + self.rope_dim
        )
        if not self.query_rank:
            query = width * self.query_heads * (self.nope_dim + self.rope_dim)
        keys = width * (self.kv_rank + self.rope_dim) + self.unpacking_parameters
        index = self.query_rank * self.index_heads * self.index_dim
        index += width * (self.index_dim + self.index_heads)
        gates = self.head_gates * self.query_heads * width
        return query + keys + self.query_heads * self.value_dim * width + index + gates

    @property
    def unpacking_parameters(self) -> int:
        return self.kv_rank * self.query_heads * (self.nope_dim + self.value_dim)

    @property
    def kv_values(self) -> int:
        return self.kv_rank + self.rope_dim + self.index_dim

    @property
    def row_values(self) -> int:
        """Number of values of a row of KV (`layout/kv_spec.py`)."""
        return math.gcd(self.kv_rank + self.rope_dim, self.index_dim)


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a mixture of experts. Each token uses `active` of `count` routed experts, whose
    inner width is `ffn`.

    Attributes:
      latent: Width to which tokens are projected before the routed experts; 0 for none.
      groups_of_token: Largest number of expert groups that a token uses; 0 for no limit. Each group
        is placed on one host (node-limited routing, DeepSeek-V3, section 2.1.2).
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    latent: int = 0
    groups_of_token: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ConfigError(
                f"model geometry: {self.active} active experts of {self.count}; active must be"
                " between 1 and all"
            )

    def routed_width(self, width: int) -> int:
        return self.latent or width

    def touched(self, tokens: float) -> float:
        """Returns the expected number of distinct experts that `tokens` tokens use together, if
        routing is random."""
        return self.count * (1.0 - (1.0 - self.active / self.count) ** tokens)


class ImageEncoder(Message, frozen=True):
    """Sizes of a vision encoder.

    Attributes:
        patch_values: Number of values that the largest program needs for each patch.
        most_patches: Largest number of patches of an image.
        kept_rows: Number of image tokens whose activations a device keeps.
    """

    parameters: int
    patch_values: int
    most_patches: int
    kept_rows: int


@dataclass(frozen=True, slots=True)
class AssistantSizes:
    """Numbers of layers and parameters of a Gemma 4 assistant, which drafts tokens from the KV of
    the model."""

    layers: int
    parameters: int


@dataclass(frozen=True, slots=True)
class CostGeometry:
    """Sizes of one model.

    Attributes:
      layers: Number of layers. `expert_layers` of them have experts, and the others a dense ffn.
      linear: Sizes of the layers with recurrence instead of attention, or None.
      without_mixer, without_ffn: Number of layers with neither attention nor recurrence, and number
        of layers without an ffn.
      matrix_bits: Bits per value of quantized matrices; 0 if the matrices have the model's data
        type. The scales, one float32 per output, are not counted.
      kv_dtype: Data type of KV; empty if it is the model's data type.
      next_token_layers: Number of next-token layers that can be loaded in addition to `layers`.
        Ignored when geometries are compared.
      images: Sizes of the vision encoder, or None without one. Ignored when geometries are
        compared.
      token_inputs: Number of values of a token that each layer reads from a table by the token's
        id; 0 for none.
      doubled_ffn: Number of layers whose dense ffn is twice as wide. They are among those that read
        the KV of an earlier layer.
      assistant: Sizes of the assistant that drafts tokens, or None.
    """

    name: str
    width: int
    layers: int
    vocabulary: int
    attention: GroupedAttention | LatentAttention
    ffn: int
    gated: bool = True
    tied: bool = False
    experts: Experts | None = None
    expert_layers: int = 0
    context_tokens: int = 4096
    matrix_bits: int = 0
    linear: LinearAttention | None = None
    without_mixer: int = 0
    without_ffn: int = 0
    kv_dtype: str = ""
    next_token_layers: int = field(default=0, compare=False)
    images: ImageEncoder | None = field(default=None, compare=False)
    token_inputs: int = 0
    doubled_ffn: int = 0
    assistant: AssistantSizes | None = None

    def __post_init__(self) -> None:
        for name in ("width", "layers", "vocabulary", "context_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model geometry {self.name}: {name} must be at least 1, got"
                    f" {getattr(self, name)}"
                )
        if self.expert_layers and self.experts is None:
            raise ConfigError(
                f"model geometry {self.name}: {self.expert_layers} expert layers and no experts;"
                " describe the experts"
            )
        if not 0 <= self.expert_layers <= self.layers:
            raise ConfigError(
                f"model geometry {self.name}: expert_layers={self.expert_layers} is not within"
                f" 0..{self.layers}"
            )
        if (
            isinstance(self.attention, GroupedAttention)
            and not 0 <= self.attention.windowed_layers <= self.attention_layers
        ):
            raise ConfigError(
                f"model geometry {self.name}: windowed_layers={self.attention.windowed_layers} is"
                f" not within 0..{self.attention_layers}"
            )

    @property
    def attention_kinds(self) -> tuple[tuple[GroupedAttention | LatentAttention, int], ...]:
        """The kinds of attention layers, each as (sizes, number of layers). A model has up to two
        kinds: layers with a window come first, then layers without; or layers with an indexer, then
        layers that share its selection."""
        attention, layers = self.attention, self.attention_layers
        if isinstance(attention, LatentAttention) and (shared := attention.shared_layers):
            return (attention, layers - shared), (attention.shared, shared)
        full = attention.full if isinstance(attention, GroupedAttention) else None
        if not isinstance(attention, GroupedAttention) or full is None:
            return ((attention, layers),)
        return (attention, attention.windowed_layers), (full, layers - attention.windowed_layers)

    @property
    def kv_kinds(self) -> tuple[tuple[GroupedAttention | LatentAttention, int], ...]:
        """`attention_kinds` with the number of layers that have KV of their own."""
        attention, kinds = self.attention, self.attention_kinds
        if not isinstance(attention, GroupedAttention):
            return kinds
        if len(kinds) == 1:
            return ((attention, kinds[0][1] - attention.shared_layers),)
        (windowed, some), (full, others) = kinds
        windows = attention.shared_windowed
        return (windowed, some - windows), (full, others - attention.shared_layers + windows)

    @property
    def shared_layers(self) -> int:
        """Number of layers that read the KV of an earlier layer."""
        attention = self.attention
        return attention.shared_layers if isinstance(attention, GroupedAttention) else 0

    @property
    def late_part(self) -> float:
        """Fraction of the layers' parameters in layers that read the KV of an earlier layer. A
        prefill computes these layers only for the tokens that it samples from."""
        if not self.shared_layers:
            return 0.0
        kinds = zip(self.attention_kinds, self.kv_kinds, strict=True)
        late = sum(
            (layers - own) * (kind.parameters(self.width) - kind.kv_parameters(self.width))
            for (kind, layers), (_, own) in kinds
            if isinstance(kind, GroupedAttention)
        )
        ffn = (self.shared_layers + self.doubled_ffn) * self.matrices * self.width * self.ffn
        inputs = 3 * self.shared_layers * self.width * self.token_inputs
        return (late + ffn + inputs) / (self._always_read - self.embedding_parameters)

    @property
    def kv_values(self) -> int:
        own = sum(layers * kind.kv_values for kind, layers in self.kv_kinds)
        return own + self._index_values(GroupedAttention)

    def _index_values(self, kind: type[GroupedAttention | LatentAttention] | None = None) -> int:
        attention = self.attention
        if kind is not None and not isinstance(attention, kind):
            return 0
        if isinstance(attention, GroupedAttention):
            return attention.indexed_layers * attention.index_dim
        return (self.attention_layers - attention.shared_layers) * attention.index_dim

    @property
    def head_sizes(self) -> int:
        kinds = self.attention_kinds
        return sum(
            layers * kind.mean_size for kind, layers in kinds if isinstance(kind, GroupedAttention)
        )

    @property
    def attention_layers(self) -> int:
        return self.layers - self.without_mixer - (self.linear.layers if self.linear else 0)

    @property
    def dense_layers(self) -> int:
        return self.layers - self.without_ffn - self.expert_layers

    @property
    def blocks(self) -> int:
        """Number of attention, recurrence and feed-forward blocks; mostly two per layer."""
        return 2 * self.layers - self.without_mixer - self.without_ffn

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def parameters(self) -> int:
        return self._always_read + self._of_experts(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        active = self.experts.active if self.experts else 0
        return self._always_read - self.token_tables + self._of_experts(active)

    def _of_experts(self, count: int) -> int:
        if not self.experts:
            return 0
        wide = self.experts.routed_width(self.width)
        routed, shared = count * wide * self.experts.ffn, self.width * self.experts.shared_ffn
        each = self.matrices * (routed + shared)
        gates = self.experts.count + self.experts.shared_gate + 2 * self.experts.latent
        return self.expert_layers * (each + self.width * gates)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding, of a separate output projection, and of the tables
        of all layers that tokens are read from."""
        return self.vocabulary * self.width * (1 if self.tied else 2) + self.token_tables

    @property
    def token_tables(self) -> int:
        """Number of parameters of the tables from which layers read a row for each token."""
        return self.vocabulary * self.layers * self.token_inputs

    @property
    def _always_read(self) -> int:
        dense = (self.dense_layers + self.doubled_ffn) * self.matrices * self.width * self.ffn
        dense += 3 * self.layers * self.width * self.token_inputs
        kinds = self.attention_kinds
        attention = sum(layers * kind.parameters(self.width) for kind, layers in kinds)
        for (kind, layers), (_, own) in zip(kinds, self.kv_kinds, strict=True):
            if isinstance(kind, GroupedAttention):
                attention -= (layers - own) * kind.kv_parameters(self.width)
        if isinstance(self.attention, GroupedAttention):
            attention += self.attention.indexed_layers * self.attention.index_parameters(self.width)
        if self.linear:
            attention += self.linear.layers * self.linear.parameters(self.width)
        return attention + dense + self.embedding_parameters

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        index = self._index_values()
        kept = (self.kv_values - index) * dtype_bytes(self.kv_dtype or dtype)
        return kept + index * dtype_bytes(dtype)  # an indexer's keys keep the model's type

    def windowed_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of one token's KV in layers with a window. Returns 0 if all layers or
        no layers have a window."""
        return round(self.kv_bytes_per_token(dtype) * self.windowed_part)

    @property
    def widest_window(self) -> int:
        """Number of positions in the widest window, including the token's own position; 0 without a
        window."""
        return 0 if isinstance(self.attention, LatentAttention) else self.attention.window or 0

    @property
    def windowed_part(self) -> float:
        """Fraction of a token's KV that is stored and sent apart, because it is in layers with a
        window. 0 if all layers or no layers have a window, and in models with recurrence."""
        if self.linear or isinstance(self.attention, LatentAttention) or not self.widest_window:
            return 0.0
        attention = self.attention
        own = attention.windowed_layers - attention.shared_windowed
        part = own * attention.kv_values / self.kv_values
        return part if part < 1 else 0.0

    def state_bytes(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of one sequence's recurrent state; 0 without recurrent layers."""
        if not self.linear:
            return 0
        return self.linear.layers * self.linear.state_bytes(dtype_bytes(dtype))

    def kv_rows(self) -> list[tuple[int, int]]:
        """Returns a pair for each layer type: the number of rows of one token's KV in all layers of
        this type, and the number of values in a row.

        A row is a key or a value of one head, or in MLA the vector that all heads share. If these
        differ in size, or if an indexer's keys are cached too, they are cut into rows of one common
        size (`layout/kv_spec.py`)."""
        rows = [
            (layers * kind.kv_values // kind.row_values, kind.row_values)
            for kind, layers in self.kv_kinds
        ]
        if index := self._index_values(GroupedAttention):
            values = self.attention.row_values
            rows.append((index // values, values))
        return rows


def dtype_bytes(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return DTYPE_BYTES[dtype]
