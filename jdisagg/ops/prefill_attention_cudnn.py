"""Prefill attention by cuDNN's flash attention, on GPU in bfloat16 or float16: a chunk of one
sequence or a packed one, with or without past and window.

cuDNN's causal mask is top-left: query i attends to keys up to i, which is wrong for a chunk after
cached tokens. A chunk with earlier tokens in pages (a "past") therefore takes two calls, *past*
(not causal, keys up to their length) and *self* (as many keys as queries, causal), merged by their
log-sum-exp. JAX's public function rounds the log-sum-exp to the output's dtype, which in bfloat16
changes the weights by some percent, so a private function is called that keeps float32.

For float32 and for heads larger than 128 (256 on Hopper), `applies` returns False and the XLA form
is used."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.ops.grouped_products_gpu import is_hopper
from jdisagg.ops.kv_pages import PastPages, as_read, gather_columns
from jdisagg.ops.optional_kernels import CUDNN_ATTENTION, usable

LARGEST_HEAD, LARGEST_HEAD_ON_HOPPER = 128, 256
Implementation = Literal["cudnn", "xla"]


def applies(q_TNH: jax.Array, *, platform: str, device_kind: str = "") -> bool:
    width = q_TNH.shape[-1]
    largest = LARGEST_HEAD_ON_HOPPER if is_hopper(device_kind) else LARGEST_HEAD
    half = q_TNH.dtype in (jnp.bfloat16, jnp.float16)
    platform_fits = traits_of(platform).kernels == "gpu" and usable(CUDNN_ATTENTION)
    return platform_fits and half and width % 8 == 0 and width <= largest


def attend(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    segment_T: jax.Array,
    past: PastPages | None,
    *,
    scale: float,
    window: int | None,
    packed: bool,
    rows: int,
    sinks_N: jax.Array | None = None,
    implementation: Implementation = "cudnn",
) -> jax.Array:
    """Computes the attention of a chunk like `ops.prefill_attention.prefill_attention`, except that
    the output for padding is undefined. `rows` is the largest number of segments (sequences in the
    chunk). Only segment 0, which comes first, may have earlier tokens in pages."""
    how = {"scale": scale, "window": window, "implementation": implementation}
    first = jnp.sum(segment_T == 0, dtype=jnp.int32)
    if not packed:
        return one_sequence(q_TNH, k_TKH, v_TKH, first, past, sinks_N, **how)
    o_TNH = _segments(q_TNH, k_TKH, v_TKH, segment_T, rows, sinks_N, **how)
    if past is None:
        return o_TNH
    begun = past.count > 0
    tokens = jnp.where(begun, first, 0)
    begun_TNH = one_sequence(q_TNH, k_TKH, v_TKH, tokens, past, sinks_N, **how)
    return jnp.where(((segment_T == 0) & begun)[:, None, None], begun_TNH, o_TNH)


def one_sequence(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    tokens: jax.Array,
    past: PastPages | None,
    sinks_N: jax.Array | None = None,
    *,
    scale: float,
    window: int | None,
    implementation: Implementation = "cudnn",
) -> jax.Array:
    """Computes the attention of the first `tokens` rows of the chunk. Other rows are undefined.
    Without a window all pages in the table of `past` are gathered, so the table should not be wider
    than needed."""
    partial = _cudnn if implementation == "cudnn" else _xla
    if past is None and sinks_N is not None:
        o_TNH, seen_TN1 = partial(
            q_TNH, k_TKH, v_TKH, tokens, tokens, scale=scale, causal=True, window=window
        )
        return _beside_sinks(o_TNH, seen_TN1, sinks_N)
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
    assert past.v_pages_PKSH is not None, "latents have a form of their own"
    length = jnp.where(past.count > 0, past.lengths_R[0], 0)
    if window is not None:
        return _within_window(
            q_TNH, k_TKH, v_TKH, tokens, past, length, scale, window, sinks_N, implementation
        )
    k_LKH, v_LKH = (
        as_read(
            gather_columns(
                pages, jnp.clip(past.table_RN[:1], 0, pages.shape[0] - 1), 0, past.table_RN.shape[1]
            )[0],
            q_TNH.dtype,
        ).swapaxes(0, 1)
        for pages in (past.k_pages_PKSH, past.v_pages_PKSH)
    )
    old_TNH, old_TN1 = partial(q_TNH, k_LKH, v_LKH, tokens, length, scale=scale, causal=False)
    new_TNH, new_TN1 = partial(q_TNH, k_TKH, v_TKH, tokens, tokens, scale=scale, causal=True)
    old_TN1 = jnp.where(length > 0, old_TN1, -jnp.inf)
    top_TN1 = jnp.maximum(old_TN1, new_TN1)
    sinks_1N1 = None if sinks_N is None else sinks_N.astype(jnp.float32)[None, :, None]
    if sinks_1N1 is not None:
        top_TN1 = jnp.maximum(top_TN1, sinks_1N1)
    old_weight, new_weight = jnp.exp(old_TN1 - top_TN1), jnp.exp(new_TN1 - top_TN1)
    total = old_weight + new_weight
    if sinks_1N1 is not None:
        total = total + jnp.exp(sinks_1N1 - top_TN1)
    # For an empty past, cuDNN may have returned NaN.
    old = jnp.where(old_weight > 0, old_weight * old_TNH.astype(jnp.float32), 0.0)
    return ((old + new_weight * new_TNH.astype(jnp.float32)) / total).astype(q_TNH.dtype)


def _within_window(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    tokens: jax.Array,
    past: PastPages,
    length: jax.Array,
    scale: float,
    window: int,
    sinks_N: jax.Array | None,
    implementation: Implementation,
) -> jax.Array:
    assert past.v_pages_PKSH is not None, "latents have a form of their own"
    pages, _, slots, _ = past.k_pages_PKSH.shape
    reach = min(-(-(window - 1) // slots), past.table_RN.shape[1]) * slots
    if reach == 0:
        return one_sequence(
            q_TNH, k_TKH, v_TKH, tokens, None, sinks_N, scale=scale, window=window,
            implementation=implementation,
        )  # fmt: skip
    kept = jnp.minimum(length, reach)
    position_W = jnp.maximum(length - reach + jnp.arange(reach, dtype=jnp.int32), 0)
    page_W = jnp.clip(jnp.take(past.table_RN[0], position_W // slots, mode="clip"), 0, pages - 1)

    def behind(tail_WKH: jax.Array, chunk: jax.Array) -> jax.Array:
        room = jnp.zeros((reach, *chunk.shape[1:]), chunk.dtype)
        whole = jnp.concatenate((tail_WKH, chunk, room))
        return lax.dynamic_slice_in_dim(whole, reach - kept, reach + chunk.shape[0])

    old_k, old_v = (
        as_read(part.at[page_W, :, position_W % slots].get(mode="promise_in_bounds"), q_TNH.dtype)
        for part in (past.k_pages_PKSH, past.v_pages_PKSH)
    )
    q_UNH = behind(jnp.zeros((reach, *q_TNH.shape[1:]), q_TNH.dtype), q_TNH)
    o_UNH = one_sequence(
        q_UNH, behind(old_k, k_TKH), behind(old_v, v_TKH),
        jnp.where(tokens > 0, kept + tokens, 0), None, sinks_N,
        scale=scale, window=window, implementation=implementation,
    )  # fmt: skip
    return lax.dynamic_slice_in_dim(o_UNH, kept, q_TNH.shape[0])


def _beside_sinks(o_TNH: jax.Array, seen_TN1: jax.Array, sinks_N: jax.Array) -> jax.Array:
    left_TN1 = jax.nn.sigmoid(seen_TN1 - sinks_N.astype(jnp.float32)[None, :, None])
    return (left_TN1 * o_TNH.astype(jnp.float32)).astype(o_TNH.dtype)


def _segments(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    segment_T: jax.Array,
    rows: int,
    sinks_N: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    implementation: Implementation,
) -> jax.Array:
    if implementation == "xla":
        at_T = jnp.arange(segment_T.shape[0], dtype=jnp.int32)
        seen_TS = (segment_T[:, None] == segment_T[None, :]) & (at_T[None, :] <= at_T[:, None])
        if window is not None:
            seen_TS &= at_T[None, :] > at_T[:, None] - window
        o_1TNH, lse_1TN = jax.nn.dot_product_attention(
            q_TNH[None], k_TKH[None], v_TKH[None], scale=scale, mask=seen_TS[None, None],
            implementation="xla", return_residual=True,
        )  # fmt: skip
        if sinks_N is None:
            return o_1TNH[0]
        return _beside_sinks(o_1TNH[0], lse_1TN[0].astype(jnp.float32)[:, :, None], sinks_N)
    # A private function of JAX, because the public one does not support segments.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    here_TR = segment_T[:, None] == jnp.arange(rows, dtype=segment_T.dtype)[None, :]
    length_R = jnp.sum(here_TR, axis=0, dtype=jnp.int32)
    none = jnp.full((1,), -1, jnp.int32)
    offset_R = jnp.where(length_R > 0, jnp.argmax(here_TR, axis=0).astype(jnp.int32), -1)
    lengths = jnp.where(length_R > 0, length_R, -1)[None]
    offsets = jnp.concatenate((offset_R, none))[None]
    outputs = dot_product_attention(
        q_TNH[None],
        k_TKH[None],
        v_TKH[None],
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
        return_residual=sinks_N is not None,
    )
    if sinks_N is None:
        return outputs[0]  # pyright: ignore[reportIndexIssue]  # it is typed `object`
    o_1TNH, lse_RNT = outputs[0], outputs[1]  # pyright: ignore[reportIndexIssue]
    return _beside_sinks(o_1TNH[0], of_packed(lse_RNT, segment_T, offset_R), sinks_N)


def of_packed(sums_RNT: jax.Array, segment_T: jax.Array, first_R: jax.Array) -> jax.Array:
    row_T = jnp.clip(segment_T, 0, sums_RNT.shape[0] - 1)
    place_T = jnp.maximum(jnp.arange(segment_T.shape[0], dtype=jnp.int32) - first_R[row_T], 0)
    return sums_RNT[row_T, :, place_T].astype(jnp.float32)[:, :, None]


def _cudnn(
    q_TNH: jax.Array,
    k_SKH: jax.Array,
    v_SKH: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    # A private function of JAX, because the public one rounds the log-sum-exp.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    outputs = dot_product_attention(
        q_TNH[None],
        k_SKH[None],
        v_SKH[None],
        q_seqlen=tokens[None],
        kv_seqlen=length[None],
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL if causal else MaskType.PADDING,
        sliding_window_length=window,
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
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    o_1TNH, lse_1TN = jax.nn.dot_product_attention(
        q_TNH[None],
        k_SKH[None],
        v_SKH[None],
        scale=scale,
        is_causal=causal,
        query_seq_lengths=tokens[None],
        key_value_seq_lengths=length[None],
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla",
        return_residual=True,
    )
    return o_1TNH[0], lse_1TN[0].astype(jnp.float32)[:, :, None]
