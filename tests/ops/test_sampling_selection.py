"""The largest of a row, found without sorting, against numpy's stable sort."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import selection

pytestmark = pytest.mark.one_device

RANDOM = np.random.default_rng(0)
SIZE = (4, 4096)
ROWS = {
    "normal": RANDOM.standard_normal(SIZE),
    "many ties": RANDOM.integers(-2, 3, SIZE),
    "all equal": np.zeros(SIZE),
    "mostly minus infinity": np.where(
        RANDOM.random(SIZE) < 0.995, -np.inf, RANDOM.standard_normal(SIZE)
    ),
    "both zeros": np.where(RANDOM.random(SIZE) < 0.5, 0.0, -0.0),
    "every magnitude": RANDOM.standard_normal(SIZE) * 10.0 ** RANDOM.integers(-30, 30, SIZE),
    "one column": RANDOM.standard_normal((4, 1)),
}
# Compiled once for each shape.
ARGMAX, LARGEST = jax.jit(selection.argmax), jax.jit(selection.largest, static_argnums=1)
SEPARATING = jax.jit(selection.separating_value)


@jax.jit
def kth_largest(x_BV: jax.Array, count: jax.Array) -> jax.Array:
    def reached(values: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.sum(x_BV >= value_B[:, None], axis=1) >= count for value_B in values]

    return selection.last_value(reached, 4)


@pytest.fixture(params=list(ROWS.values()), ids=list(ROWS))
def rows(request: pytest.FixtureRequest) -> np.ndarray:
    return request.param.astype(np.float32)


def test_the_argmax_is_the_smallest_index_of_the_largest(rows: np.ndarray) -> None:
    assert np.asarray(ARGMAX(jnp.asarray(rows))).tolist() == np.argmax(rows, axis=1).tolist()


@pytest.mark.parametrize("count", [1, 2, 20])
def test_the_largest_are_those_of_a_stable_sort(rows: np.ndarray, count: int) -> None:
    count = min(count, rows.shape[1])
    values, ids = LARGEST(jnp.asarray(rows), count)
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    assert (np.asarray(ids) == expected).all()
    assert (np.asarray(values) == np.take_along_axis(rows, expected, axis=1)).all()


@pytest.mark.parametrize("count", [1, 3, 150])
def test_the_separating_value_keeps_the_largest_and_what_ties_with_the_last(
    rows: np.ndarray, count: int
) -> None:
    count = min(count, rows.shape[1])
    counts, wanted = jnp.full(4, count, jnp.int32), jnp.asarray([True, True, False, True])
    values = np.asarray(SEPARATING(jnp.asarray(rows), counts, wanted))
    kth = np.sort(rows, axis=1)[:, ::-1][:, count - 1]
    for row in (0, 1, 3):
        assert ((rows[row] >= values[row]) == (rows[row] >= kth[row])).all()
    assert values[2] == -np.inf


@pytest.mark.parametrize("count", [1, 3, 150])
def test_the_last_value_that_so_many_reach_is_the_kth_largest(rows: np.ndarray, count: int) -> None:
    count = min(count, rows.shape[1])
    values = np.asarray(kth_largest(jnp.asarray(rows), jnp.int32(count)))
    assert (values == np.sort(rows, axis=1)[:, ::-1][:, count - 1]).all()
