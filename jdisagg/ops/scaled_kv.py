"""Attention over keys and values that are stored divided by one scale per kv head.

Keys / s and values / t are stored, because fp8 (e4m3) has no values beyond 448. Attention receives
queries * s, and its mix of values is multiplied by t.

Scales are powers of two (`models/kv_scales.py`). Multiplication by one is exact in bfloat16 and
float32 and commutes with products and sums, so only the rounding to e4m3 differs."""

from typing import Unpack

import jax
import jax.numpy as jnp

from jdisagg.model_api import Attend, AttendOptions


def scaled_attend(attend: Attend, k_scale_K: jax.Array, v_scale_K: jax.Array) -> Attend:
    """Wraps an attention function so that it stores keys and values divided by their scales. For
    latent attention, which caches one vector without heads, both scales are the same array [1]."""

    def scaled(
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        **how: Unpack[AttendOptions],
    ) -> jax.Array:
        group = q_TNH.shape[1] // k_scale_K.shape[0]
        o_TNH = attend(
            q_TNH * _each(k_scale_K, group),
            None if k_TKH is None else k_TKH / _each(k_scale_K),
            None if v_TKH is None else v_TKH / _each(v_scale_K),
            **how,
        )
        return o_TNH * _each(v_scale_K, group)

    return scaled


def _each(scale_K: jax.Array, group: int = 1) -> jax.Array:
    return jnp.repeat(scale_K, group)[None, :, None]
