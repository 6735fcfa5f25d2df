"""Attention over keys and values that are kept divided by a scale of each kv head.

A narrow type has few magnitudes: e4m3 none beyond 448, and below 2^-6 fewer and fewer bits. So what
is kept are keys / s and values / t; attention is given queries * s, and what it mixes of values is
multiplied with t. q * s . k / s = q . k, so that scale, cap, window and sinks of the scores are
what they were.

Scales are powers of two (`models/kv_scales.py`). Multiplying with one is exact in bfloat16 and
float32, and passes through products and sums unchanged: nothing but what is rounded to e4m3
differs."""

import jax
import jax.numpy as jnp

from jdisagg.model_api import Attend


def scaled_attend(attend: Attend, k_scale_K: jax.Array, v_scale_K: jax.Array) -> Attend:
    """The attention of a layer that keeps its keys and values so scaled; of one with latents, which
    have no heads, [1] twice the same."""

    def scaled(
        q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array | None, **how: object
    ) -> jax.Array:
        group = q_TNH.shape[1] // k_TKH.shape[1]
        o_TNH = attend(
            q_TNH * _each(k_scale_K, group),
            k_TKH / _each(k_scale_K),
            None if v_TKH is None else v_TKH / _each(v_scale_K),
            **how,  # type: ignore[arg-type]  # as `Attend` has them
        )
        return o_TNH * _each(v_scale_K, group)

    return scaled


def _each(scale_K: jax.Array, group: int = 1) -> jax.Array:
    """[1, heads, 1], each once for every query head of its group."""
    return jnp.repeat(scale_K, group)[None, :, None]
