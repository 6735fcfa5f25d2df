"""Decode attention against dense attention in float64, sequence by sequence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.paged_attention import Implementation, paged_attention
from tests.lanes import first_quick
from tests.ops.attention_oracle import case, expected, several

pytestmark = pytest.mark.one_device

IMPLEMENTATIONS: tuple[Implementation, ...] = ("loop", "pages", "gather")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("slots", "columns", "window"),
    first_quick([(8, 33, 37), (128, 3, None), (16, 9, 1), (8, 33, 1000), (16, 9, None)], ci=2),
)
def test_every_token_sees_exactly_its_own_past(
    implementation: Implementation, window: int | None, slots: int, columns: int
) -> None:
    q, k, v, table = case(batch=5, heads=2, groups=3, slots=slots, columns=columns, width=16)
    positions = np.array([0, 7, slots * columns - 1, slots * columns // 2, 130], np.int32) % (
        slots * columns
    )
    for b, position in enumerate(positions):
        table[b, position // slots + 1 :] = 10**6  # beyond the length: anything
    got = jax.jit(
        partial(paged_attention, scale=16**-0.5, window=window, implementation=implementation)
    )(q, k, v, table, positions)
    np.testing.assert_allclose(got, expected(q, k, v, table, positions, window), atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("window",), first_quick([(37,), (None,)]))
def test_several_tokens_of_a_sequence_see_each_their_own_past(
    implementation: Implementation, window: int | None
) -> None:
    """With sinks, which take their part, and capped scores."""
    q, k, v, table = case(batch=3, heads=2, groups=3, slots=8, columns=20, width=16)
    q, sinks_N = several(q, 4), np.array([-3, 0, 1.5, 4, 60, -90], np.float32)
    positions = np.array([[0, 1, 2, 0], [156, 157, 158, 159], [70, 71, 70, 70]], np.int32)
    how = {"window": window, "cap": 0.7, "sinks_N": sinks_N}
    attend = partial(paged_attention, scale=16**-0.5, implementation=implementation, **how)
    got = jax.jit(attend)(q, k, v, table, positions)
    rows = np.repeat(table, 4, axis=0), positions.reshape(-1)
    each = expected(q, k, v, *rows, **how)
    assert np.abs(each - expected(q, k, v, *rows, window)).max() > 0.1
    np.testing.assert_allclose(got, each, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "groups"), first_quick([(1, 7), (4, 1), (1, 1)]))
def test_bfloat16_stays_within_its_rounding(
    implementation: Implementation, heads: int, groups: int
) -> None:
    q, k, v, table = (
        jnp.asarray(x)
        for x in case(batch=3, heads=heads, groups=groups, slots=16, columns=20, width=64)
    )
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    positions = np.array([319, 3, 200], np.int32)
    got = jax.jit(partial(paged_attention, scale=0.125, implementation=implementation))(
        q, k, v, table, positions
    )
    assert got.dtype == jnp.bfloat16
    want = expected(
        *(np.asarray(x.astype(jnp.float32)) for x in (q, k, v)), np.asarray(table), positions, None
    )
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=3e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_without_a_sequence_are_finite_and_disturb_no_other(
    implementation: Implementation,
) -> None:
    q, k, v, table = case(batch=3, heads=2, groups=2, slots=8, columns=4, width=8)
    positions = np.array([20, -1, 5], np.int32)
    got = jax.jit(partial(paged_attention, scale=1.0, implementation=implementation))(
        q, k, v, table, positions
    )
    assert np.isfinite(np.asarray(got)).all()
    np.testing.assert_allclose(
        got[::2], expected(q * 8**0.5, k, v, table, np.array([20, 0, 5]), None)[::2], atol=1e-5
    )


def test_scores_of_any_size_do_not_overflow() -> None:
    q, k, v, table = case(batch=2, heads=1, groups=2, slots=8, columns=40, width=8)
    positions = np.array([319, 160], np.int32)
    got = jax.jit(partial(paged_attention, scale=8**-0.5))(q * 1e4, k, v, table, positions)
    np.testing.assert_allclose(got, expected(q * 1e4, k, v, table, positions, None), atol=1e-4)


def test_the_loop_compiles_once_for_all_lengths_and_reads_no_table_sized_copy() -> None:
    q, k, v, table = case(batch=2, heads=2, groups=2, slots=128, columns=32, width=32)
    step = jax.jit(lambda *x: paged_attention(*x, scale=1.0))
    for longest in (5, 1000, 4095):
        step(q, k, v, table, np.array([longest, 1], np.int32))
    assert step._cache_size() == 1
    memory = step.lower(q, k, v, table, np.array([1, 1], np.int32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < k[table].nbytes // 4
