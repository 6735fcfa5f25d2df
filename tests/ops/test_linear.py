"""Products in bfloat16 on a CPU: what they give, and what they hold beside their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.linear import kernel_is_transposed, project

pytestmark = pytest.mark.one_device

LAYERS, WIDTH = 8, 256


@pytest.mark.parametrize("rows", [1, 2, 32])
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
    assert kernel_is_transposed("cpu", "bfloat16")
    got = np.asarray(project(x_TD, kernel, transposed=True, platform="cpu"), np.float64)
    # half a unit in the last of 8 bits, and what float32 sums lose
    assert np.all(np.abs(got - exact) <= np.abs(exact) * 2**-8 + 1e-3)
