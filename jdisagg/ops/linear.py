"""The matrix product of activations with a weight, in the orientation that the platform likes.

A kernel is [in, out], or [out, in] where `transposed`: on a CPU bfloat16 is about 10 % faster so,
and float32 slower by a third in decode. The choice is made once, when a model is built
(`kernel_is_transposed`), and is part of the module's structure. All CPU tuning of matrix products
lives in this file, and of quantized kernels in `quantized_weights`; models know nothing of it."""

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.ops.quantized_weights import scaled_product

_UPCASTS = jax.__version_info__ < (0, 12)


def kernel_is_transposed(platform: str, dtype: str) -> bool:
    """Whether kernels are kept as [out, in] on this platform."""
    return platform == "cpu" and dtype == "bfloat16"


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
    """x [T, in] times kernel -> [T, out] in `out_dtype` (x's where None), plus the bias. `scale`:
    of a quantized kernel's outputs."""
    if scale is not None:
        y = scaled_product(x_TD, kernel, scale, transposed=transposed, platform=platform)
    elif platform == "cpu" and x_TD.dtype == jnp.bfloat16:
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
    """The product rounded to bfloat16, logits included, as transformers and vLLM compute them.

    From JAX 0.12 on it is asked for as bfloat16: asked for float32, XLA:CPU takes twice as long
    ([32, 768] x [768, 32000]: 6.8 against 3.5 ms). Before, asked for bfloat16, XLA:CPU makes
    float32 copies of all weights of a program before it begins (twice their bytes) and is 2 to 11
    times slower ([2, 2048] x [2048, 2048]: 25 against 2.3 ms); there it is asked for float32.

    One row falls off a cliff (46 ms against 5 ms for that kernel), and so would a doubled row that
    XLA can see through: hence two rows behind a barrier."""
    wanted = jnp.dtype(jnp.float32) if _UPCASTS else None
    if x_TD.shape[0] > 1:
        return _product(x_TD, kernel, transposed, wanted).astype(x_TD.dtype)
    two_rows = lax.optimization_barrier(jnp.concatenate((x_TD, x_TD)))
    return _product(two_rows, kernel, transposed, wanted).astype(x_TD.dtype)[:1]
