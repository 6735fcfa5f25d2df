"""A sequence of 37 tokens that lies in pages: decoded, or computed in a chunk after a part of it;
and attention to given positions in float64, head by head and token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.model_api import Index, Latent
from jdisagg.ops.kv_pages import PastPages
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import prefill_attention

TOKENS, CHUNK, SLOTS, SCALE = 37, 48, 8, 0.3
TABLE = np.array([[4, 2, 6, 1, 3]], np.int32)
RANK, TURNED, NOPE, VALUE = 10, 4, 6, 5
CAUSAL = np.tri(TOKENS, dtype=bool)


def drawn(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def latents(seed: int = 0, heads: int = 3) -> tuple[np.ndarray, np.ndarray, Latent]:
    """Returns queries [T, N, nope + turned], cached vectors [T, 1, rank + turned], and the
    matrices."""
    random = np.random.default_rng(seed)
    keys, values = drawn(random, heads, RANK, NOPE) / 2, drawn(random, heads, RANK, VALUE) / 2
    q_TNH, cached_T1H = (
        drawn(random, TOKENS, heads, NOPE + TURNED),
        drawn(random, TOKENS, 1, RANK + TURNED),
    )
    return q_TNH, cached_T1H, Latent(keys, values)  # type: ignore[arg-type]


def attended(
    q_TNH: np.ndarray, k_TNH: np.ndarray, v_TNH: np.ndarray, seen_NTS: np.ndarray
) -> np.ndarray:
    """Of keys and values of each query head. A token that sees nothing gets zeros."""
    out = np.zeros((*q_TNH.shape[:2], v_TNH.shape[2]))
    for head, token in np.ndindex(q_TNH.shape[1], TOKENS):
        if (seen := seen_NTS[head, token]).any():
            scores = k_TNH[seen, head].astype(np.float64) @ q_TNH[token, head] * SCALE
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ v_TNH[seen, head]
    return out


def attended_latents(
    q_TNH: np.ndarray, cached_T1H: np.ndarray, latent: Latent, seen_TS: np.ndarray
) -> np.ndarray:
    inner, turned = cached_T1H[:, :1, :RANK].astype(np.float64), cached_T1H[:, 0, RANK:]
    keys, values = (np.einsum("tnr,nrh->tnh", np.repeat(inner, len(m), 1), m) for m in latent)
    turned_TNH = np.broadcast_to(turned[:, None], (*keys.shape[:2], TURNED))
    keys = np.concatenate((keys, turned_TNH), axis=2)
    return attended(q_TNH, keys, values, np.broadcast_to(seen_TS, (len(latent[0]), TOKENS, TOKENS)))


def in_pages(of_TKH: Any) -> jax.Array:
    pages = np.zeros((8, of_TKH.shape[1], SLOTS, of_TKH.shape[2]), np.float32)
    for token in range(TOKENS):
        pages[TABLE[0, token // SLOTS], :, token % SLOTS] = of_TKH[token]
    return jnp.asarray(pages)


def _arrays(index: Index | None) -> dict[str, np.ndarray]:
    names = () if index is None else ("queries_THD", "keys_T1D", "weights_TH")
    return {name: each for name in names if (each := getattr(index, name)) is not None}


def decoded(
    q_TNH: np.ndarray,
    k_TKH: np.ndarray,
    v_TKH: np.ndarray | None,
    positions: np.ndarray,
    index: Index | None = None,
    **how: Any,
) -> jax.Array:
    """Rows at `positions` [B], or [B, Q] for several tokens of each."""
    rows = positions.reshape(-1)
    of_rows = None if index is None else index.of_queries(lambda of_T: of_T[rows])

    def attend(q: jax.Array, k: jax.Array, v: Any, keys: Any, of_index: dict) -> jax.Array:
        if index is not None:
            how.update(index=index._replace(**of_index), index_pages_PKSH=keys)
        table = jnp.asarray(np.repeat(TABLE, len(positions), axis=0))
        at = jnp.asarray(positions.astype(np.int32))
        return paged_attention(q, k, v, table, at, scale=SCALE, **how)

    kept = [k_TKH, v_TKH, None if index is None else index.keys_T1D]
    pages = [None if part is None else in_pages(part) for part in kept]
    return jax.jit(attend)(q_TNH[rows], *pages, _arrays(of_rows))


def in_a_chunk(
    q_TNH: np.ndarray,
    k_TKH: np.ndarray,
    v_TKH: np.ndarray | None,
    past: int,
    index: Index | None = None,
    **how: Any,
) -> np.ndarray:
    """The tokens from `past` on, in a chunk that ends in padding. Returns all of its outputs."""

    def padded(x: np.ndarray) -> np.ndarray:
        return np.pad(x[past:], ((0, CHUNK - TOKENS + past), *[(0, 0)] * (x.ndim - 1)))

    at = np.arange(CHUNK, dtype=np.int32)
    cached = PastPages(
        in_pages(k_TKH),
        None if v_TKH is None else in_pages(v_TKH),
        jnp.asarray(TABLE),
        jnp.full((1,), past, jnp.int32),
        jnp.int32(past > 0),
        None if index is None else in_pages(index.keys_T1D),
    )

    def attend(q: jax.Array, k: jax.Array, v: jax.Array | None, of_index: dict) -> jax.Array:
        return prefill_attention(
            *(q, k, v),
            jnp.asarray(np.where(at < TOKENS - past, 0, -1).astype(np.int32)),
            jnp.asarray(at + past),
            cached if past else None,
            scale=SCALE,
            index=None if index is None else index._replace(**of_index),
            packed=False,
            rows=1,
            query_block=16,
            **how,
        )

    given = [None if part is None else padded(part) for part in (q_TNH, k_TKH, v_TKH)]
    found = jax.jit(attend)(*given, {name: padded(each) for name, each in _arrays(index).items()})
    return np.asarray(found)


def packed(
    q_TNH: np.ndarray,
    k_TKH: np.ndarray,
    v_TKH: np.ndarray | None,
    cut: int,
    positions: np.ndarray,
    index: Index | None = None,
    **how: Any,
) -> jax.Array:
    """All tokens in one chunk as two sequences, the second from `cut` on."""
    segment_T = np.where(np.arange(TOKENS) < cut, 0, 1).astype(np.int32)

    def attend(q: jax.Array, k: jax.Array, v: Any, of_index: dict) -> jax.Array:
        if index is not None:
            how["index"] = index._replace(**of_index)
        at = jnp.asarray(positions.astype(np.int32))
        return prefill_attention(q, k, v, jnp.asarray(segment_T), at, scale=SCALE, **how)

    return jax.jit(attend)(q_TNH, k_TKH, v_TKH, _arrays(index))
