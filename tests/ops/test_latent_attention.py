"""Both forms of latent attention, over pages and over chunks, against per-head keys and values from
NumPy and an explicit softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model_api import Latent
from jdisagg.ops import latent_attention_pallas
from jdisagg.ops import prefill_attention as ops_prefill
from jdisagg.ops.kv_pages import PastPages
from jdisagg.ops.paged_attention import Implementation, paged_attention
from jdisagg.ops.prefill_attention import prefill_attention
from jdisagg.ops.quarantine import MARKER, SHOWS, seal

pytestmark = pytest.mark.one_device

HEADS, RANK, TURNED, NOPE, VALUE, SLOTS = 3, 10, 4, 6, 5, 8
SCALE, TABLE = 0.3, np.array([[4, 2, 6, 1, 3]], np.int32)
TOKENS = 37


def made(seed: int = 0) -> tuple[np.ndarray, np.ndarray, Latent]:
    """Returns queries [T, N, nope + turned], cached vectors [T, 1, rank + turned], and the
    matrices."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    weights = Latent(draw(HEADS, RANK, NOPE) / 2, draw(HEADS, RANK, VALUE) / 2)  # type: ignore[arg-type]
    return draw(TOKENS, HEADS, NOPE + TURNED), draw(TOKENS, 1, RANK + TURNED), weights


def in_words(q_TNH: np.ndarray, cached_T1H: np.ndarray, latent: Latent) -> np.ndarray:
    """Head by head and token by token, in float64: [T, N, value]."""
    out = np.zeros((TOKENS, HEADS, VALUE))
    inner, turned = cached_T1H[:, 0, :RANK].astype(np.float64), cached_T1H[:, 0, RANK:]
    for head in range(HEADS):
        keys = np.concatenate((inner @ np.asarray(latent.keys_NRH)[head], turned), axis=1)
        values = inner @ np.asarray(latent.values_NRH)[head]
        for token in range(TOKENS):
            scores = keys[: token + 1] @ q_TNH[token, head] * SCALE
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ values[: token + 1]
    return out


