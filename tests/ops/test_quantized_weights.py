"""Quantized weights against float64: stored values are within their bound, and a product uses the
stored values."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdisagg.errors import ConfigError
from jdisagg.ops import quantized_weights
from jdisagg.ops.linear import project
from jdisagg.ops.moe import ExpertWeights, _ragged_products, block_products, gpu_products
from jdisagg.ops.quantized_weights import (
    KernelForm,
    Weights,
    checked_weights,
    pack_pairs,
    quantized,
)
from tests.lanes import first_quick

FORMS: list[Weights] = ["int8", "int4", "fp8"]


def _matrix(*shape: int) -> np.ndarray:
    values = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    values[..., 3] = 0  # an output of which nothing is left
    return values


def _kept(
    values: np.ndarray, axis: int, weights: Weights, platform: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (values, scales) in the form of a loaded model."""
    q, scale = quantized(values, axis, weights)
    form = KernelForm(weights=weights, platform=platform)
    if form.packed(experts=values.ndim == 3):
        return pack_pairs(q, axis), scale
    return (q.view(np.uint8) if form.role() == "uint8" else q), scale


def _restored(values: np.ndarray, axis: int, weights: Weights) -> np.ndarray:
    q, scale = quantized(values, axis, weights)
    return q.astype(np.float64) * np.expand_dims(scale.astype(np.float64), axis)


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_kept_is_within_the_promised_bound(weights: Weights, axis: int) -> None:
    matrix = np.moveaxis(_matrix(48, 10), 0, axis)
    error = np.abs(_restored(matrix, axis, weights) - matrix)
    largest = np.abs(matrix).max(axis=axis, keepdims=True)
    bound = {
        "int8": largest / 254,
        "int4": largest / 14,
        "fp8": np.maximum(np.abs(matrix) / 16, largest / 448 / 1024),
    }[weights]
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize(
    ("platform", "dtype"),
    first_quick([("cpu", "bfloat16"), ("gpu", "float32"), ("cpu", "float32"), ("gpu", "bfloat16")]),
)
def test_a_product_is_that_of_the_restored_matrix(
    weights: Weights, platform: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either orientation, for one row and several, in tiles that do not divide the columns."""
    monkeypatch.setattr(quantized_weights, "_TILE_VALUES", 48 * 8)
    random = np.random.default_rng(0)
    x, bias = (jnp.asarray(random.normal(size=shape), dtype) for shape in ((5, 48), (20,)))
    matrix = _matrix(48, 20)
    exact = np.asarray(x, np.float64) @ _restored(matrix, 0, weights)
    exact += np.asarray(bias, np.float64)
    for transposed in (False, True):
        axis = 1 if transposed else 0
        kernel, scale = _kept(matrix.T if transposed else matrix, axis, weights, platform)
        product = jax.jit(partial(project, transposed=transposed, platform=platform))
        for rows in (1, 5):
            got = product(x[:rows], jnp.asarray(kernel), bias, scale=jnp.asarray(scale))
            assert got.dtype == dtype
            tolerance = 2e-5 if dtype == "float32" else 0.15
            np.testing.assert_allclose(np.asarray(got, np.float64), exact[:rows], atol=tolerance)


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize(
    ("platform", "biased"),
    first_quick(
        [("cpu", True), ("gpu", True), ("tpu", True), ("cpu", False), ("gpu", False)], quick=2
    ),
)
def test_quantized_experts_give_what_their_restored_matrices_give(
    weights: Weights, platform: str, biased: bool
) -> None:
    """Includes pairs without a local expert. The GPU's kernels run in interpret mode."""
    experts, width, ffn, tokens = 4, 32, 48, 9
    floats = [_matrix(experts, width, ffn), -_matrix(experts, width, ffn)]
    floats.append(_matrix(experts, ffn, width) / 5)
    kept = [_kept(part, 1, weights, platform) for part in floats]
    random = np.random.default_rng(1)
    sizes = (experts, ffn), (experts, ffn), (experts, width)
    biases = [jnp.asarray(random.normal(size=size), jnp.float32) for size in sizes]
    quantized = [jnp.asarray(q) for q, _ in kept] + [jnp.asarray(s) for _, s in kept]
    parts = ExpertWeights(*quantized, *(biases if biased else ()))
    restored = [jnp.asarray(_restored(part, 1, weights), jnp.float32) for part in floats]
    plain = ExpertWeights(*restored, None, None, None, *(biases if biased else ()))
    x_TD = jnp.asarray(random.normal(size=(tokens, width)), jnp.float32)
    local_TJ = jnp.asarray(random.integers(0, experts + 1, (tokens, 2)), jnp.int32)
    expected = np.asarray(jax.jit(block_products, static_argnums=3)(x_TD, local_TJ, plain, 4))
    run = {
        "cpu": partial(block_products, rows=4),
        "gpu": partial(gpu_products, device_kind="H200", interpret=True),
        "tpu": partial(_ragged_products, rows=4),
    }[platform]
    got = np.asarray(jax.jit(run)(x_TD, local_TJ, parts))
    here = np.asarray(local_TJ) < experts
    assert np.abs(got - expected)[here].max() < 2e-5 * np.abs(expected[here]).max()


def test_two_int4_in_a_byte_are_neighbours_and_keep_their_signs() -> None:
    whole = np.arange(-8, 8).astype(ml_dtypes.int4).reshape(2, 8)
    packed = pack_pairs(whole, 1)
    assert packed.shape == (2, 4) and packed.dtype == np.uint8
    low, high = quantized_weights.halves(jnp.asarray(packed))
    np.testing.assert_array_equal(low, whole[:, 0::2].astype(np.int8))
    np.testing.assert_array_equal(high, whole[:, 1::2].astype(np.int8))


def test_a_form_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="weights must be int8, int4, fp8 or empty, got 'int3'"):
        checked_weights("int3")
