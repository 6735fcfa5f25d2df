"""What a model's KV cache is made of: the only thing layout, ledger, transfer and codecs know of a
model.

A spec is a list of layers, each with components (K and V; a latent and its rope part for MLA). A
component has kv heads (sharded) or none (replicated). Bytes per token = 2 x L x K x H x bytes per
value for K and V. Pure: knows no JAX."""

import functools
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class KVComponent:
    """One cached array of one layer: per token [heads, width], or [width] where heads is 0
    (replicated over tp)."""

    name: str
    heads: int
    width: int

    @property
    def values_per_token(self) -> int:
        return max(1, self.heads) * self.width


@dataclass(frozen=True, slots=True)
class KVLayer:
    """`window` is the number of positions attended to, the token itself included; None is all of
    them."""

    components: tuple[KVComponent, ...]
    window: int | None = None


@dataclass(frozen=True)
class KVSpec:
    layers: tuple[KVLayer, ...]
    dtype: str

    @functools.cached_property  # asked for with every block
    def bytes_per_token(self) -> int:
        return DTYPE_BYTES[self.dtype] * sum(
            c.values_per_token for layer in self.layers for c in layer.components
        )

    @property
    def kv_heads(self) -> int:
        return max(c.heads for layer in self.layers for c in layer.components)

    @classmethod
    def attention(
        cls,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        windows: tuple[int | None, ...] | None = None,
    ) -> "KVSpec":
        """Ordinary attention: K and V of `kv_heads` heads of `head_dim` in each layer."""
        components = (KVComponent("k", kv_heads, head_dim), KVComponent("v", kv_heads, head_dim))
        windows = windows or (None,) * layers
        return cls(tuple(KVLayer(components, window) for window in windows), dtype)
