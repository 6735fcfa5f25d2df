"""Packing keeps its stated error bounds and memory formats."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdisagg.ops import quantize as q

pytestmark = pytest.mark.one_device


def rows(seed: int = 0) -> np.ndarray:
    """Rows of very different magnitudes, including zeros, one huge value, and equal values."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(64, 32)) * 10.0 ** rng.uniform(-20, 20, size=(64, 1))
    values[0] = 0
    values[1, 5] = 1e30
    values[2] = -3.25
    return values.astype(np.float32)


def slack(values: np.ndarray) -> np.ndarray:
    return 2.0**-21 * np.abs(values).max(axis=-1, keepdims=True)


@pytest.mark.parametrize(("largest", "form"), [(127.0, "int8"), (7.0, "int4")])
def test_whole_numbers_err_by_half_a_scale_at_most(largest, form):
    values = rows()
    scale = q.row_scale(jnp.asarray(values), largest)
    whole = q.to_int8(jnp.asarray(values), scale, largest)
    assert int(jnp.abs(whole.astype(jnp.int32)).max()) == largest
    back = q.unpack_int4(q.pack_int4(whole)) if form == "int4" else whole
    error = np.abs(np.asarray(q.rescaled(back, scale, jnp.dtype(jnp.float32))) - values)
    assert np.all(error <= np.asarray(scale) / 2 + slack(values))
    assert np.all(error[0] == 0)


def test_fp8_errs_by_a_sixteenth_of_the_value_at_most():
    values = rows()
    scale = q.row_scale(jnp.asarray(values), q.FP8_LARGEST)
    back = q.from_fp8(q.to_fp8(jnp.asarray(values), scale))
    error = np.abs(np.asarray(q.rescaled(back, scale, jnp.dtype(jnp.float32))) - values)
    least = np.maximum(np.abs(values) / 16, np.asarray(scale) / 1024)
    assert np.all(error <= least + slack(values))
    assert np.all(error[0] == 0)


def test_fp8_bytes_are_those_of_the_type_itself():
    values = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    packed = q.to_fp8(jnp.asarray(values), jnp.ones((8, 1), jnp.float32))
    np.testing.assert_array_equal(
        np.asarray(packed), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )


def test_every_pair_of_nibbles_survives():
    numbers = np.arange(-8, 8, dtype=np.int8)
    first, second = (grid.reshape(-1, 1) for grid in np.meshgrid(numbers, numbers))
    whole = np.concatenate([first, second], axis=1)
    packed = q.pack_int4(jnp.asarray(whole))
    assert packed.shape == (256, 1)
    assert len(set(np.asarray(packed).ravel().tolist())) == 256
    np.testing.assert_array_equal(np.asarray(q.unpack_int4(packed)), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_values_come_back_in_their_own_type(dtype):
    values = jnp.asarray(np.random.default_rng(2).normal(size=(16, 32)), jnp.dtype(dtype))
    scale = q.row_scale(values, q.INT8_LARGEST)
    back = q.rescaled(q.to_int8(values, scale), scale, values.dtype)
    assert back.dtype == values.dtype
    wide = np.asarray(values, np.float32)
    rounding = np.abs(wide).max(axis=-1, keepdims=True) * 2.0 ** (
        -8 if dtype == "bfloat16" else -11
    )
    assert np.all(np.abs(np.asarray(back, np.float32) - wide) <= np.asarray(scale) / 2 + rounding)
