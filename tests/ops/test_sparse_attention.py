"""Attention to the positions that an indexer selects, over pages and over chunks, against scores, a
sorted selection and a softmax from NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model_api import Index
from jdisagg.ops import prefill_attention as ops_prefill
from jdisagg.ops import sparse_attention
from jdisagg.ops.kv_pages import PastPages
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import prefill_attention
from jdisagg.ops.quarantine import MARKER, SHOWS, seal
from jdisagg.ops.sparse_attention import select
from tests.ops.test_latent_attention import RANK, SCALE, SLOTS, TABLE, TOKENS, in_pages, made

pytestmark = pytest.mark.one_device

TOP, INDEX_HEADS, INDEX_DIM = 7, 16, 6


def indexed(seed: int = 0) -> Index:
    random = np.random.default_rng(seed + 100)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    queries, keys = draw(TOKENS, INDEX_HEADS, INDEX_DIM), draw(TOKENS, 1, INDEX_DIM)
    return Index(queries, keys, draw(TOKENS, INDEX_HEADS), TOP)  # type: ignore[arg-type]


def chosen_by_sorting(index: Index, first: int = 0) -> np.ndarray:
    """The positions that each token attends to, of a sequence that starts at token `first`: bool
    [T, T]. In float64, by a stable sort."""
    q, k, w = (np.asarray(part, np.float64) for part in index[:3])
    products = np.maximum(np.einsum("thd,sd->ths", q, k[:, 0]), 0)
    scores = np.einsum("ths,th->ts", products, w)
    chosen = np.zeros((TOKENS, TOKENS), bool)
    for token in range(first, TOKENS):
        best = np.argsort(-scores[token, first : token + 1], kind="stable")[: index.top]
        chosen[token, first + best] = True
    return chosen


def in_words(q_TNH, cached_T1H, latent, chosen_TS: np.ndarray) -> np.ndarray:
    """Head by head and token by token, in float64: [T, N, value]."""
    keys_NRH, values_NRH = (np.asarray(part, np.float64) for part in latent)
    inner, turned = cached_T1H[:, 0, :RANK].astype(np.float64), cached_T1H[:, 0, RANK:]
    out = np.zeros((TOKENS, q_TNH.shape[1], values_NRH.shape[2]))
    for head in range(q_TNH.shape[1]):
        keys, values = np.concatenate((inner @ keys_NRH[head], turned), 1), inner @ values_NRH[head]
        for token in range(TOKENS):
            if not (seen := chosen_TS[token]).any():
                continue
            scores = keys[seen] @ q_TNH[token, head] * SCALE
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ values[seen]
    return out


def index_pages(index: Index) -> jax.Array:
    pages = np.zeros((8, 1, SLOTS, INDEX_DIM), np.float32)
    for token in range(TOKENS):
        pages[TABLE[0, token // SLOTS], 0, token % SLOTS] = index.keys_T1D[token, 0]
    return jnp.asarray(pages)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_largest_are_selected_and_of_equal_ones_the_first(at_once: bool) -> None:
    random = np.random.default_rng(3)
    scores = random.integers(-2, 3, (40, 50)).astype(np.float32)
    scores[:, 20] = -0.0
    scores[np.arange(50)[None, :] > random.integers(0, 50, 40)[:, None]] = -np.inf
    got = np.asarray(jax.jit(lambda x: select(x, TOP, at_once=at_once))(scores))
    for row, found in zip(scores, got, strict=True):
        best = np.argsort(-row, kind="stable")[:TOP]
        assert set(np.flatnonzero(found)) == {at for at in best if row[at] > -np.inf}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_decode_step_attends_to_what_is_selected(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's form: without a loop, in steps."""
    monkeypatch.setattr(sparse_attention, "UNROLLED_POSITIONS", 2 * SLOTS)
    monkeypatch.setattr(sparse_attention, "PAST_POSITIONS", 2 * SLOTS)
    (q_TNH, cached_T1H, latent), index = made(), indexed()
    want_TNV = in_words(q_TNH, cached_T1H, latent, chosen_by_sorting(index))
    runs = np.array([[0, 1], [6, 7], [35, 36]], np.int32)  # two tokens of each of three rows
    rows = runs.reshape(-1)
    of_rows = index._replace(queries_THD=index.queries_THD[rows], weights_TH=index.weights_TH[rows])
    got_TNV = paged_attention(
        jnp.asarray(q_TNH[rows]),
        in_pages(cached_T1H),
        None,
        jnp.asarray(np.repeat(TABLE, 3, axis=0)),
        jnp.asarray(runs),
        scale=SCALE,
        latent=latent,
        index=of_rows,
        index_pages_PKSH=index_pages(index),
        platform=platform,
    )
    np.testing.assert_allclose(got_TNV, want_TNV[rows], atol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("past", [0, 5, 16, 21])
def test_a_chunk_attends_to_what_is_selected_among_its_own_and_earlier_tokens(
    past: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ops_prefill, sparse_attention):
        monkeypatch.setattr(module, "UNROLLED_POSITIONS", 2 * SLOTS)
    monkeypatch.setattr(sparse_attention, "KEYS_AT_ONCE", 20)
    (q_TNH, cached_T1H, latent), index = made(past), indexed(past)
    chunk, count = 48, TOKENS - past
    pad = lambda x: np.concatenate((x[past:], np.zeros((chunk - count, *x.shape[1:]), x.dtype)))  # noqa: E731
    segment_T = np.where(np.arange(chunk) < count, 0, -1).astype(np.int32)
    cached = PastPages(
        in_pages(cached_T1H),
        None,
        jnp.asarray(TABLE),
        jnp.full((1,), past, jnp.int32),
        jnp.int32(past > 0),
        index_pages(index),
    )
    got_TNV = jax.jit(
        lambda q, k, *of_index: prefill_attention(
            q,
            k,
            None,
            jnp.asarray(segment_T),
            jnp.arange(chunk, dtype=jnp.int32) + past,
            cached if past else None,
            scale=SCALE,
            latent=latent,
            index=Index(*of_index, TOP),  # pyright: ignore
            platform=platform,
            packed=False,
            rows=1,
            query_block=16,
        )
    )(pad(q_TNH), pad(cached_T1H), *map(pad, index[:3]))
    expected = in_words(q_TNH, cached_T1H, latent, chosen_by_sorting(index))[past:]
    np.testing.assert_allclose(got_TNV[:count], expected, atol=2e-5)


def test_sequences_of_one_chunk_select_among_their_own_tokens() -> None:
    (q_TNH, cached_T1H, latent), index, cut = made(), indexed(), 15
    chosen_TS = chosen_by_sorting(index)
    chosen_TS[cut:] = chosen_by_sorting(index, cut)[cut:]
    got_TNV = prefill_attention(
        jnp.asarray(q_TNH),
        jnp.asarray(cached_T1H),
        None,
        jnp.asarray(np.where(np.arange(TOKENS) < cut, 0, 1).astype(np.int32)),
        jnp.arange(TOKENS, dtype=jnp.int32),
        scale=SCALE,
        latent=latent,
        index=Index(*map(jnp.asarray, index[:3]), TOP),  # pyright: ignore
    )
    want_TNV = in_words(q_TNH, cached_T1H, latent, chosen_TS)
    np.testing.assert_allclose(got_TNV, want_TNV, atol=2e-5)


def test_a_broken_token_is_selected_by_all_that_come_after_it() -> None:
    (q_TNH, cached_T1H, latent), index = made(), indexed()
    cached_T1H[3, 0, 2] = np.nan
    parts = seal(jnp.asarray(cached_T1H), None, Index(*map(jnp.asarray, index[:3]), TOP))  # pyright: ignore
    sealed_T1H, keys_T1D = (np.asarray(part) for part in parts)
    assert (keys_T1D[3] == np.float32(MARKER)).all()
    positions = np.array([2, 3, 30, 36], np.int32)
    got_TNV = paged_attention(
        jnp.asarray(q_TNH[positions]),
        in_pages(sealed_T1H),
        None,
        jnp.asarray(np.repeat(TABLE, 4, axis=0)),
        jnp.asarray(positions),
        scale=SCALE,
        latent=latent,
        index=Index(index.queries_THD[positions], index.keys_T1D, index.weights_TH[positions], TOP),
        index_pages_PKSH=index_pages(index._replace(keys_T1D=keys_T1D)),  # type: ignore[arg-type]
    )
    largest = np.abs(np.asarray(got_TNV)).max(axis=(1, 2))
    assert largest[0] < 100
    assert (largest[1:] > SHOWS).all()
