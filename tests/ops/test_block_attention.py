"""Attention to the blocks of positions that an indexer selects, over pages and over chunks, against
scores, a sorted selection and a softmax from NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model_api import Index
from jdisagg.ops import prefill_attention as ops_prefill
from jdisagg.ops import sparse_attention
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.kv_pages import PastPages
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import prefill_attention
from jdisagg.ops.quarantine import MARKER, SHOWS, seal
from tests.lanes import first_quick

pytestmark = pytest.mark.one_device

TOKENS, HEADS, KV_HEADS, WIDTH, DIM, SLOTS, TOP, SCALE = 37, 4, 2, 6, 4, 8, 3, 0.4
TABLE = np.array([[4, 2, 6, 1, 3]], np.int32)
BLOCKS = [8, 4, 6, 16]  # a page, half a page, no multiple of a page, two pages


def made(
    block: int, local: int = 1, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Index]:
    """Returns queries [T, N, H], keys and values [T, K, H], and the indexer's inputs."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    kv = draw(2, TOKENS, KV_HEADS, WIDTH)
    index = Index(draw(TOKENS, KV_HEADS, DIM), draw(TOKENS, 1, DIM), None, TOP, block, local)  # type: ignore[arg-type]
    return draw(TOKENS, HEADS, WIDTH), kv[0], kv[1], index


def seen_by_sorting(index: Index, top: int, first: int = 0) -> np.ndarray:
    """The positions that each token attends to, for each kv head, of a sequence that starts at
    token `first`: bool [K, T, T]. In float64, by a stable sort."""
    q_TKD, keys_SD = (np.asarray(part, np.float64) for part in index[:2])
    seen = np.zeros((KV_HEADS, TOKENS, TOKENS), bool)
    for head in range(KV_HEADS):
        for token in range(first, TOKENS):
            scores = keys_SD[first : token + 1, 0] @ q_TKD[token, head]
            count = (token - first) // index.block + 1
            best = np.array(
                [scores[at * index.block : (at + 1) * index.block].max() for at in range(count)]
            )
            best[max(0, count - index.local) :] = np.inf
            for at in np.argsort(-best, kind="stable")[:top]:
                begin = first + at * index.block
                seen[head, token, begin : min(begin + index.block, token + 1)] = True
    return seen


def in_words(q_TNH, k_TKH, v_TKH, seen_KTS: np.ndarray) -> np.ndarray:
    """Head by head and token by token, in float64: [T, N, H]."""
    out = np.zeros(q_TNH.shape)
    for head in range(HEADS):
        of_kv = head // (HEADS // KV_HEADS)
        for token in range(TOKENS):
            if not (seen := seen_KTS[of_kv, token]).any():
                continue
            scores = k_TKH[seen, of_kv].astype(np.float64) @ q_TNH[token, head] * SCALE
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ v_TKH[seen, of_kv]
    return out


