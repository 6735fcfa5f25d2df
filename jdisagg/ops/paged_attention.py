"""Decode attention over KV pages, for one new token per sequence. The new token's own k and v must
already be in the pages.

`paged_attention` is the op, and `platform` chooses the implementation:
- `loop`: a `fori_loop` over page columns with online softmax. The trip count is traced (the longest
  sequence), so there are no context buckets, and a block of pages stays in cache. The CPU's choice,
  and correct everywhere.
- `gather`: gathers the whole padded table and computes one softmax. Used on a GPU where the
  `pallas` kernel does not apply, because the host would have to drive a loop. Its cost grows with
  the table's width.
- `pallas`: a split-K kernel (`paged_attention_pallas`), the GPU's choice.

For latent attention (`ops/latent_attention.py`) the pages hold one vector per token, and the
absorbed form is used.

The op works on local shards, without meshes or page ownership. Table entries beyond a sequence's
length may hold anything: they are clipped into range and masked. No row ever gives NaN."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.model_api import Latent
from jdisagg.ops import latent_attention_pallas, paged_attention_pallas
from jdisagg.ops.kv_pages import as_read, gather_columns, gather_span, span_rows
from jdisagg.ops.latent_attention import absorb, release
from jdisagg.ops.online_softmax import (
    MASKED,
    Softmax,
    capped,
    empty,
    finish,
    first,
    fold,
    grouped_sinks,
)
from jdisagg.ops.quarantine import seen_scores

Implementation = Literal["loop", "gather", "pallas"]

LONG_STEP, SHORT_STEP = 256, 128  # positions
# Bytes of a long step's keys. Beyond this they leave the CPU's caches before use.
STEP_BYTES = 4 << 20
PARTS_PER_STEP = 4


def paged_attention(
    q_BNH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array | None,
    table_BN: jax.Array,
    positions_B: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
    latent: Latent | None = None,
    platform: str = "cpu",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the attention of each sequence's new token b over positions 0..positions_B[b], or
    with `window` over the last `window` of these positions.

    Args:
        q_BNH: Local query heads, a multiple of the pages' kv heads.
        k_pages_PKSH, v_pages_PKSH: Pages of keys and of values. With `latent`, the first array
            holds the cached vectors with one kv head, and the second is None.
        table_BN, positions_B: int32.
        cap, sinks_N, latent: See `model_api.Attend`.

    Returns:
        o_BNH in q's dtype.
    """
    if latent is not None:
        assert not cap and sinks_N is None, "no family has both"
        rank = latent.keys_NRH.shape[1]
        q_BNH = absorb(q_BNH, latent)
        kernel = platform == "gpu" and latent_attention_pallas.applies(q_BNH, k_pages_PKSH, rank)
        usual = "pallas" if kernel else "gather" if platform == "gpu" else "loop"
        attend = {
            "loop": _loop,
            "gather": gather_attention,
            "pallas": latent_attention_pallas.latent_attention,
        }[implementation or usual]
        table_BN = jnp.clip(table_BN, 0, k_pages_PKSH.shape[0] - 1)
        mixed_BNR = attend(
            q_BNH, k_pages_PKSH, rank, table_BN, positions_B, scale=scale, window=window
        )
        return release(mixed_BNR, latent)
    assert v_pages_PKSH is not None
    implementation = implementation or _default(platform, q_BNH, k_pages_PKSH)
    table_BN = jnp.clip(table_BN, 0, k_pages_PKSH.shape[0] - 1)
    attend = {
        "loop": _loop,
        "gather": gather_attention,
        "pallas": paged_attention_pallas.paged_attention,
    }[implementation]
    return attend(
        q_BNH,
        k_pages_PKSH,
        v_pages_PKSH,
        table_BN,
        positions_B,
        scale=scale,
        window=window,
        cap=cap,
        sinks_N=sinks_N,
    )


def _default(platform: str, q_BNH: jax.Array, k_pages_PKSH: jax.Array) -> Implementation:
    if platform == "gpu":
        return "pallas" if paged_attention_pallas.applies(q_BNH, k_pages_PKSH) else "gather"
    return "loop"


