"""Prefill attention of a chunk of ONE sequence by cuDNN's flash attention, on GPU in bfloat16 or
float16.

cuDNN's causal mask is top-left: query i sees keys up to i, which is wrong for a chunk that follows
cached tokens. So a chunk with a past takes two calls, *past* (no causality, keys up to their
length) and *self* (as many keys as queries, causal), merged by their log-sum-exp. The public
function rounds that residual to the output's dtype, which at bfloat16 shifts the weights by some
percent; so the function below it is called, which keeps float32.

Does not know packed chunks or a window together with a past: `applies` says no, and the caller
takes the XLA form. The same recipe runs on any platform with `implementation="xla"`, which is how
it is tested without a GPU."""

from typing import Literal

import jax
import jax.numpy as jnp

from jdisagg.ops.kv_pages import PastPages, gather_columns

LARGEST_HEAD = 128


def applies(q_TNH: jax.Array, *, platform: str, window: int | None, has_past: bool) -> bool:
    width = q_TNH.shape[-1]
    fits = q_TNH.dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= LARGEST_HEAD
    return platform == "gpu" and fits and not (window is not None and has_past)


def one_sequence(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    tokens: jax.Array,
    past: PastPages | None,
    *,
    scale: float,
    window: int | None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Attention of the first `tokens` rows of the chunk; the other rows are undefined. The whole
    page table of the past is gathered, so give it no wider than the context's bucket."""
    if past is None:
        return jax.nn.dot_product_attention(
            q_TNH[None],
            k_TKH[None],
            v_TKH[None],
            scale=scale,
            is_causal=True,
            query_seq_lengths=tokens[None],
            key_value_seq_lengths=tokens[None],
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation,
        )[0]
    length = jnp.where(past.count > 0, past.lengths_R[0], 0)
    k_LKH, v_LKH = (
        gather_columns(
            pages, jnp.clip(past.table_RN[:1], 0, pages.shape[0] - 1), 0, past.table_RN.shape[1]
        )[0].swapaxes(0, 1)
        for pages in (past.k_pages_PKSH, past.v_pages_PKSH)
    )
    partial = _cudnn if implementation == "cudnn" else _xla
    old_TNH, old_TN1 = partial(q_TNH, k_LKH, v_LKH, tokens, length, scale=scale, causal=False)
    new_TNH, new_TN1 = partial(q_TNH, k_TKH, v_TKH, tokens, tokens, scale=scale, causal=True)
    old_TN1 = jnp.where(length > 0, old_TN1, -jnp.inf)
    top_TN1 = jnp.maximum(old_TN1, new_TN1)
    old_weight, new_weight = jnp.exp(old_TN1 - top_TN1), jnp.exp(new_TN1 - top_TN1)
    # an empty past may have given NaN
    old = jnp.where(old_weight > 0, old_weight * old_TNH.astype(jnp.float32), 0.0)
    return ((old + new_weight * new_TNH.astype(jnp.float32)) / (old_weight + new_weight)).astype(
        q_TNH.dtype
    )


def _cudnn(
    q_TNH: jax.Array,
    k_SKH: jax.Array,
    v_SKH: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Partial attention and its log-sum-exp in float32: [T, N, H], [T, N, 1]."""
    # private: the public one rounds the residual
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    outputs = dot_product_attention(
        q_TNH[None],
        k_SKH[None],
        v_SKH[None],
        q_seqlen=tokens[None],
        kv_seqlen=length[None],
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL if causal else MaskType.PADDING,
        return_residual=True,
    )
    o_1TNH, lse_1NT = outputs[0], outputs[1]  # pyright: ignore[reportIndexIssue]  # the private function is typed `object`
    return o_1TNH[0], lse_1NT[0].astype(jnp.float32).T[:, :, None]


def _xla(
    q_TNH: jax.Array,
    k_SKH: jax.Array,
    v_SKH: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    o_1TNH, lse_1TN = jax.nn.dot_product_attention(
        q_TNH[None],
        k_SKH[None],
        v_SKH[None],
        scale=scale,
        is_causal=causal,
        query_seq_lengths=tokens[None],
        key_value_seq_lengths=length[None],
        implementation="xla",
        return_residual=True,
    )
    return o_1TNH[0], lse_1TN[0].astype(jnp.float32)[:, :, None]
