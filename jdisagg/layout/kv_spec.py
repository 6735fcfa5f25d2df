"""What a model's KV cache is made of: the only thing layout, ledger, transfer and codecs know of a
model.

A spec is a list of layers, each with components: K and V, or the one latent of MLA. A component has
kv heads, which are sharded over tp, or none: it is replicated. Components may differ in heads,
width and type, within a layer and between layers.

What travels is a block [ranks, rows, heads, tokens, values] of one type, whatever it is made of: a
component is cut into *rows*, each with `row_heads` heads of `row_width` values, the greatest that
divide all components. Where all are alike (nearly every model) a component is one row. So reshard
plan, channels, checksums and codecs know one shape. A component without heads beside others that
have some is cut along its values; each kv shard sends its part, and the receiver puts them
together: no byte is sent twice. `ops/kv_rows.py` does the cutting.

A layer may keep state instead, or as well: of a sequence as a whole and not of its positions, of
fixed size, replaced and not appended (a recurrent layer's). The states of all layers are a spec of
their own (`KVSpec.state`), in which one "token" is all the state of one sequence: so state is kept
in pages of one slot, and travels as a block of one token, by the same code.

Where only some layers have a window, the two kinds may be kept and sent apart (`can_part`): each is
a spec of its own then, of as many layers, those of the other kind empty.

Bytes per token = 2 x L x K x H x bytes per value for K and V, L x (latent + rope) x bytes per value
for MLA. Pure: knows no JAX."""

import functools
import itertools
import math
from dataclasses import dataclass

from jdisagg.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
# What KV may be kept in, in place of the model's type, and the type of its arrays: e4m3 is kept as
# its bytes (`ops/kv_pages.py`).
KEPT_DTYPES = {"fp8": "uint8"}
KEPT_NAMES = {dtype: name for name, dtype in KEPT_DTYPES.items()}
# In a model's directory: what its keys and values are divided by where they are kept in fp8.
KV_SCALES_FILE = "kv_scales.json"
# of a value of a quantized weight matrix
WEIGHT_BITS = {"int8": 8, "int4": 4, "fp8": 8}


def ring_pages(widest_window: int, page_size: int) -> int:
    """Pages in which a sequence's KV of layers with a window can go round: with the token that is
    being computed the widest window reaches over so many, wherever it ends."""
    return -(-(widest_window - 1) // page_size) + 1


@dataclass(frozen=True, slots=True)
class KVComponent:
    """One cached array of one layer: per token [heads, width], or [width] where heads is 0
    (replicated over tp). `dtype`: where it is not the spec's."""

    name: str
    heads: int
    width: int
    dtype: str = ""

    @property
    def values_per_token(self) -> int:
        return max(1, self.heads) * self.width


@dataclass(frozen=True, slots=True)
class KVLayer:
    """`window` is the number of positions attended to, the token itself included; None is all of
    them. `state`: what is kept of a sequence as a whole."""

    components: tuple[KVComponent, ...]
    window: int | None = None
    state: tuple[KVComponent, ...] = ()


@dataclass(frozen=True)
class KVSpec:
    """`dtype`: of the components that state none.

    Raises:
        ConfigError: a component without heads cannot be cut into as many parts as the others can.
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
        """What is kept of a sequence as a whole, layer by layer; a "token" of it is a sequence.
        Without components where no layer has state."""
        return KVSpec(tuple(KVLayer(layer.state) for layer in self.layers), self.dtype)

    @functools.cached_property
    def windowed(self) -> "KVSpec":
        """What the layers with a window keep of each position."""
        return self._of([layer.window is not None for layer in self.layers])

    @functools.cached_property
    def unwindowed(self) -> "KVSpec":
        """What the layers without one do."""
        return self._of([layer.window is None for layer in self.layers])

    @functools.cached_property
    def widest_window(self) -> int:
        """Positions, the token's own included; 0 where no layer has a window."""
        return max((layer.window or 0 for layer in self.layers), default=0)

    @functools.cached_property
    def can_part(self) -> bool:
        """Whether layers with a window and layers without one can be kept and sent apart: there are
        both, and whatever this spec's heads are sharded over, so can be those of each kind."""
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
        """The layers that keep something of each position."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.components)

    @functools.cached_property  # asked for with every block
    def bytes_per_token(self) -> int:
        return sum(map(self._bytes, self.components))

    def bytes_per_device(self, kv_shards: int) -> int:
        """What one device keeps of a token where heads are sharded over so many devices."""
        return sum(
            self._bytes(part) // (kv_shards if part.heads else 1) for part in self.components
        )

    @functools.cached_property
    def row_heads(self) -> int:
        """Heads of a row, and so the most shards of any component: 1 where no component has
        heads."""
        return math.gcd(*(part.heads for part in self.components)) or 1

    @functools.cached_property
    def row_dtype(self) -> str:
        """The type of a block's values: the components', or an unsigned integer of their smallest
        size where these differ."""
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
        """How many rows a component is cut into."""
        return max(1, part.heads) * self._units(part) // (self.row_heads * self.row_width)

    def rows(self, layers: range) -> int:
        """Rows of a block of these layers."""
        return self.first_row(layers.stop) - self.first_row(layers.start)

    def first_row(self, layer: int) -> int:
        """The number of a layer's first row among all of the model's."""
        return self._first_rows[layer]

    def is_cut(self, part: KVComponent) -> bool:
        """Whether each kv shard sends a part of its values."""
        return not part.heads and self.row_heads > 1

    @functools.cached_property
    def components(self) -> tuple[KVComponent, ...]:
        """Of all layers, in their order."""
        return tuple(part for layer in self.layers for part in layer.components)

    @functools.cached_property
    def _first_rows(self) -> tuple[int, ...]:
        rows = (sum(map(self.rows_of, layer.components)) for layer in self.layers)
        return (0, *itertools.accumulate(rows))

    @functools.cached_property
    def _row_bytes(self) -> int:
        """Of one value in `row_dtype`."""
        return min((DTYPE_BYTES[self.dtype_of(part)] for part in self.components), default=1)

    def _bytes(self, part: KVComponent) -> int:
        return part.values_per_token * DTYPE_BYTES[self.dtype_of(part)]

    def _units(self, part: KVComponent) -> int:
        """Values in `row_dtype` of one of its heads, or of all of it where it has none."""
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
        """Ordinary attention: K and V of `kv_heads` heads of `head_dim` in each layer. `kept`:
        their type, where it is not the state's."""
        components = tuple(KVComponent(name, kv_heads, head_dim, kept) for name in ("k", "v"))
        windows = windows or (None,) * layers
        return cls(tuple(KVLayer(components, window) for window in windows), dtype)

    @classmethod
    def latent(cls, layers: int, width: int, dtype: str, kept: str = "") -> "KVSpec":
        """MLA: of each token one vector a layer, latent and rope key together, which all heads
        share. `kept` as in `attention`."""
        return cls((KVLayer((KVComponent("latent", 0, width, kept),)),) * layers, dtype)