def _loop(
    q_BNH: jax.Array,
    k_pages_PKSH: jax.Array,
    values: jax.Array | int,
    table_BN: jax.Array,
    positions_B: jax.Array,
    *,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes the attention in a loop over page columns. `values` is the array of value pages. For
    latent attention it is the number of leading elements of each key that serve as the value.

    Each step covers 256 or 128 positions or a page. The end of the longest sequence is processed in
    fractions of a step, so that a nearly empty last page is not read whole."""
    batch, query_heads, width = q_BNH.shape
    _, heads, slots, _ = k_pages_PKSH.shape
    positions = (
        LONG_STEP
        if batch * heads * LONG_STEP * width * k_pages_PKSH.dtype.itemsize <= STEP_BYTES
        else SHORT_STEP
    )
    columns = max(1, min(positions // slots, table_BN.shape[1]))
    step = columns * slots
    part = max(1, step // PARTS_PER_STEP)
    if step % part or (slots % part and part % slots):  # neither whole pages nor even parts of one
        part = step
    table_BN = jnp.pad(table_BN, ((0, 0), (0, -table_BN.shape[1] % columns)))
    q_BKGH = q_BNH.reshape(batch, heads, query_heads // heads, width)
    pools = [k_pages_PKSH, *([] if isinstance(values, int) else [values])]
    spans = {length: [span_rows(pages, length) for pages in pools] for length in (step, part)}
    mixed_width = values if isinstance(values, int) else values.shape[-1]

    def fold_span(length: int, index: jax.Array, state: Softmax) -> Softmax:
        k_BKSH, *others = (
            as_read(gather_span(span, table_BN, index), q_BNH.dtype) for span in spans[length]
        )
        v_BKSH = others[0] if others else k_BKSH[..., :mixed_width]
        seen_BS = _seen(index * length, length, positions_B, window)
        s_BKGS = _scores(q_BKGH, k_BKSH, seen_BS, scale, cap, marked=not others)
        return fold(state, s_BKGS, partial(_mix, v_BKSH=v_BKSH))

    capacity = table_BN.shape[1] * slots
    end = jnp.clip(jnp.max(positions_B) + 1, 1, capacity)
    begin = 0 if window is None else jnp.clip(jnp.min(positions_B) - window + 1, 0, end - 1)
    whole = end // step
    state = empty((*q_BKGH.shape[:3], mixed_width))
    state = lax.fori_loop(begin // step, whole, partial(fold_span, step), state)
    state = lax.fori_loop(
        jnp.maximum(whole * step, begin) // part, -(-end // part), partial(fold_span, part), state
    )
    mixed_BKGH = finish(state, _row_sinks(sinks_N, heads))
    return mixed_BKGH.astype(q_BNH.dtype).reshape(batch, query_heads, mixed_width)


def gather_attention(
    q_BNH: jax.Array,
    k_pages_PKSH: jax.Array,
    values: jax.Array | int,
    table_BN: jax.Array,
    positions_B: jax.Array,
    *,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    batch, query_heads, width = q_BNH.shape
    heads, columns = k_pages_PKSH.shape[1], table_BN.shape[1]
    q_BKGH = q_BNH.reshape(batch, heads, query_heads // heads, width)
    k_BKSH = as_read(gather_columns(k_pages_PKSH, table_BN, 0, columns), q_BNH.dtype)
    latent = isinstance(values, int)
    v_BKSH = (
        k_BKSH[..., :values]
        if latent
        else as_read(gather_columns(values, table_BN, 0, columns), q_BNH.dtype)
    )
    seen_BS = _seen(0, k_BKSH.shape[2], positions_B, window)
    s_BKGS = _scores(q_BKGH, k_BKSH, seen_BS, scale, cap, marked=latent)
    state = first(s_BKGS, partial(_mix, v_BKSH=v_BKSH))
    mixed_BKGH = finish(state, _row_sinks(sinks_N, heads))
    return mixed_BKGH.astype(q_BNH.dtype).reshape(batch, query_heads, v_BKSH.shape[-1])


def _scores(
    q_BKGH: jax.Array,
    k_BKSH: jax.Array,
    seen_BS: jax.Array,
    scale: float,
    cap: float,
    *,
    marked: bool,
) -> jax.Array:
    """Computes masked attention scores. `marked` means that keys may contain the marker by which
    `ops/quarantine.py` replaces non-finite values."""
    s_BKGS = (
        jnp.einsum("bkgh,bksh->bkgs", q_BKGH, k_BKSH, preferred_element_type=jnp.float32) * scale
    )
    if marked:
        s_BKGS = seen_scores(s_BKGS)
    return jnp.where(seen_BS[:, None, None, :], capped(s_BKGS, cap), MASKED)


def _row_sinks(sinks_N: jax.Array | None, heads: int) -> jax.Array | None:
    """Returns sinks [1, K, G, 1] for queries [B, K, G, H]."""
    sinks_KG11 = grouped_sinks(sinks_N, heads)
    return None if sinks_KG11 is None else sinks_KG11[None, ..., 0]


def _mix(p_BKGS: jax.Array, v_BKSH: jax.Array) -> jax.Array:
    return jnp.einsum(
        "bkgs,bksh->bkgh", p_BKGS.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
    )


def _seen(
    start: jax.Array | int, length: int, positions_B: jax.Array, window: int | None
) -> jax.Array:
    """Returns a mask, bool [B, length], of the positions start..start+length that each token
    attends to."""
    position_1S = (start + jnp.arange(length, dtype=jnp.int32))[None, :]
    seen_BS = position_1S <= positions_B[:, None]
    return seen_BS if window is None else seen_BS & (position_1S > positions_B[:, None] - window)