def in_pages(of_TKH: np.ndarray) -> jax.Array:
    pages = np.zeros((8, of_TKH.shape[1], SLOTS, of_TKH.shape[2]), np.float32)
    for token in range(TOKENS):
        pages[TABLE[0, token // SLOTS], :, token % SLOTS] = of_TKH[token]
    return jnp.asarray(pages)


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ops_prefill, sparse_attention):
        monkeypatch.setattr(module, "UNROLLED_POSITIONS", 2 * SLOTS)
        monkeypatch.setattr(module, "PAST_POSITIONS", 2 * SLOTS)


@pytest.mark.parametrize(("platform",), first_quick([("cpu",), ("gpu",)]))
@pytest.mark.parametrize(("block",), first_quick((block,) for block in BLOCKS))
def test_a_decode_step_attends_to_the_selected_blocks(
    block: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's form: without a loop, in steps."""
    small_steps(monkeypatch)
    top = 1 if block == 16 else TOP
    q_TNH, k_TKH, v_TKH, index = made(block)
    index = index._replace(top=top)
    want_TNH = in_words(q_TNH, k_TKH, v_TKH, seen_by_sorting(index, top))
    runs = np.array([[0, 1], [15, 16], [35, 36]], np.int32)  # two tokens of each of three rows
    rows = runs.reshape(-1)
    got_TNH = paged_attention(
        jnp.asarray(q_TNH[rows]),
        in_pages(k_TKH),
        in_pages(v_TKH),
        jnp.asarray(np.repeat(TABLE, 3, axis=0)),
        jnp.asarray(runs),
        scale=SCALE,
        index=index.of_queries(lambda of_T: of_T[rows]),
        index_pages_PKSH=in_pages(index.keys_T1D),  # type: ignore[arg-type]
        platform=platform,
    )
    np.testing.assert_allclose(got_TNH, want_TNH[rows], atol=2e-5)


@pytest.mark.parametrize(("platform",), first_quick([("cpu",), ("gpu",)]))
@pytest.mark.parametrize(
    ("block", "past"), first_quick([(6, 21), (8, 0), (8, 5), (4, 16), (6, 16)])
)
def test_a_chunk_attends_to_the_selected_blocks_of_its_own_and_earlier_tokens(
    block: int, past: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_steps(monkeypatch)
    q_TNH, k_TKH, v_TKH, index = made(block, local=2, seed=past)
    chunk, count = 48, TOKENS - past
    pad = lambda x: np.concatenate((x[past:], np.zeros((chunk - count, *x.shape[1:]), x.dtype)))  # noqa: E731
    cached = PastPages(
        in_pages(k_TKH),
        in_pages(v_TKH),
        jnp.asarray(TABLE),
        jnp.full((1,), past, jnp.int32),
        jnp.int32(past > 0),
        in_pages(index.keys_T1D),  # type: ignore[arg-type]
    )
    got_TNH = jax.jit(
        lambda q, k, v, queries, keys: prefill_attention(
            q,
            k,
            v,
            jnp.asarray(np.where(np.arange(chunk) < count, 0, -1).astype(np.int32)),
            jnp.arange(chunk, dtype=jnp.int32) + past,
            cached if past else None,
            scale=SCALE,
            index=index._replace(queries_THD=queries, keys_T1D=keys),
            platform=platform,
            packed=False,
            rows=1,
            query_block=16,
        )
    )(*map(pad, (q_TNH, k_TKH, v_TKH, *index[:2])))
    want_TNH = in_words(q_TNH, k_TKH, v_TKH, seen_by_sorting(index, TOP))[past:]
    np.testing.assert_allclose(got_TNH[:count], want_TNH, atol=2e-5)


def test_blocks_begin_with_the_sequence_and_not_with_the_chunk() -> None:
    """Two sequences in one chunk, of which the second begins within a block of the chunk."""
    q_TNH, k_TKH, v_TKH, index = made(4)
    cut = 14
    seen = seen_by_sorting(index, TOP)
    seen[:, cut:] = seen_by_sorting(index, TOP, cut)[:, cut:]
    token = np.arange(TOKENS)
    got_TNH = prefill_attention(
        jnp.asarray(q_TNH),
        jnp.asarray(k_TKH),
        jnp.asarray(v_TKH),
        jnp.asarray(np.where(token < cut, 0, 1).astype(np.int32)),
        jnp.asarray(np.where(token < cut, token, token - cut).astype(np.int32)),
        scale=SCALE,
        index=index.of_queries(jnp.asarray)._replace(keys_T1D=jnp.asarray(index.keys_T1D)),
    )
    np.testing.assert_allclose(got_TNH, in_words(q_TNH, k_TKH, v_TKH, seen), atol=2e-5)


def test_up_to_the_selected_number_of_blocks_attention_is_dense() -> None:
    q_TNH, k_TKH, v_TKH, index = made(8)
    every, some = index._replace(top=5), index._replace(top=4)
    dense, all_of_them, fewer = (
        np.asarray(
            dense_causal_attend(
                *map(jnp.asarray, (q_TNH, k_TKH, v_TKH)), scale=SCALE, window=None, index=given
            )
        )
        for given in (None, every, some)
    )
    np.testing.assert_array_equal(all_of_them, dense)
    np.testing.assert_allclose(fewer[:32], dense[:32], atol=1e-6)
    assert np.abs(fewer[32:] - dense[32:]).max() > 1e-3
    want_TNH = in_words(q_TNH, k_TKH, v_TKH, seen_by_sorting(some, 4))
    np.testing.assert_allclose(fewer, want_TNH, atol=2e-5)


def test_a_broken_token_is_seen_by_all_that_come_after_it() -> None:
    q_TNH, k_TKH, v_TKH, index = made(4)
    index.keys_T1D[3, 0, 2] = np.nan
    given = index._replace(keys_T1D=jnp.asarray(index.keys_T1D))
    parts = seal(jnp.asarray(k_TKH), jnp.asarray(v_TKH), given)
    sealed_k, sealed_v, keys = (np.asarray(part) for part in parts)
    assert (keys[3] == np.float32(MARKER)).all() and (sealed_v[3] == np.float32(MARKER)).all()
    positions = np.array([2, 3, 30, 36], np.int32)
    got_TNH = paged_attention(
        jnp.asarray(q_TNH[positions]),
        in_pages(sealed_k),
        in_pages(sealed_v),
        jnp.asarray(np.repeat(TABLE, 4, axis=0)),
        jnp.asarray(positions),
        scale=SCALE,
        index=index.of_queries(lambda of_T: of_T[positions]),
        index_pages_PKSH=in_pages(keys),
    )
    largest = np.abs(np.asarray(got_TNH)).max(axis=(1, 2))
    assert largest[0] < 100
    assert (largest[1:] > SHOWS).all()
