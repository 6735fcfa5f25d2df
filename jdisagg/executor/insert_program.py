"""The insert program on one device: writes a block's tokens to their pages, reads the pages back,
and computes the checksum of the values read.

On a CPU (`write_and_read`), a run of consecutive tokens in one page is written at once, because
writing token by token took three times as long. All runs are written before any is read. With one
loop for both, XLA of JAX 0.10 fused write and read, which copied the pool twice for each run. dp
ranks that the block does not concern do nothing.

Invariants: the pages of a block are distinct, so that the values read back stay valid."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.executor.block_sums import STAMP_WORDS, first_head, local_sum
from jdisagg.executor.page_pool import LayerPages
from jdisagg.layout.kv_spec import KVLayer, KVSpec
from jdisagg.ops.checksum import bits_of
from jdisagg.ops.kv_pages import gather_tokens, insert_block, insert_run, read_run
from jdisagg.ops.kv_rows import block_of, components_of
from jdisagg.transfer.codec import Codec

# Largest size of a run, over all layers. (With 1 MB an insert takes 1.5 times as long.)
RUN_TOKENS = 128
RUN_BYTES = 4 << 20


class Places(NamedTuple):
    """The page positions of a block's tokens on this dp rank.

    Attributes:
        nowhere: An out-of-range page number. Writes to it have no effect.
    """

    stamp_5: jax.Array
    page_N: jax.Array
    page_size: int
    nowhere: int

    @staticmethod
    def of(words: jax.Array, page_size: int, nowhere: int) -> "Places":
        """Decodes uint32 words: first the stamp, then the page numbers."""
        return Places(
            words[:STAMP_WORDS], words[STAMP_WORDS:].astype(jnp.int32), page_size, nowhere
        )

    @property
    def start(self) -> jax.Array:
        return self.stamp_5[3].astype(jnp.int32)

    @property
    def valid(self) -> jax.Array:
        """Number of the block's valid tokens. The others are padding."""
        return self.stamp_5[4].astype(jnp.int32)

    def at(self, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the page and the offset in the page of the block's tokens with these indices. All
        indices must be of valid tokens."""
        place = self.start % self.page_size + token
        return self.page_N[place // self.page_size], place % self.page_size

    def some(self, token_T: jax.Array, wanted_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the result of `at`, with page `nowhere` for tokens where `wanted_T` is False."""
        page_T, slot_T = self.at(token_T)
        return jnp.where(wanted_T, page_T, self.nowhere), slot_T


class BlockForm(NamedTuple):
    spec: KVSpec
    layers: tuple[KVLayer, ...]
    codec: Codec

    @property
    def lossy(self) -> bool:
        return self.codec.lossy

    def write(
        self,
        pages: list[LayerPages],
        block_CKTH: jax.Array,
        insert: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> list[LayerPages]:
        """Calls `insert` to write each component of a block into the component's pages. Returns the
        updated pages."""
        parts = components_of(block_CKTH, self.layers, self.spec)
        kept = {self.spec.dtype_of(part) for layer in self.layers for part in layer.components}
        mixed = self.spec.row_dtype not in kept
        fresh = map(_finite, parts) if mixed else parts  # otherwise values are finite already
        return [tuple(insert(part, next(fresh)) for part in layer) for layer in pages]

    def read(self, pages: list[LayerPages], take: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Calls `take` to read each component's values from its pages. Returns them as one
        block."""
        parts = [[take(part) for part in layer] for layer in pages]
        return block_of(self.layers, parts, self.spec)


Sums = tuple[jax.Array, jax.Array]  # of the values read back, and whether they are intact
Inserted = tuple[list[LayerPages], jax.Array, jax.Array]


def write_and_read(
    pages: list[LayerPages], arrays: Sequence[jax.Array], places: Places, form: BlockForm
) -> Inserted:
    """Writes a received block to its pages, one run of consecutive tokens at a time, and reads the
    pages back to verify the block.

    Returns:
        The pages, this device's part of the block's checksum (uint32 [2]), and whether the block
        is intact.
    """
    parts, intact = _unpack(form, arrays, places.stamp_5)
    tokens, valid = parts[0].shape[2], places.valid
    run = math.gcd(places.page_size, 1 << (min(tokens, _run_tokens(pages)).bit_length() - 1))
    head = jnp.minimum(-places.start % run, valid)
    runs = (valid - head) // run
    tail = head + runs * run

    def in_run(index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        token_T = head + index * run + jnp.arange(run, dtype=jnp.int32)
        return token_T, places.at(token_T[0])

    def at_end(which: jax.Array) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
        first, last = jnp.where(which == 0, 0, tail), jnp.where(which == 0, head, valid)
        token_T = jnp.minimum(first, tokens - run) + jnp.arange(run, dtype=jnp.int32)
        counts_T = (token_T >= first) & (token_T < last)
        return token_T, counts_T, places.some(token_T, counts_T)

    def write_run(index: jax.Array, pages: list[LayerPages]) -> list[LayerPages]:
        token_T, place = in_run(index)
        put = lambda part, new: insert_run(part, new, *place)  # noqa: E731
        return form.write(pages, _heads(parts, token_T[0], run), put)

    def write_end(which: jax.Array, pages: list[LayerPages]) -> list[LayerPages]:
        token_T, _, place_T = at_end(which)
        put = lambda part, new: insert_block(part, new, *place_T)  # noqa: E731
        return form.write(pages, _heads(parts, token_T[0], run), put)

    ends = jnp.where(head > 0, 0, 1), jnp.where(tail < valid, 2, 1)
    pages = lax.fori_loop(0, runs, write_run, pages)
    pages = lax.fori_loop(*ends, write_end, pages)
    pages = lax.optimization_barrier(pages)  # the sum must be of values read from the pages

    def read_back(
        found: Sums, read_CKTH: jax.Array, token_T: jax.Array, counts_T: jax.Array
    ) -> Sums:
        sum_2, intact = found
        if form.lossy:
            same_CKTH = bits_of(read_CKTH) == bits_of(_heads(parts, token_T[0], run))
            intact &= jnp.all(same_CKTH | ~counts_T[None, None, :, None])
        return sum_2 + local_sum(read_CKTH, places.stamp_5, token_T, counts_T), intact

    def sum_run(index: jax.Array, found: Sums) -> Sums:
        token_T, place = in_run(index)
        read_CKTH = form.read(pages, lambda part: read_run(part, *place, run))
        return read_back(found, read_CKTH, token_T, jnp.ones((run,), jnp.bool_))

    def sum_end(which: jax.Array, found: Sums) -> Sums:
        token_T, counts_T, place_T = at_end(which)
        read_CKTH = form.read(pages, lambda part: gather_tokens(part, *place_T))
        return read_back(found, read_CKTH, token_T, counts_T)

    found = lax.fori_loop(0, runs, sum_run, (jnp.zeros(2, jnp.uint32), intact))
    return pages, *lax.fori_loop(*ends, sum_end, found)


def write_whole(
    pages: list[LayerPages],
    arrays: Sequence[jax.Array],
    places: Places,
    form: BlockForm,
    gather: Callable[..., jax.Array] = gather_tokens,
) -> Inserted:
    """Does the work of `write_and_read` with one scatter, one gather and one sum. Needs memory for
    a copy of the block, but no loop. On a GPU the host would drive a loop, which would delay decode
    steps. `gather` is the function that reads the tokens back."""
    parts, intact = _unpack(form, arrays, places.stamp_5)
    tokens = parts[0].shape[2]
    token_T = jnp.arange(tokens, dtype=jnp.int32)
    counts_T = token_T < places.valid
    page_T, slot_T = places.some(token_T, counts_T)
    block_CKTH = _heads(parts, jnp.int32(0), tokens)
    put = lambda part, new: insert_block(part, new, page_T, slot_T)  # noqa: E731
    pages = form.write(pages, block_CKTH, put)
    pages = lax.optimization_barrier(pages)  # the sum must be of values read from the pages
    read_CKTH = form.read(pages, lambda part: gather(part, page_T, slot_T))
    if form.lossy:
        intact &= jnp.all(
            (bits_of(read_CKTH) == bits_of(block_CKTH)) | ~counts_T[None, None, :, None]
        )
    return pages, local_sum(read_CKTH, places.stamp_5, token_T, counts_T), intact


def _run_tokens(pages: Sequence[LayerPages]) -> int:
    each = sum(
        part.shape[1] * part.shape[3] * part.dtype.itemsize for layer in pages for part in layer
    )
    return max(1, min(RUN_TOKENS, RUN_BYTES // each))


def _heads(parts: Sequence[jax.Array], first: jax.Array, tokens: int) -> jax.Array:
    block_CKTH = jnp.concatenate(
        [lax.dynamic_slice_in_dim(part, first, tokens, 2) for part in parts], axis=1
    )
    return _finite(block_CKTH)


def _finite(values: jax.Array) -> jax.Array:
    """Damaged blocks may contain non-finite values. They would stay in the pages, where masked
    attention would multiply them by zero, which gives NaN."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values
    return jnp.where(jnp.isfinite(values), values, jnp.zeros((), values.dtype))


def _unpack(
    form: BlockForm, arrays: Sequence[jax.Array], stamp_5: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    spec, how = form.spec, form.codec
    local_heads, dtype = spec.row_heads // lax.axis_size("kv"), jnp.dtype(spec.row_dtype)
    count = local_heads // arrays[0].shape[2]
    per_part = len(arrays) // count
    head, parts, intact = first_head(local_heads), [], jnp.bool_(True)
    for index in range(count):
        leaves = arrays[index * per_part : (index + 1) * per_part]
        intact &= how.verify(leaves, stamp_5, head + index * arrays[0].shape[2])
        parts.append(how.decode(leaves, dtype)[0])
    return parts, intact
