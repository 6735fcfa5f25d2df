"""Pages against a plain NumPy array written slot by slot."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import kv_pages
from tests.lanes import first_quick

pytestmark = pytest.mark.one_device

PAGES, HEADS, SLOTS, WIDTH = 7, 2, 8, 4


def _pool(seed: int = 0) -> np.ndarray:
    return (
        np.random.default_rng(seed).standard_normal((PAGES, HEADS, SLOTS, WIDTH)).astype(np.float32)
    )


def _written(
    pool: np.ndarray, rows_TKH: np.ndarray, page_T: np.ndarray, slot_T: np.ndarray
) -> np.ndarray:
    expected = pool.copy()
    for row, page, slot in zip(rows_TKH, page_T, slot_T, strict=True):
        if page < PAGES:
            expected[page, :, slot] = row
    return expected


def _rows(tokens: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((tokens, HEADS, WIDTH)).astype(np.float32)


@pytest.mark.parametrize(
    ("start", "tokens"),
    first_quick([(3, 24), (15, 1), (8, 8), (0, 5), (0, 24), (3, 5), (15, 8)], quick=4, ci=3),
)
def test_a_block_lands_at_its_coordinates_from_any_start_and_touches_nothing_else(
    start: int, tokens: int
) -> None:
    table = np.array([5, 1, 6, 0, 3], np.int32)
    positions = np.arange(start, start + tokens)
    page_T, slot_T = table[positions // SLOTS], (positions % SLOTS).astype(np.int32)
    # some rows belong nowhere
    page_T = np.where(np.arange(tokens) % 5 == 4, PAGES, page_T).astype(np.int32)
    pool, rows = _pool(), _rows(tokens)
    expected = _written(pool, rows, page_T, slot_T)
    block = jax.jit(kv_pages.insert_block)(pool, rows.swapaxes(0, 1), page_T, slot_T)
    np.testing.assert_array_equal(block, expected)
    for platform in ("cpu", "tpu"):
        tokenwise = jax.jit(kv_pages.write_tokens, static_argnames=("unique", "platform"))(
            pool, rows, page_T, slot_T, unique=False, platform=platform
        )
        np.testing.assert_array_equal(tokenwise, expected)


def test_decode_rows_are_written_each_to_its_own_slot() -> None:
    table = np.array([[2, 4], [0, 6], [3, 3]], np.int32)
    positions = np.array([9, 0, 7], np.int32)
    page_B, slot_B = kv_pages.decode_coordinates(
        jnp.asarray(table), jnp.asarray(positions), slots=SLOTS
    )
    np.testing.assert_array_equal(page_B, [4, 0, 3])
    np.testing.assert_array_equal(slot_B, [1, 0, 7])
    pool, rows = _pool(), _rows(3)
    got = kv_pages.write_tokens(jnp.asarray(pool), jnp.asarray(rows), page_B, slot_B, unique=True)
    np.testing.assert_array_equal(got, _written(pool, rows, np.asarray(page_B), np.asarray(slot_B)))


def test_token_coordinates_send_padding_and_positions_beyond_the_table_nowhere() -> None:
    table = jnp.array([[2, 4], [0, 6]], jnp.int32)
    row_T, positions_T = (
        jnp.array([0, 0, 1, -1, 1], jnp.int32),
        jnp.array([7, 8, 15, 0, 16], jnp.int32),
    )
    page_T, slot_T = kv_pages.token_coordinates(table, row_T, positions_T, pages=PAGES, slots=SLOTS)
    np.testing.assert_array_equal(page_T, [2, 4, 6, PAGES, PAGES])
    np.testing.assert_array_equal(slot_T, [7, 0, 7, 0, 0])


def test_copies_read_all_sources_before_they_write_and_drop_destinations_out_of_range() -> None:
    pool = _pool()
    got = jax.jit(kv_pages.copy_pages)(
        pool, np.array([0, 1, 2], np.int32), np.array([1, 3, PAGES], np.int32)
    )
    expected = pool.copy()
    expected[1], expected[3] = pool[0], pool[1]
    np.testing.assert_array_equal(got, expected)


def test_gathered_tokens_come_heads_first() -> None:
    pool = _pool()
    page_T, slot_T = np.array([3, 0, 6], np.int32), np.array([1, 7, 0], np.int32)
    got = kv_pages.gather_tokens(jnp.asarray(pool), jnp.asarray(page_T), jnp.asarray(slot_T))
    np.testing.assert_array_equal(
        got, np.stack([pool[p, :, s] for p, s in zip(page_T, slot_T, strict=True)], axis=1)
    )


@pytest.mark.parametrize("most_slices", [0, 32])
@pytest.mark.parametrize(
    ("start", "tokens"), first_quick([(7, 16), (5, 30), (0, 16), (3, 5), (8, 1)], quick=2, ci=3)
)
def test_whole_pages_give_a_block_the_tokens_of_its_valid_positions(
    monkeypatch: pytest.MonkeyPatch, start: int, tokens: int, most_slices: int
) -> None:
    monkeypatch.setattr(kv_pages, "MOST_SLICES", most_slices)
    table, pool = np.array([5, 1, 6, 0, 3, 2], np.int32), jnp.asarray(_pool())
    positions = np.arange(start, start + tokens)
    page_T, slot_T = table[positions // SLOTS], (positions % SLOTS).astype(np.int32)
    valid = max(1, tokens - 4)
    page_T[valid:] = PAGES  # padding
    got = kv_pages.gather_block(pool, jnp.asarray(page_T), jnp.asarray(slot_T), "tpu")
    assert got.shape == (HEADS, tokens, WIDTH)
    np.testing.assert_array_equal(
        got[:, :valid], kv_pages.gather_tokens(pool, page_T[:valid], slot_T[:valid])
    )


@pytest.mark.parametrize("gather", [kv_pages.gather_columns, kv_pages.gather_pages])
def test_gathered_columns_are_contiguous_positions(gather: Callable[..., jax.Array]) -> None:
    pool, table = _pool(), np.array([[5, 1, 2], [0, 3, 4]], np.int32)
    got = gather(jnp.asarray(pool), jnp.asarray(table), 1, 2)
    for row in range(2):
        np.testing.assert_array_equal(
            got[row], np.concatenate([pool[table[row, 1]], pool[table[row, 2]]], axis=1)
        )


@pytest.mark.parametrize(("length",), first_quick([(4,), (24,), (8,), (2,), (16,)], quick=3, ci=2))
def test_a_gathered_span_is_these_positions_of_every_sequence(length: int) -> None:
    pool, table = _pool(), np.array([[5, 1, 2, 6, 0, 3], [0, 3, 4, 1, 1, 5]], np.int32)
    gather = jax.jit(
        lambda index: kv_pages.gather_span(
            kv_pages.span_rows(jnp.asarray(pool), length), jnp.asarray(table), index
        )
    )
    whole = np.stack([np.concatenate(pool[row], axis=1) for row in table])
    for index in range(6 * SLOTS // length):
        np.testing.assert_array_equal(
            gather(jnp.int32(index)), whole[:, :, index * length : (index + 1) * length]
        )


ONES, AT = np.ones((4, HEADS, WIDTH), np.float32), np.arange(4)
WRITES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tokens": lambda pool: kv_pages.write_tokens(pool, ONES, AT, AT, unique=False),
    "rows of a step": lambda pool: kv_pages.write_tokens(pool, ONES, AT, AT, unique=True),
    "block": lambda pool: kv_pages.insert_block(pool, ONES.swapaxes(0, 1), AT, AT),
    "pages": lambda pool: kv_pages.copy_pages(pool, np.array([0]), np.array([3])),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_donated_pool_is_written_in_place(write: Callable[[jax.Array], jax.Array]) -> None:
    pool = jax.ShapeDtypeStruct((512, HEADS, SLOTS, WIDTH), jnp.float32)
    memory = jax.jit(write, donate_argnums=0).lower(pool).compile().memory_analysis()
    pool_bytes = 512 * HEADS * SLOTS * WIDTH * 4
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 10
