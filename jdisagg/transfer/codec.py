"""Encodes transferred blocks: unchanged, or as int8, int4 or fp8 with a scale per component, head
and token.

A piece [1, C, G, T, H] is the part of a block that one device sends to another: C rows, G KV heads,
T tokens, head size H. A lossy codec's leaves are the packed values [1, C, G, T, x], the scales
float32 [1, C, G, T, 1] and the sums uint32 [1, 1, G, 1, 2]: for each head the keyed checksum
(ops/checksum.py) over the packed values and their scales, because a sum over the original values
cannot be checked after packing.

Error bounds: ops/quantize.py. Decoding gives the same bits on every device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.ops.checksum import LANES, key_words, row_sums
from jdisagg.ops.quantize import (
    FP8_LARGEST,
    INT4_LARGEST,
    INT8_LARGEST,
    from_fp8,
    pack_int4,
    rescaled,
    row_scale,
    to_fp8,
    to_int8,
    unpack_int4,
)
from jdisagg.transfer.channel import BlockStamp


def stamp_array(stamp: BlockStamp) -> np.ndarray:
    """Encodes a stamp as uint32 [5]: key (low word, high word), component, start, valid tokens."""
    return np.array(
        [*key_words(stamp.key), stamp.component, stamp.start, stamp.valid_tokens], np.uint32
    )


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def lossy(self) -> bool: ...

    def leaves(self, piece: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of the arrays into which the codec packs a piece [1, C, G, T, H].
        Raises LayoutError if the codec cannot pack this shape."""
        ...

    def encode(
        self, piece: jax.Array, stamp: jax.Array, first_head: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Packs a piece. Can be traced by JAX.

        Args:
            piece: Values [1, C, G, T, H].
            first_head: Global index of the piece's first KV head, an int scalar.
        """
        ...

    def decode(self, leaves: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """Unpacks a piece to `dtype`. Can be traced by JAX."""
        ...

    def verify(
        self, leaves: Sequence[jax.Array], stamp: jax.Array, first_head: jax.Array
    ) -> jax.Array:
        """Returns, as a bool scalar, whether the packed values match their checksums under this
        stamp."""
        ...


class NoCodec:
    name = "none"
    lossy = False

    def leaves(self, piece: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (piece,)

    def encode(
        self, piece: jax.Array, stamp: jax.Array, first_head: jax.Array
    ) -> tuple[jax.Array, ...]:
        return (piece,)

    def decode(self, leaves: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        return leaves[0].astype(dtype)

    def verify(
        self, leaves: Sequence[jax.Array], stamp: jax.Array, first_head: jax.Array
    ) -> jax.Array:
        return jnp.bool_(True)


@dataclass(frozen=True)
class ScaledCodec:
    """Packs values with one scale for each component, head and token. The scale maps the largest
    magnitude among the H values to `largest`."""

    name: str
    largest: float
    packed_dtype: jnp.dtype
    values_per_byte: int
    pack: Callable[[jax.Array, jax.Array], jax.Array]
    unpack: Callable[[jax.Array], jax.Array]

    @property
    def lossy(self) -> bool:
        return True

    def leaves(self, piece: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
        _, components, heads, tokens, width = piece.shape
        if width % self.values_per_byte:
            raise LayoutError(
                f"codec {self.name!r} packs {self.values_per_byte} values in a byte: head size"
                f" {width} must be a multiple of it"
            )
        return (
            jax.ShapeDtypeStruct(
                (1, components, heads, tokens, width // self.values_per_byte), self.packed_dtype
            ),
            jax.ShapeDtypeStruct((1, components, heads, tokens, 1), jnp.dtype(jnp.float32)),
            jax.ShapeDtypeStruct((1, 1, heads, 1, LANES), jnp.dtype(jnp.uint32)),
        )

    def encode(
        self, piece: jax.Array, stamp: jax.Array, first_head: jax.Array
    ) -> tuple[jax.Array, ...]:
        scale = row_scale(piece, self.largest)
        packed = self.pack(piece, scale)
        return packed, scale, _sums(packed, scale, stamp, first_head)

    def decode(self, leaves: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        return rescaled(self.unpack(leaves[0]), leaves[1], dtype)

    def verify(
        self, leaves: Sequence[jax.Array], stamp: jax.Array, first_head: jax.Array
    ) -> jax.Array:
        return jnp.all(_sums(leaves[0], leaves[1], stamp, first_head) == leaves[2])


def _sums(
    packed: jax.Array, scale: jax.Array, stamp: jax.Array, first_head: jax.Array
) -> jax.Array:
    token_T = jnp.arange(packed.shape[3], dtype=jnp.uint32)
    rows_GT2 = row_sums(
        (packed[0], scale[0]),
        stamp[:2],
        stamp[2],
        first_head,
        stamp[3] + token_T,
        token_T < stamp[4],
    )
    return jnp.sum(rows_GT2, axis=1, dtype=jnp.uint32)[None, None, :, None, :]


_INT8 = ScaledCodec("int8", INT8_LARGEST, jnp.dtype(jnp.int8), 1, to_int8, lambda packed: packed)
_INT4 = ScaledCodec(
    "int4",
    INT4_LARGEST,
    jnp.dtype(jnp.uint8),
    2,
    lambda values, scale: pack_int4(to_int8(values, scale, INT4_LARGEST)),
    unpack_int4,
)
_FP8 = ScaledCodec("fp8", FP8_LARGEST, jnp.dtype(jnp.uint8), 1, to_fp8, from_fp8)
_CODECS: dict[str, Codec] = {codec.name: codec for codec in (NoCodec(), _INT8, _INT4, _FP8)}
CODECS = tuple(_CODECS)


def codec(name: str) -> Codec:
    """Returns the codec of this name. Raises ConfigError if there is no such codec."""
    if name not in _CODECS:
        raise ConfigError(f"codec {name!r} is unknown; choose one of {', '.join(CODECS)}")
    return _CODECS[name]


def check_codec(name: str, spec: KVSpec) -> None:
    if codec(name).lossy and not jnp.issubdtype(jnp.dtype(spec.row_dtype), jnp.floating):
        raise ConfigError(
            f"codec {name!r} packs values of one floating type, and this model's KV has several, or"
            " is kept in fp8 already; choose none"
        )
