"""KV spec: the parts of a model's KV cache. Layout, ledger, transfer and codecs depend on it alone.

A spec is a list of layers, each with components: K and V, or the one latent of MLA. A component has
kv heads, which are sharded over tp, or no heads, and is then replicated. Components may differ in
heads, width and type, within a layer and between layers.

KV is transferred in blocks [ranks, rows, heads, tokens, values] of one type. A component is cut
into *rows*, each with `row_heads` heads of `row_width` values, the largest sizes that divide all
components. If all components are equal, as in nearly every model, each is one row. Reshard plan,
channels, checksums and codecs thus handle one shape. If other components have heads, a component
without heads is cut along its values: each kv shard sends one part and the receiver joins the
parts, so no byte is sent twice. `ops/kv_rows.py` cuts the rows.

A layer may also have state: values per sequence, not per position, of fixed size, which are
replaced and never appended (a recurrent layer). The states of all layers form a spec of their own
(`KVSpec.state`), in which one "token" is the whole state of one sequence. State is therefore kept
in pages of one slot and transferred as a block of one token by the same code.

If only some layers have a window, the KV of layers with and without a window may be stored and sent
separately (`can_part`). Each kind then has a spec of its own with all layers, in which layers of
the other kind are empty.

Bytes per token = 2 x L x K x H x bytes per value for K and V, L x (latent + rope) x bytes per value
for MLA. Does not import JAX."""

import enum
import functools
import itertools
import math
from dataclasses import dataclass

from jdisagg.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
# Types for KV other than the model's, with the dtype of the arrays: e4m3 is stored as its bytes
# (`ops/kv_pages.py`).
KEPT_DTYPES = {"fp8": "uint8"}
KEPT_NAMES = {dtype: name for name, dtype in KEPT_DTYPES.items()}
# File in a model's folder with the divisors of keys and values stored in fp8.
KV_SCALES_FILE = "kv_scales.json"
# Bits of one value of a quantized weight matrix.
WEIGHT_BITS = {"int8": 8, "int4": 4, "fp8": 8}


