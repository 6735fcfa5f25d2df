"""KV spec: describes which arrays a model's KV cache consists of.

A spec is a list of layers, each with components: K and V, or the single latent vector of multi-head
latent attention (MLA).

KV is transferred in blocks [ranks, rows, heads, tokens, values] of one type. For this, each
component is cut into *rows* of `row_heads` heads with `row_width` values each. If other components
or the state have heads, a component without heads is cut along its values, so that no byte is sent
twice: each kv shard sends one part, and the receiver joins the parts.

A recurrent layer has state: values of fixed size per sequence, which each step replaces. The states
of all layers form a separate spec (`KVSpec.state`), in which one "token" is the whole state of one
sequence.

Bytes per token = 2 x L x K x H x bytes per value for K and V, L x (latent + rope) x bytes per value
for MLA. Does not import JAX."""

import enum
import functools
import itertools
import math
from dataclasses import dataclass, replace

from jdisagg.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
# Data types in which KV may be stored instead of the model's type, each with the dtype of the
# arrays. fp8 (e4m3) is stored as bytes (`ops/kv_pages.py`).
KEPT_DTYPES = {"fp8": "uint8"}
KEPT_NAMES = {dtype: name for name, dtype in KEPT_DTYPES.items()}
# File in a model's folder with the KV scales: the divisors of keys and values that are stored in
# fp8.
KV_SCALES_FILE = "kv_scales.json"
# Bits of one value of a quantized weight matrix.
WEIGHT_BITS = {"int8": 8, "int4": 4, "fp8": 8}
# Name of the component with the experts chosen for a token. It is the last one of its layer. Its
# width is a multiple of RECORD_GRAIN or of a row's width, so that rows of blocks stay long.
EXPERTS = "experts"
RECORD_GRAIN = 16
# Largest number that every type of KV represents exactly, with all below it.
EXACT = 256
# Bits of a value under each codec (transfer/codec.py). None keeps the KV's own type.
CODEC_BITS: dict[str, int | None] = {"none": None, "int8": 8, "fp8": 8, "int4": 4}


