"""Attention to the blocks of positions that an indexer selects, over pages and over chunks, against
scores, a sorted selection and a softmax from NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model_api import Index
from jdisagg.ops import prefill_attention as ops_prefill
from jdisagg.ops import sparse_attention
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.quarantine import MARKER, SHOWS, seal
from tests.lanes import first_quick
from tests.ops.one_sequence import (
    SCALE,
    SLOTS,
    TOKENS,
    attended,
    decoded,
    drawn,
    in_a_chunk,
    packed,
)

pytestmark = pytest.mark.one_device

HEADS, KV_HEADS, WIDTH, DIM, TOP = 4, 2, 6, 4, 3
BLOCKS = [8, 4, 6, 16]  # a page, half a page, no multiple of a page, two pages


def made(
    block: int, local: int = 1, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Index]:
    """Returns queries [T, N, H], keys and values [T, K, H], and the indexer's inputs."""
    random = np.random.default_rng(seed)
    k_TKH, v_TKH = drawn(random, 2, TOKENS, KV_HEADS, WIDTH)
    of_index = drawn(random, TOKENS, KV_HEADS, DIM), drawn(random, TOKENS, 1, DIM), None
    index = Index(*of_index, TOP, block, local)  # type: ignore[arg-type]
    return drawn(random, TOKENS, HEADS, WIDTH), k_TKH, v_TKH, index


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
    shared = HEADS // KV_HEADS
    k_TNH, v_TNH = (np.repeat(part, shared, axis=1) for part in (k_TKH, v_TKH))
    return attended(q_TNH, k_TNH, v_TNH, np.repeat(seen_KTS, shared, axis=0))


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ops_prefill, sparse_attention):
        monkeypatch.setattr(module, "UNROLLED_POSITIONS", 2 * SLOTS)
        monkeypatch.setattr(module, "PAST_POSITIONS", 2 * SLOTS)


@pytest.mark.parametrize(
    ("block", "platform"),
    first_quick(((block, form) for form in ("cpu", "gpu") for block in BLOCKS), ci=4),
)
def test_a_decode_step_attends_to_the_selected_blocks(
    block: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's form: without a loop, in steps."""
    small_steps(monkeypatch)
    top = 1 if block == 16 else TOP
    q_TNH, k_TKH, v_TKH, index = made(block)
    index = index._replace(top=top)
    want_TNH = in_words(q_TNH, k_TKH, v_TKH, seen_by_sorting(index, top))
    runs = np.array([[0, 1], [15, 16], [35, 36]])  # two tokens of each of three rows
    got_TNH = decoded(q_TNH, k_TKH, v_TKH, runs, index, platform=platform)
    np.testing.assert_allclose(got_TNH, want_TNH[runs.reshape(-1)], atol=2e-5)


@pytest.mark.parametrize(
    ("block", "past", "platform"),
    first_quick(
        [(6, 21, "cpu"), (8, 5, "gpu"), (8, 0, "cpu"), (4, 16, "gpu"), (6, 16, "cpu")], ci=2
    ),
)
def test_a_chunk_attends_to_the_selected_blocks_of_its_own_and_earlier_tokens(
    block: int, past: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_steps(monkeypatch)
    q_TNH, k_TKH, v_TKH, index = made(block, local=2, seed=past)
    got_TNH = in_a_chunk(q_TNH, k_TKH, v_TKH, past, index, platform=platform)
    want_TNH = in_words(q_TNH, k_TKH, v_TKH, seen_by_sorting(index, TOP))[past:]
    np.testing.assert_allclose(got_TNH[: TOKENS - past], want_TNH, atol=2e-5)


def test_blocks_begin_with_the_sequence_and_not_with_the_chunk() -> None:
    """Two sequences in one chunk, of which the second begins within a block of the chunk."""
    q_TNH, k_TKH, v_TKH, index = made(4)
    cut = 14
    seen = seen_by_sorting(index, TOP)
    seen[:, cut:] = seen_by_sorting(index, TOP, cut)[:, cut:]
    token = np.arange(TOKENS)
    positions = np.where(token < cut, token, token - cut)
    got_TNH = packed(q_TNH, k_TKH, v_TKH, cut, positions, index)
    np.testing.assert_allclose(got_TNH, in_words(q_TNH, k_TKH, v_TKH, seen), atol=2e-5)


def test_up_to_the_selected_number_of_blocks_attention_is_dense() -> None:
    q_TNH, k_TKH, v_TKH, index = made(8)
    every, some = index._replace(top=5), index._replace(top=4)
    attend = partial(dense_causal_attend, scale=SCALE, window=None)
    dense, all_of_them, fewer = (
        np.asarray(jax.jit(partial(attend, index=given))(q_TNH, k_TKH, v_TKH))
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
    sealed = index._replace(keys_T1D=keys)  # type: ignore[arg-type]
    got_TNH = decoded(q_TNH, sealed_k, sealed_v, np.array([2, 3, 30, 36]), sealed)
    largest = np.abs(np.asarray(got_TNH)).max(axis=(1, 2))
    assert largest[0] < 100
    assert (largest[1:] > SHOWS).all()