def in_pages(cached_T1H: np.ndarray) -> jax.Array:
    pages = np.zeros((8, 1, SLOTS, RANK + TURNED), np.float32)
    for token in range(TOKENS):
        pages[TABLE[0, token // SLOTS], 0, token % SLOTS] = cached_T1H[token, 0]
    return jnp.asarray(pages)


@pytest.mark.parametrize("implementation", ["loop", "pages", "gather"])
def test_a_decode_step_over_cached_latents_is_attention_to_the_heads_keys(
    implementation: Implementation,
) -> None:
    q_TNH, cached_T1H, latent = made()
    positions = np.array([0, 7, 8, 23, 36], np.int32)
    got_BNV = paged_attention(
        jnp.asarray(q_TNH[positions]),
        in_pages(cached_T1H),
        None,
        jnp.asarray(np.repeat(TABLE, 5, axis=0)),
        jnp.asarray(positions),
        scale=SCALE,
        latent=latent,
        implementation=implementation,
    )
    want_BNV = in_words(q_TNH, cached_T1H, latent)[positions]
    np.testing.assert_allclose(got_BNV, want_BNV, atol=2e-5)
    runs = np.array([[6, 7, 8, 6], [33, 34, 35, 36]], np.int32)  # of two rows, four tokens each
    got_TNV = paged_attention(
        jnp.asarray(q_TNH[runs.reshape(-1)]),
        in_pages(cached_T1H),
        None,
        jnp.asarray(np.repeat(TABLE, 2, axis=0)),
        jnp.asarray(runs),
        scale=SCALE,
        latent=latent,
        implementation=implementation,
    )
    want_TNV = in_words(q_TNH, cached_T1H, latent)[runs.reshape(-1)]
    np.testing.assert_allclose(got_TNV, want_TNV, atol=2e-5)


@pytest.mark.parametrize(
    ("splits", "heads", "per"), [(None, 3, 1), (2, 20, 1), (1, 16, 1), (2, 5, 4)]
)
def test_the_gpus_kernel_mixes_as_a_softmax_written_out(
    splits: int | None, heads: int, per: int
) -> None:
    random = np.random.default_rng(heads)
    rank, turned, pages, slots = 32, 16, 9, 16
    q_TNH = random.standard_normal((4 * per, heads, rank + turned)).astype(np.float32)
    pages_P1SH = random.standard_normal((pages, 1, slots, rank + turned)).astype(np.float32)
    table_BN = np.array([random.permutation(pages)[:6] for _ in range(4)], np.int32)
    positions_BQ = np.array([[0], [40], [92], [17]], np.int32) + np.arange(per, dtype=np.int32)
    got_TNR = jax.jit(
        lambda *arrays: latent_attention_pallas.latent_attention(
            arrays[0],
            arrays[1],
            rank,
            *arrays[2:],
            scale=SCALE,
            window=None,
            splits=splits,
            interpret=True,
        )
    )(q_TNH, pages_P1SH, table_BN, positions_BQ)
    for t, position in enumerate(positions_BQ.reshape(-1)):
        cached_SH = pages_P1SH[table_BN[t // per], 0].reshape(-1, rank + turned)[: position + 1]
        scores_NS = q_TNH[t].astype(np.float64) @ cached_SH.T * SCALE
        weights_NS = np.exp(scores_NS - scores_NS.max(axis=1, keepdims=True))
        mixed_NR = weights_NS / weights_NS.sum(axis=1, keepdims=True) @ cached_SH[:, :rank]
        np.testing.assert_allclose(got_TNR[t], mixed_NR, atol=2e-5)


@pytest.mark.parametrize(
    ("platform", "dense"), [("cpu", 1024), ("cpu", 16), ("tpu", 16), ("gpu", 1024)]
)
@pytest.mark.parametrize("past", [0, 5, 16, 21])
def test_a_chunk_after_cached_latents_is_attention_to_all_of_them(
    past: int, platform: str, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU without a loop, in steps. Elsewhere a chunk of more than `dense` tokens loops over
    blocks of keys."""
    monkeypatch.setattr(ops_prefill, "UNROLLED_POSITIONS", 2 * SLOTS)
    monkeypatch.setattr(ops_prefill, "DENSE_TOKENS", dense)
    monkeypatch.setattr(ops_prefill, "KEY_BLOCK", 16)
    q_TNH, cached_T1H, latent = made(past)
    chunk, count = 48, TOKENS - past
    pad = lambda x: np.concatenate((x[past:], np.zeros((chunk - count, *x.shape[1:]), x.dtype)))  # noqa: E731
    segment_T = np.where(np.arange(chunk) < count, 0, -1).astype(np.int32)
    cached = PastPages(
        in_pages(cached_T1H),
        None,
        jnp.asarray(TABLE),
        jnp.full((1,), past, jnp.int32),
        jnp.int32(past > 0),
    )
    got_TNV = jax.jit(
        lambda q, k: prefill_attention(
            q,
            k,
            None,
            jnp.asarray(segment_T),
            jnp.arange(chunk, dtype=jnp.int32) + past,
            cached if past else None,
            scale=SCALE,
            latent=latent,
            platform=platform,
            packed=False,
            rows=1,
            query_block=16,
        )
    )(pad(q_TNH), pad(cached_T1H))
    expected = in_words(q_TNH, cached_T1H, latent)[past:]
    np.testing.assert_allclose(got_TNV[:count], expected, atol=2e-5)
    assert not np.asarray(got_TNV[count:]).any()


@pytest.mark.parametrize("paged", [True, False])
def test_a_broken_token_shows_in_its_own_sequence_and_in_no_other(paged: bool) -> None:
    """Whatever the score of its key would have been."""
    for seed in range(4):
        q_TNH, cached_T1H, latent = made(seed)
        cached_T1H[3, 0, seed] = np.nan
        sealed_T1H = np.asarray(seal(jnp.asarray(cached_T1H), None)[0])
        assert (sealed_T1H[3] == np.float32(MARKER)).all()
        if paged:
            positions = np.array([2, 3, 30], np.int32)  # the first sees nothing of it
            got = paged_attention(
                jnp.asarray(q_TNH[positions]),
                in_pages(sealed_T1H),
                None,
                jnp.asarray(np.repeat(TABLE, 3, axis=0)),
                jnp.asarray(positions),
                scale=SCALE,
                latent=latent,
            )
        else:
            segment_T = np.where(np.arange(TOKENS) < 20, 0, 1).astype(np.int32)
            whole = prefill_attention(
                jnp.asarray(q_TNH),
                jnp.asarray(sealed_T1H),
                None,
                jnp.asarray(segment_T),
                jnp.arange(TOKENS, dtype=jnp.int32),
                scale=SCALE,
                latent=latent,
            )
            got = whole[np.array([30, 3, 15])]
        largest = np.abs(np.asarray(got)).max(axis=(1, 2))
        assert largest[0] < 100
        assert (largest[1:] > SHOWS).all()
