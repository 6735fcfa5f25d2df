"""Products in both orientations and row counts, and their memory on a CPU; embedding and logits
over a sharded, padded vocabulary; norms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jdisagg.ops.embedding import embed_tokens, gather_logits
from jdisagg.ops.linear import kernel_is_transposed, project
from jdisagg.ops.norm import rms_norm
from tests.lanes import first_quick

LAYERS, WIDTH = 8, 256


@pytest.mark.parametrize(("rows",), first_quick([(2,), (1,), (32,)], ci=2))
def test_no_copy_of_the_weights_is_made(rows: int) -> None:
    """XLA:CPU before JAX 0.12 makes float32 copies of all of them when asked for bfloat16."""

    def chain(x_TD: jax.Array, kernels: list[jax.Array]) -> jax.Array:
        for kernel in kernels:
            x_TD = project(x_TD, kernel, transposed=True, platform="cpu")
        return x_TD

    kernel = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    x_TD = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)
    memory = jax.jit(chain).lower(x_TD, [kernel] * LAYERS).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < WIDTH * WIDTH


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_the_product_is_the_exact_one_rounded_once(rows: int) -> None:
    random = np.random.default_rng(rows)
    x_TD = jnp.asarray(random.standard_normal((rows, WIDTH)), jnp.bfloat16)
    kernel = jnp.asarray(random.standard_normal((WIDTH, WIDTH)), jnp.bfloat16)
    exact = np.asarray(x_TD, np.float64) @ np.asarray(kernel, np.float64).T
    got = np.asarray(project(x_TD, kernel, transposed=True, platform="cpu"), np.float64)
    # half a unit in the last of 8 bits, and what float32 sums lose
    assert np.all(np.abs(got - exact) <= np.abs(exact) * 2**-8 + 1e-3)


@pytest.mark.parametrize(
    ("platform", "dtype", "rows"),
    first_quick(
        [
            *(("cpu", "bfloat16", 2), ("gpu", "bfloat16", 5), ("cpu", "float32", 5)),
            *(("cpu", "bfloat16", 1), ("gpu", "float32", 1), ("cpu", "bfloat16", 5)),
        ],
        quick=3,
        ci=3,
    ),
)
def test_a_product_is_the_same_in_either_orientation_and_for_any_number_of_rows(
    dtype: str, rows: int, platform: str
) -> None:
    random = np.random.default_rng(0)
    x, kernel, bias = (
        jnp.asarray(random.normal(size=shape), dtype) for shape in ((5, 48), (48, 20), (20,))
    )
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64) + np.asarray(
        bias, np.float64
    )
    for transposed in (False, True):
        stored = kernel.T if transposed else kernel
        # there logits, too, are rounded to bfloat16: see `_bfloat16_on_cpu`
        rounded = dtype == "bfloat16" and platform == "cpu"
        for out_dtype, tolerance in (
            (None, 1e-5 if dtype == "float32" else 0.2),
            (jnp.dtype("float32"), 0.2 if rounded else 1e-4),
        ):
            got = jax.jit(
                partial(project, transposed=transposed, platform=platform, out_dtype=out_dtype)
            )(x[:rows], stored, bias)
            assert got.dtype == (out_dtype or dtype)
            np.testing.assert_allclose(np.asarray(got, np.float64), exact[:rows], atol=tolerance)


def test_only_bfloat16_on_cpu_keeps_its_kernels_transposed() -> None:
    assert [
        kernel_is_transposed(*case)
        for case in (("cpu", "bfloat16"), ("cpu", "float32"), ("gpu", "bfloat16"))
    ] == [True, False, False]


def test_a_vocabulary_over_several_devices_gives_the_rows_and_logits_of_one() -> None:
    vocabulary, padded = 10, 12
    table_VD = jnp.asarray(np.random.default_rng(0).normal(size=(padded, 6)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("kv", "rep"))
    tokens_T = jnp.asarray([0, 9, 3, 3, 7])

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(("kv", "rep")), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def both(table_VD: jax.Array, tokens_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_TD = embed_tokens(table_VD, tokens_T, ("kv", "rep"))
        return x_TD, gather_logits(x_TD @ table_VD.T, vocabulary, ("kv", "rep"))

    x_TD, logits_TV = both(table_VD, tokens_T)
    np.testing.assert_array_equal(x_TD, table_VD[tokens_T])
    np.testing.assert_array_equal(x_TD, embed_tokens(table_VD, tokens_T, ()))
    np.testing.assert_allclose(
        logits_TV[:, :vocabulary], (table_VD[tokens_T] @ table_VD.T)[:, :vocabulary], atol=1e-5
    )
    assert logits_TV.dtype == jnp.float32 and np.isneginf(logits_TV[:, vocabulary:]).all()


def test_the_norm_is_computed_in_float32_and_returned_in_its_own_type() -> None:
    x = jnp.asarray([[[3.0, 4.0]], [[300.0, 400.0]]], jnp.bfloat16)
    got = rms_norm(x, jnp.asarray([1.0, 2.0], jnp.bfloat16), 0.0)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), [[[0.8485, 2.2627]]] * 2, rtol=1e-2)


def test_a_weight_that_is_added_to_one_is_rounded_with_the_product() -> None:
    x = jnp.asarray([[3.0, 4.0]], jnp.bfloat16)
    weight = np.asarray([2**-9, -(2**-9)], np.float32)  # one plus it is no number of bfloat16
    got = rms_norm(x, jnp.asarray(weight, jnp.bfloat16), 0.0, above_one=True)
    exact = np.asarray([3.0, 4.0]) / np.sqrt(12.5) * (1 + weight)
    np.testing.assert_array_equal(got, jnp.asarray([exact], jnp.bfloat16))
