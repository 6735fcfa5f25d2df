"""Attention to the positions that an indexer selects, over pages and over chunks, against scores, a
sorted selection and a softmax from NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model_api import Index
from jdisagg.ops import prefill_attention as ops_prefill
from jdisagg.ops import sparse_attention
from jdisagg.ops.quarantine import MARKER, SHOWS, seal
from jdisagg.ops.sparse_attention import select
from tests.lanes import first_quick
from tests.ops.one_sequence import (
    SLOTS,
    TOKENS,
    attended_latents,
    decoded,
    drawn,
    in_a_chunk,
    latents,
    packed,
)

pytestmark = pytest.mark.one_device

TOP, INDEX_HEADS, INDEX_DIM = 7, 16, 6


def indexed(seed: int = 0) -> Index:
    random = np.random.default_rng(seed + 100)
    shapes = (INDEX_HEADS, INDEX_DIM), (1, INDEX_DIM), (INDEX_HEADS,)
    return Index(*(drawn(random, TOKENS, *shape) for shape in shapes), TOP)  # type: ignore[arg-type]


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
    (q_TNH, cached_T1H, latent), index = latents(), indexed()
    want_TNV = attended_latents(q_TNH, cached_T1H, latent, chosen_by_sorting(index))
    runs = np.array([[0, 1], [6, 7], [35, 36]])  # two tokens of each of three rows
    got_TNV = decoded(q_TNH, cached_T1H, None, runs, index, latent=latent, platform=platform)
    np.testing.assert_allclose(got_TNV, want_TNV[runs.reshape(-1)], atol=2e-5)


@pytest.mark.parametrize(
    ("platform", "past"),
    first_quick([("cpu", 21), ("gpu", 5), ("cpu", 0), ("gpu", 16), ("cpu", 5)], ci=3),
)
def test_a_chunk_attends_to_what_is_selected_among_its_own_and_earlier_tokens(
    past: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ops_prefill, sparse_attention):
        monkeypatch.setattr(module, "UNROLLED_POSITIONS", 2 * SLOTS)
    monkeypatch.setattr(sparse_attention, "KEYS_AT_ONCE", 20)
    (q_TNH, cached_T1H, latent), index = latents(past), indexed(past)
    got_TNV = in_a_chunk(q_TNH, cached_T1H, None, past, index, latent=latent, platform=platform)
    want_TNV = attended_latents(q_TNH, cached_T1H, latent, chosen_by_sorting(index))[past:]
    np.testing.assert_allclose(got_TNV[: TOKENS - past], want_TNV, atol=2e-5)


def test_sequences_of_one_chunk_select_among_their_own_tokens() -> None:
    (q_TNH, cached_T1H, latent), index, cut = latents(), indexed(), 15
    chosen_TS = chosen_by_sorting(index)
    chosen_TS[cut:] = chosen_by_sorting(index, cut)[cut:]
    got_TNV = packed(q_TNH, cached_T1H, None, cut, np.arange(TOKENS), index, latent=latent)
    want_TNV = attended_latents(q_TNH, cached_T1H, latent, chosen_TS)
    np.testing.assert_allclose(got_TNV, want_TNV, atol=2e-5)


def test_a_broken_token_is_selected_by_all_that_come_after_it() -> None:
    (q_TNH, cached_T1H, latent), index = latents(), indexed()
    cached_T1H[3, 0, 2] = np.nan
    given = index.of_queries(jnp.asarray)._replace(keys_T1D=jnp.asarray(index.keys_T1D))
    sealed_T1H, keys_T1D = (np.asarray(part) for part in seal(jnp.asarray(cached_T1H), None, given))
    assert (keys_T1D[3] == np.float32(MARKER)).all()
    sealed = index._replace(keys_T1D=keys_T1D)  # type: ignore[arg-type]
    positions = np.array([2, 3, 30, 36])
    got_TNV = decoded(q_TNH, sealed_T1H, None, positions, sealed, latent=latent)
    largest = np.abs(np.asarray(got_TNV)).max(axis=(1, 2))
    assert largest[0] < 100
    assert (largest[1:] > SHOWS).all()