def ring_pages(widest_window: int, page_size: int) -> int:
    """Returns the number of pages in the ring buffer that holds the sliding window of a sequence:
    the largest number of pages that the widest window can overlap."""
    return -(-(widest_window - 1) // page_size) + 1


class KvKind(enum.StrEnum):
    """Content of a KV block.

    - POSITIONS: KV of positions, in all layers with KV. If layers with a sliding window are sent
      separately, only in layers without a window.
    - WINDOW: KV of positions in the layers with a sliding window, if these layers are sent
      separately.
    - STATE: The recurrent state of all layers, as a block of one token."""

    POSITIONS = "positions"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KVComponent:
    """One cached array of one layer, with shape [heads, width] per token. If `heads` is 0, the
    shape is [width] and the array is replicated over tp. `dtype` overrides the data type of the
    spec."""

    name: str
    heads: int
    width: int
    dtype: str = ""

    @property
    def values_per_token(self) -> int:
        return max(1, self.heads) * self.width


@dataclass(frozen=True, slots=True)
class KVLayer:
    """KV of one layer.

    Attributes:
        components: Arrays with one entry per position.
        window: Number of positions that a token attends to, including its own. None means all.
        state: Arrays with one entry per sequence, in recurrent layers.
        experts: Number of experts that the layer chooses for a token, and number of its experts.
            None in a layer without experts.
        source: Index of the earlier layer whose keys and values this layer, which has none of its
            own, attends to.
    """

    components: tuple[KVComponent, ...]
    window: int | None = None
    state: tuple[KVComponent, ...] = ()
    experts: tuple[int, int] | None = None
    source: int | None = None

    @property
    def records(self) -> bool:
        return bool(self.components) and self.components[-1].name == EXPERTS


@dataclass(frozen=True)
class KVSpec:
    """KV cache of all layers of a model. `dtype` is the data type of components that set none.

    Raises:
        ConfigError: The width of a component without heads is not divisible by the number of heads
            of the other components.
    """

    layers: tuple[KVLayer, ...]
    dtype: str

    def __post_init__(self) -> None:
        for part in self.components:
            if not part.heads and self._units(part) % self.row_heads:
                raise ConfigError(
                    f"KV component {part.name!r} has no heads and {part.width} values, which do not"
                    f" divide into {self.row_heads} parts, as many as the others' heads; choose a"
                    " width that does"
                )
        if any(layer.state for layer in self.layers) and not self.components:
            raise ConfigError(
                "KV spec: no layer has positions, all keep state alone; such a model is not served"
            )

    @functools.cached_property
    def state(self) -> "KVSpec":
        """Spec of the recurrent state. One "token" of this spec is the state of one sequence. The
        spec has no components if no layer has state."""
        return KVSpec(tuple(KVLayer(layer.state) for layer in self.layers), self.dtype)

    @functools.cached_property
    def choices(self) -> tuple[tuple[int, int], ...]:
        """The `KVLayer.experts` of the layers with experts."""
        return tuple(layer.experts for layer in self.layers if layer.experts)

    @functools.cached_property
    def records(self) -> bool:
        """Whether the experts chosen for each token are stored beside its KV."""
        return any(layer.records for layer in self.layers)

    def recording(self) -> "KVSpec":
        """Returns this spec with a component for the chosen experts in each layer with experts.

        Their numbers are stored as values of the spec's type, which represents them exactly: as
        quotient and remainder by `EXACT` if the layer has more experts.

        Raises:
            ConfigError: No layer has experts.
        """
        if not self.choices:
            raise ConfigError(
                "routed_experts: the model has no layer with experts, so that there is nothing to"
                " record; remove it"
            )
        grain = self.row_heads * math.gcd(self.row_width, RECORD_GRAIN)

        def recorded(layer: KVLayer) -> KVLayer:
            if layer.experts is None:
                return layer
            chosen, experts = layer.experts
            values = chosen * (1 if experts <= EXACT else 2)
            part = KVComponent(EXPERTS, 0, -(-values // grain) * grain)
            return replace(layer, components=(*layer.components, part))

        return KVSpec(tuple(map(recorded, self.layers)), self.dtype)

    @functools.cached_property
    def windowed(self) -> "KVSpec":
        """Spec of the layers with a sliding window. Other layers have no components."""
        return self._of([layer.window is not None for layer in self.layers])

    @functools.cached_property
    def unwindowed(self) -> "KVSpec":
        """Spec of the layers without a sliding window. Other layers have no components."""
        return self._of([layer.window is None for layer in self.layers])

    @functools.cached_property
    def widest_window(self) -> int:
        return max((layer.window or 0 for layer in self.layers), default=0)

    @functools.cached_property
    def can_part(self) -> bool:
        """Whether the KV of layers with and without a window can be stored and sent separately.
        Both kinds of layers must exist, no layer keeps state, and each kind must be divisible into
        as many head shards as this spec."""
        if self.has_state:
            return False
        try:
            kinds = (self.windowed, self.unwindowed)
        except ConfigError:
            return False
        return all(kind.components and kind.row_heads % self.row_heads == 0 for kind in kinds)

    def _of(self, wanted: list[bool]) -> "KVSpec":
        return KVSpec(
            tuple(
                KVLayer(layer.components, layer.window, source=layer.source)
                if keep
                else KVLayer((), source=layer.source)
                for layer, keep in zip(self.layers, wanted, strict=True)
            ),
            self.dtype,
        )

    @property
    def has_state(self) -> bool:
        return bool(self.state.components)

    @functools.cached_property
    def shares(self) -> bool:
        """Whether layers read the KV of earlier layers."""
        return any(layer.source is not None for layer in self.layers)

    @functools.cached_property
    def selects(self) -> bool:
        """Whether layers have indexers, which select the positions to attend to."""
        return any(part.name == "index" for layer in self.layers for part in layer.components)

    @functools.cached_property
    def positioned(self) -> tuple[int, ...]:
        """Indices of the layers that store KV per position, as opposed to recurrent state only."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.components)

    @functools.cached_property
    def cuts(self) -> tuple[int, ...]:
        """Indices of the layers with KV after which the layers can be cut into programs. A layer
        that attends to the positions which an earlier layer selected, and so has no key of an
        indexer, is in the same program as this layer. So is a layer that reads the KV of an earlier
        layer."""
        sources = [layer.source for layer in self.layers if layer.source is not None]
        first, last = min(sources, default=len(self.layers)), self.positioned[-1:]
        names = [{part.name for part in self.layers[at].components} for at in self.positioned]
        own = [bool({"index", "k"} & each) or each == {EXPERTS} for each in names]
        follows = [not is_own and any(own) for is_own in own]
        return tuple(
            [
                at
                for at, then in zip(self.positioned, [*follows[1:], False], strict=True)
                if not then and (at < first or at in last)
            ]
        )

    def sources_in(self, layers: range) -> list[int | None]:
        """Returns, for each of `layers`, the place among them of the layer whose KV it reads, or
        None if it reads its own."""
        sources = [self.layers[at].source for at in layers]
        return [None if source is None else source - layers.start for source in sources]

    @functools.cached_property
    def last_stored(self) -> int:
        """Index of the last layer that stores KV or state. A prefill computes all layers after it
        only for the tokens that it samples from."""
        stored = [at for at, layer in enumerate(self.layers) if layer.components or layer.state]
        return max(stored, default=-1)

    @functools.cached_property  # asked for with every block
    def bytes_per_token(self) -> int:
        return sum(map(self._bytes, self.components))

    def bytes_per_device(self, kv_shards: int) -> int:
        return sum(
            self._bytes(part) // (kv_shards if part.heads else 1) for part in self.components
        )

    @functools.cached_property
    def row_heads(self) -> int:
        """Number of heads in a row, and also the largest possible number of head shards. It is the
        greatest common divisor of the head counts of all components. If no component has heads, it
        is the greatest common divisor of the head counts of the recurrent state and of the sizes of
        the components, or 1 without recurrent state."""
        if heads := math.gcd(*(part.heads for part in self.components)):
            return heads
        state = [part.heads for layer in self.layers for part in layer.state]
        return math.gcd(*state, *map(self._units, self.components)) if state else 1

    @functools.cached_property
    def row_dtype(self) -> str:
        """Data type of the elements of a transferred block: the components' type, or, if types
        differ, the unsigned integer type with the size of the smallest one."""
        dtypes = {self.dtype_of(part) for part in self.components} or {self.dtype}
        if len(dtypes) == 1:
            return dtypes.pop()
        return f"uint{8 * self._row_bytes}"

    @functools.cached_property
    def row_width(self) -> int:
        units = (
            self._units(part) // (self.row_heads if self.is_cut(part) else 1)
            for part in self.components
        )
        return math.gcd(*units) or 1

    def dtype_of(self, part: KVComponent) -> str:
        return part.dtype or self.dtype

    def rows_of(self, part: KVComponent) -> int:
        return max(1, part.heads) * self._units(part) // (self.row_heads * self.row_width)

    def rows(self, layers: range) -> int:
        return self.first_row(layers.stop) - self.first_row(layers.start)

    def first_row(self, layer: int) -> int:
        return self._first_rows[layer]

    def is_cut(self, part: KVComponent) -> bool:
        return not part.heads and self.row_heads > 1

    @functools.cached_property
    def components(self) -> tuple[KVComponent, ...]:
        return tuple(part for layer in self.layers for part in layer.components)

    @functools.cached_property
    def _first_rows(self) -> tuple[int, ...]:
        rows = (sum(map(self.rows_of, layer.components)) for layer in self.layers)
        return (0, *itertools.accumulate(rows))

    @functools.cached_property
    def _row_bytes(self) -> int:
        return min((DTYPE_BYTES[self.dtype_of(part)] for part in self.components), default=1)

    def _bytes(self, part: KVComponent) -> int:
        return part.values_per_token * DTYPE_BYTES[self.dtype_of(part)]

    def _units(self, part: KVComponent) -> int:
        return part.width * DTYPE_BYTES[self.dtype_of(part)] // self._row_bytes

    @classmethod
    def attention(
        cls,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        windows: tuple[int | None, ...] | None = None,
        kept: str = "",
    ) -> "KVSpec":
        """Returns the spec of ordinary attention: K and V with `kv_heads` heads of `head_dim`
        values in each layer. `kept` is the data type in which K and V are stored, or "" to store
        them in `dtype`."""
        components = tuple(KVComponent(name, kv_heads, head_dim, kept) for name in ("k", "v"))
        windows = windows or (None,) * layers
        return cls(tuple(KVLayer(components, window) for window in windows), dtype)

    @classmethod
    def latent(
        cls, layers: int, width: int, dtype: str, kept: str = "", index: int = 0
    ) -> "KVSpec":
        return cls((latent_layer(width, kept, index),) * layers, dtype)


def latent_layer(width: int, kept: str = "", index: int = 0) -> KVLayer:
    """Returns a layer of multi-head latent attention (MLA): one vector of `width` values per token,
    which holds latent and rope key and is shared by all heads. `kept` is the data type in which the
    vector is stored, or "" for the spec's type. `index` is the number of values of an indexer's
    key, which is stored in the spec's type, so that `kept` does not change which positions are
    selected; 0 without an indexer."""
    parts = (KVComponent("latent", 0, width, kept),)
    return KVLayer(parts + ((KVComponent("index", 0, index),) if index else ()))