def ring_pages(widest_window: int, page_size: int) -> int:
    """Returns the number of pages of a sequence's sliding-window ring buffer: the most pages that
    the widest window can overlap."""
    return -(-(widest_window - 1) // page_size) + 1


class KvKind(enum.StrEnum):
    """Content of a KV block.

    POSITIONS: KV of positions, in all layers that have any, or in those without a window if the
      others are sent apart.
    WINDOW: KV of positions in the layers with a sliding window, if they are sent apart.
    STATE: The recurrent state of all layers, as a block of one token."""

    POSITIONS = "positions"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KVComponent:
    """One cached array of one layer, [heads, width] per token. With heads 0 the array is [width]
    per token and replicated over tp. `dtype` overrides the spec's."""

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
        components: Arrays with values per position.
        window: Positions attended to, the token's own included. None means all.
        state: Arrays with values per sequence.
    """

    components: tuple[KVComponent, ...]
    window: int | None = None
    state: tuple[KVComponent, ...] = ()


@dataclass(frozen=True)
class KVSpec:
    """KV of all layers of a model. `dtype` applies to components that set none.

    Raises:
        ConfigError: The width of a component without heads is not divisible by the other
            components' heads.
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
        """Spec of the recurrent state, in which one "token" is the state of one sequence. Without
        components if no layer has state."""
        return KVSpec(tuple(KVLayer(layer.state) for layer in self.layers), self.dtype)

    @functools.cached_property
    def windowed(self) -> "KVSpec":
        """Spec of the layers with a window."""
        return self._of([layer.window is not None for layer in self.layers])

    @functools.cached_property
    def unwindowed(self) -> "KVSpec":
        """Spec of the layers without a window."""
        return self._of([layer.window is None for layer in self.layers])

    @functools.cached_property
    def widest_window(self) -> int:
        """Positions of the widest window, the token's own included, or 0 without windows."""
        return max((layer.window or 0 for layer in self.layers), default=0)

    @functools.cached_property
    def can_part(self) -> bool:
        """Whether the KV of layers with and without a window can be stored and sent separately.
        Both kinds must exist, and each must allow the same head shards as this spec."""
        try:
            kinds = (self.windowed, self.unwindowed)
        except ConfigError:
            return False
        return all(kind.components and kind.row_heads % self.row_heads == 0 for kind in kinds)

    def _of(self, wanted: list[bool]) -> "KVSpec":
        return KVSpec(
            tuple(
                KVLayer(layer.components, layer.window) if keep else KVLayer(())
                for layer, keep in zip(self.layers, wanted, strict=True)
            ),
            self.dtype,
        )

    @property
    def has_state(self) -> bool:
        return bool(self.state.components)

    @functools.cached_property
    def positioned(self) -> tuple[int, ...]:
        """Indices of the layers with values per position."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.components)

    @functools.cached_property  # asked for with every block
    def bytes_per_token(self) -> int:
        return sum(map(self._bytes, self.components))

    def bytes_per_device(self, kv_shards: int) -> int:
        """Returns the KV bytes of one token on each device if heads are sharded over `kv_shards`
        devices."""
        return sum(
            self._bytes(part) // (kv_shards if part.heads else 1) for part in self.components
        )

    @functools.cached_property
    def row_heads(self) -> int:
        """Heads of a row: the largest number of shards into which the heads of all components
        divide. 1 without heads."""
        return math.gcd(*(part.heads for part in self.components)) or 1

    @functools.cached_property
    def row_dtype(self) -> str:
        """Data type of a block's values: the components' type, or an unsigned integer of their
        smallest size if their types differ."""
        dtypes = {self.dtype_of(part) for part in self.components} or {self.dtype}
        if len(dtypes) == 1:
            return dtypes.pop()
        return f"uint{8 * self._row_bytes}"

    @functools.cached_property
    def row_width(self) -> int:
        """Values of one head of a row, in `row_dtype`."""
        units = (
            self._units(part) // (self.row_heads if self.is_cut(part) else 1)
            for part in self.components
        )
        return math.gcd(*units) or 1

    def dtype_of(self, part: KVComponent) -> str:
        return part.dtype or self.dtype

    def rows_of(self, part: KVComponent) -> int:
        """Returns the number of rows into which a component is cut."""
        return max(1, part.heads) * self._units(part) // (self.row_heads * self.row_width)

    def rows(self, layers: range) -> int:
        """Returns the rows of a block of these layers."""
        return self.first_row(layers.stop) - self.first_row(layers.start)

    def first_row(self, layer: int) -> int:
        """Returns the index of a layer's first row among the rows of all layers."""
        return self._first_rows[layer]

    def is_cut(self, part: KVComponent) -> bool:
        """Whether the component is cut along its values, so that each kv shard sends a part."""
        return not part.heads and self.row_heads > 1

    @functools.cached_property
    def components(self) -> tuple[KVComponent, ...]:
        """Components of all layers, in order."""
        return tuple(part for layer in self.layers for part in layer.components)

    @functools.cached_property
    def _first_rows(self) -> tuple[int, ...]:
        rows = (sum(map(self.rows_of, layer.components)) for layer in self.layers)
        return (0, *itertools.accumulate(rows))

    @functools.cached_property
    def _row_bytes(self) -> int:
        """Bytes of one value in `row_dtype`."""
        return min((DTYPE_BYTES[self.dtype_of(part)] for part in self.components), default=1)

    def _bytes(self, part: KVComponent) -> int:
        return part.values_per_token * DTYPE_BYTES[self.dtype_of(part)]

    def _units(self, part: KVComponent) -> int:
        """Returns the number of `row_dtype` values of one head, or of a component without heads."""
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
        values in each layer. `kept` is their type, or "" for `dtype`."""
        components = tuple(KVComponent(name, kv_heads, head_dim, kept) for name in ("k", "v"))
        windows = windows or (None,) * layers
        return cls(tuple(KVLayer(components, window) for window in windows), dtype)

    @classmethod
    def latent(cls, layers: int, width: int, dtype: str, kept: str = "") -> "KVSpec":
        """Returns the spec of MLA: one vector per token and layer, which holds latent and rope key
        and is shared by all heads. `kept` is as in `attention`."""
        return cls((KVLayer((KVComponent("latent", 0, width, kept),)),) * layers, dtype)
