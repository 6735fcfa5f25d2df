"""The matrix product of activations with a weight, in the orientation that is fast on the platform.

A kernel is [in, out], or [out, in] if `transposed`. On a CPU the orientation [out, in] makes
bfloat16 about 10 % faster and float32 decode a third slower. `kernel_is_transposed` chooses the
orientation when a model is built."""

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.ops.quantized_weights import scaled_product

_UPCASTS = jax.__version_info__ < (0, 12)


def kernel_is_transposed(platform: str, dtype: str) -> bool:
    return traits_of(platform).stores_bits and dtype == "bfloat16"


def project(
    x_TD: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    transposed: bool = False,
    platform: str = "cpu",
    out_dtype: jnp.dtype | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Multiplies x [T, in] with a kernel and adds the bias. Returns [T, out] in `out_dtype`; None
    means x's dtype. `scale` holds the output scales of a quantized kernel."""
    if scale is not None:
        y = scaled_product(x_TD, kernel, scale, transposed=transposed, platform=platform)
    elif traits_of(platform).stores_bits and x_TD.dtype == jnp.bfloat16:
        y = _bfloat16_on_cpu(x_TD, kernel, transposed)
    else:
        y = _product(x_TD, kernel, transposed, out_dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, :]
    return y if out_dtype is None else y.astype(out_dtype)


def _product(
    x_TD: jax.Array, kernel: jax.Array, transposed: bool, out_dtype: jnp.dtype | None
) -> jax.Array:
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(x_TD, kernel, contracted, preferred_element_type=out_dtype)


def _bfloat16_on_cpu(x_TD: jax.Array, kernel: jax.Array, transposed: bool) -> jax.Array:
    """From JAX 0.12 on bfloat16 is requested, because XLA:CPU takes twice as long for float32 ([32,
    768] x [768, 32000]: 6.8 against 3.5 ms). Earlier XLA:CPU, asked for bfloat16, makes float32
    copies of all weights of a program first (twice their bytes) and is 2 to 11 times slower ([2,
    2048] x [2048, 2048]: 25 against 2.3 ms), so float32 is requested there.

    A single row is very slow (46 ms against 5 ms for that kernel). A single row is therefore
    duplicated, and a barrier keeps XLA from removing the duplicate."""
    wanted = jnp.dtype(jnp.float32) if _UPCASTS else None
    if x_TD.shape[0] > 1:
        return _product(x_TD, kernel, transposed, wanted).astype(x_TD.dtype)
    two_rows = lax.optimization_barrier(jnp.concatenate((x_TD, x_TD)))
    return _product(two_rows, kernel, transposed, wanted).astype(x_TD.dtype)[:1]
