"""The hash behind sampling is uniform, uncorrelated along every coordinate, and never gives a
number that breaks the race."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import randomness

pytestmark = pytest.mark.one_device

COORDINATES = ["seed low", "seed high", "child", "position"]


def bits_of(words_B4: np.ndarray, vocabulary: int) -> np.ndarray:
    """uint32 [B, V] for rows of (seed low, seed high, child, position)."""
    return np.asarray(_bits(jnp.asarray(words_B4.astype(np.uint32)), vocabulary))


@partial(jax.jit, static_argnums=1)
def _bits(words_B4: jax.Array, vocabulary: int) -> jax.Array:
    child_B, position_B = (words_B4[:, at].astype(jnp.int32) for at in (2, 3))
    keys = randomness.row_keys(words_B4[:, :2], child_B, position_B)
    return randomness.random_bits(keys, vocabulary)


def neighbours(coordinate: int, rows: int) -> np.ndarray:
    """Rows that differ only in one coordinate, which counts up from 0."""
    words_B4 = np.tile(np.array([[12345, 0, 0, 700]]), (rows, 1))
    words_B4[:, coordinate] = np.arange(rows)
    return words_B4


@pytest.mark.parametrize("coordinate", range(4), ids=COORDINATES)
def test_bits_are_uniform_along_every_coordinate(coordinate: int) -> None:
    bits_BV = bits_of(neighbours(coordinate, 512), 512)
    for shift in (0, 8, 16, 24):
        seen = np.bincount(((bits_BV >> shift) & 255).ravel(), minlength=256)
        chi_square = ((seen - bits_BV.size / 256) ** 2 / (bits_BV.size / 256)).sum()
        assert 160 < chi_square < 370, shift  # 255 degrees of freedom: p about 1e-6 at either end


@pytest.mark.parametrize("coordinate", range(4), ids=COORDINATES)
def test_each_id_is_uniform_over_rows_and_each_row_over_ids(coordinate: int) -> None:
    bits_BV = bits_of(neighbours(coordinate, 2048), 2048) >> 28
    for axis in (0, 1):
        seen = np.apply_along_axis(np.bincount, axis, bits_BV, minlength=16)
        chi_square = ((seen - 128) ** 2 / 128).sum(axis=axis)  # 2048 of them, 15 degrees of freedom
        assert abs(chi_square.mean() - 15) < 0.8
        assert chi_square.max() < 60


@pytest.mark.parametrize("coordinate", range(4), ids=COORDINATES)
def test_neighbours_are_uncorrelated(coordinate: int) -> None:
    uniform_BV = bits_of(neighbours(coordinate, 1024), 1024) / 2.0**32 - 0.5
    small = 6 * 12 / 1024  # six standard deviations, of products whose own is 1/12
    for distance in (1, 2, 4, 64, 256):
        across_rows = (uniform_BV[distance:] * uniform_BV[:-distance]).mean() * 144
        across_ids = (uniform_BV[:, distance:] * uniform_BV[:, :-distance]).mean() * 144
        assert abs(across_rows) < small, distance
        assert abs(across_ids) < small, distance


@pytest.mark.parametrize("coordinate", [*range(4), 4], ids=[*COORDINATES, "vocabulary id"])
def test_flipping_any_bit_of_a_coordinate_flips_half_of_the_bits(coordinate: int) -> None:
    random = np.random.default_rng(0)
    words_B4 = random.integers(2**31, size=(256, 4))
    if coordinate == 4:
        base_BV = bits_of(words_B4, 1 << 12)
        pairs = [(base_BV, base_BV[:, np.arange(1 << 12) ^ (1 << bit)]) for bit in range(12)]
    else:
        base_BV = bits_of(words_B4, 64)
        flips = np.eye(4, dtype=np.int64)[coordinate]
        pairs = [(base_BV, bits_of(words_B4 ^ (flips << bit), 64)) for bit in range(31)]
    for before_BV, after_BV in pairs:
        for output_bit in range(32):
            flipped = ((before_BV ^ after_BV) >> output_bit & 1).mean()
            assert abs(flipped - 0.5) < 5.5 * 0.5 / np.sqrt(before_BV.size / 2)


def test_no_two_rows_are_shifts_of_one_another() -> None:
    bits_BV = bits_of(neighbours(3, 64), 4096)
    assert len(np.unique(bits_BV)) > bits_BV.size * (1 - 2 * bits_BV.size / 2**32)


def test_columns_do_not_depend_on_the_padded_size_of_the_vocabulary() -> None:
    rows_B4 = neighbours(3, 8)
    assert (bits_of(rows_B4, 1000) == bits_of(rows_B4, 1024)[:, :1000]).all()


def test_a_uniform_number_is_never_zero_or_one_and_its_exponential_is_positive_and_finite() -> None:
    bits = jnp.asarray(
        np.array([0, 1, 2, 255, 2**16, 2**31, 2**32 - 2**9, 2**32 - 2, 2**32 - 1], np.uint32)
    )
    uniform = np.asarray(randomness.uniform(bits))
    assert uniform.dtype == np.float32
    assert (uniform > 0).all() and (uniform < 1).all()
    exponential = np.asarray(randomness.exponential(bits))
    assert (exponential > 0).all() and np.isfinite(exponential).all()


def test_an_exponential_is_accurate_where_it_is_small() -> None:
    bits = np.concatenate(
        [
            2 ** np.arange(32, dtype=np.uint64),
            np.random.default_rng(1).integers(2**32, size=20_000, dtype=np.uint64),
        ]
    )
    computed = np.asarray(jax.jit(randomness.exponential)(jnp.asarray(bits.astype(np.uint32))))
    exact = -np.log1p(-np.minimum(((bits >> np.uint64(1)) + 0.5) / 2.0**31, 1 - 2.0**-24))
    settled = exact < 8  # beyond, one step of the uniform number is worth more than the tolerance
    assert np.allclose(computed[settled], exact[settled], rtol=2e-4)
    tiny = exact < 2.0**-8
    assert np.allclose(computed[tiny], exact[tiny], rtol=1e-6)
