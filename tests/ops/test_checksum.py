"""The checksum against a twin in NumPy's 64-bit integers, and what it must notice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.checksum import byte_sum, fold, granule_sums, key_words, row_sums
from tests.ops.twin_checksum import MASK, twin

pytestmark = pytest.mark.one_device

C, K, T, H = 4, 4, 64, 8
KEY = 0x0123456789ABCDEF


@jax.jit
def _granules(
    block: jax.Array,
    key: jax.Array,
    component: jax.Array,
    head: jax.Array,
    start: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    token_T = jnp.arange(block.shape[2])
    return granule_sums(
        row_sums((block,), key, component, head, start + token_T, token_T < valid), 16
    )


def checksum(
    block: np.ndarray,
    key: int = KEY,
    component: int = 0,
    head: int = 0,
    start: int = 0,
    valid: int | None = None,
) -> int:
    counted = block.shape[2] if valid is None else valid
    arguments = (np.int32(component), np.int32(head), np.int32(start), np.int32(counted))
    return fold(np.asarray(_granules(jnp.asarray(block), key_words(key), *arguments)))


def random_block(dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(C, K, T, H)).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("component", "head", "start", "valid"), [(0, 0, 0, T), (6, 2, 48, 37), (1, 0, 100_000, 0)]
)
def test_it_equals_its_twin_in_plain_integers(dtype, component, head, start, valid):
    block = (20 * random_block("float32")).astype(jnp.dtype(dtype))
    assert checksum(block, KEY, component, head, start, valid) == twin(
        block, KEY, component, head, start, valid
    )


def added(*sums: int) -> int:
    """Sums of parts, lane by lane."""
    return fold(np.array([[one & MASK, one >> 32] for one in sums], np.uint32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_cut_into_components_heads_and_tokens_adds_up(dtype):
    block, rng = random_block(dtype), np.random.default_rng(1)
    whole = checksum(block, component=3, head=5, start=160)
    for _ in range(3):
        c, k, t = (
            int(rng.integers(1, size)) * unit for size, unit in ((C, 1), (K, 1), (T // 16, 16))
        )
        parts = [
            checksum(block[cs, ks, ts], KEY, 3 + cs.start, 5 + ks.start, 160 + ts.start)
            for cs in (slice(0, c), slice(c, C))
            for ks in (slice(0, k), slice(k, K))
            for ts in (slice(0, t), slice(t, T))
        ]
        assert added(*parts) == whole


def test_granules_are_sums_of_their_own_tokens():
    block = random_block("float32")
    sums = _granules(
        jnp.asarray(block), key_words(KEY), np.int32(0), np.int32(0), np.int32(32), np.int32(50)
    )
    assert [fold(np.asarray(sums[i])) for i in range(4)] == [
        checksum(block[:, :, 16 * i : 16 * i + 16], start=32 + 16 * i, valid=min(16, 50 - 16 * i))
        for i in range(4)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_single_flipped_bit_changes_both_lanes(dtype):
    block, rng = random_block(dtype), np.random.default_rng(2)
    right = checksum(block)
    bits = np.uint32 if dtype == "float32" else np.uint16
    for bit in range(8 * block.itemsize):
        broken = block.copy()
        at = tuple(rng.integers(0, size) for size in block.shape)
        broken.view(bits)[at] ^= bits(1 << bit)
        wrong = checksum(broken)
        assert wrong & MASK != right & MASK
        assert wrong >> 32 != right >> 32


def test_padding_may_hold_anything():
    block = random_block("float32")
    other = block.copy()
    other[:, :, 40:] = np.nan
    assert checksum(block, valid=40) == checksum(other, valid=40)


def _swap(axis: int, first: int, second: int):
    order = list(range((C, K, T, H)[axis]))
    order[first], order[second] = second, first
    return lambda block: np.take(block, order, axis)


@pytest.mark.parametrize(
    "damage",
    [
        _swap(1, 0, 1),
        _swap(1, 0, 3),
        _swap(2, 3, 4),
        _swap(2, 0, 63),
        _swap(0, 0, 2),
        _swap(0, 0, 1),
        _swap(3, 1, 2),
    ],
    ids=[
        "heads",
        "far heads",
        "positions",
        "far positions",
        "layers",
        "keys for values",
        "values within a row",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_changed_places_is_noticed(dtype, damage):
    block = random_block(dtype)
    assert checksum(np.ascontiguousarray(damage(block))) != checksum(block)


def test_other_coordinates_and_other_keys_give_other_sums():
    block = random_block("bfloat16")
    sums = [checksum(block, KEY)]
    sums += [checksum(block, KEY ^ 1 << bit) for bit in range(64)]
    sums += [
        checksum(block, start=1),
        checksum(block, start=16),
        checksum(block, head=1),
        checksum(block, component=1),
    ]
    sums += [
        checksum(block, valid=63),
        checksum(np.zeros_like(block)),
        checksum(np.zeros_like(block), start=1),
    ]
    assert len(set(sums)) == len(sums)
    assert len({one & MASK for one in sums}) == len({one >> 32 for one in sums}) == len(sums)


@pytest.mark.parametrize("size", [0, 1, 7, 4096, 1024 * 1021 * 4 + 4099])
def test_the_sum_of_bytes_notices_a_changed_byte_and_words_that_changed_places(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    expected = byte_sum(values)
    assert len(expected) == 16 and byte_sum(values.copy()) == expected
    assert byte_sum(np.append(values, np.uint8(0))) != expected
    for place in {0, size // 2, size - 1} if size else ():
        changed = values.copy()
        changed[place] ^= 1
        assert byte_sum(changed) != expected
    for apart in (4, 4096, 4084) if size > 9000 else ():
        swapped = values.copy()
        swapped[:4], swapped[apart : apart + 4] = values[apart : apart + 4], values[:4]
        assert byte_sum(swapped) != expected
    if size == 4096:
        assert byte_sum(values.view(np.float32).reshape(32, 32)) == expected
