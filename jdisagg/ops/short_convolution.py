"""A causal convolution over the last few tokens of each sequence, channel by channel. For a kernel
of size K, the state is the inputs of the last K - 1 tokens.

Masking uses `where`, never a product with zero, so that a sequence with non-finite inputs affects
no other sequence. Sums are computed in float32 and rounded once."""

import jax
import jax.numpy as jnp

from jdisagg.model_api import Runs


def inputs_by_token(kept_RGX: jax.Array, count: int) -> jax.Array:
    """Converts the stored state (the last `count` inputs of each row, grouped by kv head, [R, G, S
    x channels]) to inputs by token, [R, S, C]."""
    rows, groups, _ = kept_RGX.shape
    return kept_RGX.reshape(rows, groups, count, -1).swapaxes(1, 2).reshape(rows, count, -1)


def inputs_by_head(inputs_RSC: jax.Array, heads: int) -> jax.Array:
    """Inverse of `inputs_by_token`."""
    rows, kept, _ = inputs_RSC.shape
    by_token = inputs_RSC.reshape(rows, kept, heads, -1)
    return by_token.swapaxes(1, 2).reshape(rows, heads, -1)


def convolve_runs(
    x_TC: jax.Array,
    kernel_CK: jax.Array,
    state_RSC: jax.Array,
    runs: Runs,
    bias_C: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolves the tokens of each row (sequence) of a prefill chunk.

    Args:
        kernel_CK: Weights of each channel. The last weight applies to the newest input.
        state_RSC: State: the last S = K - 1 inputs before each row's first token, the newest last.

    Returns:
        y [T, C] in x's dtype, and the states at `runs.ends`: each row's last inputs [R, S, C].
    """
    taps, wide_TC = kernel_CK.shape[1], x_TC.astype(jnp.float32)
    kernel_K1C, last = kernel_CK.astype(jnp.float32).T[:, None], state_RSC.shape[1]
    y_TC = wide_TC * kernel_K1C[-1]
    for back in range(1, taps):
        earlier_TC = jnp.roll(wide_TC, back, axis=0)
        own_T1 = (runs.index_T >= back)[:, None]
        y_TC += jnp.where(own_T1, earlier_TC, 0.0) * kernel_K1C[-1 - back]
    # For the first tokens of a row, the kernel also covers inputs of the state.
    state = state_RSC.astype(jnp.float32)
    tokens = x_TC.shape[0]
    for ahead in range(last):
        seen_RC = sum(
            state[:, last + ahead - back] * kernel_K1C[-1 - back] for back in range(ahead + 1, taps)
        )
        at_R = jnp.where(ahead < runs.count_R, runs.first_R + ahead, tokens)
        y_TC = y_TC.at[at_R].add(seen_RC, mode="drop")
    if bias_C is not None:
        y_TC += bias_C.astype(jnp.float32)[None]
    new = [_last_inputs(x_TC, state_RSC, runs.first_R, end_R) for end_R in runs.ends]
    return y_TC.astype(x_TC.dtype), jnp.concatenate(new)


def _last_inputs(
    x_TC: jax.Array, state_RSC: jax.Array, first_R: jax.Array, end_R: jax.Array
) -> jax.Array:
    last = state_RSC.shape[1]
    index_RS = end_R[:, None] - last + jnp.arange(last, dtype=jnp.int32)[None, :]
    fresh_RSC = jnp.take(x_TC, first_R[:, None] + index_RS, axis=0, mode="clip")
    kept_RSC = jnp.take_along_axis(
        state_RSC, jnp.clip(index_RS + last, 0, last - 1)[:, :, None], axis=1
    )
    return jnp.where((index_RS >= 0)[:, :, None], fresh_RSC.astype(kept_RSC.dtype), kept_RSC)


def convolve_step(
    x_BC: jax.Array, kernel_CK: jax.Array, state_BSC: jax.Array, bias_C: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Convolves one new token of each sequence. Returns y [B, C] and the next state [B, S, C]."""
    seen_BKC = jnp.concatenate([state_BSC, x_BC[:, None].astype(state_BSC.dtype)], axis=1)
    kernel_KC = kernel_CK.astype(jnp.float32).T
    y_BC = jnp.sum(seen_BKC.astype(jnp.float32) * kernel_KC[None], axis=1)
    if bias_C is not None:
        y_BC += bias_C.astype(jnp.float32)[None]
    return y_BC.astype(x_BC.dtype), seen_BKC[:, 1:]
