"""Both forms of latent attention, over pages and over chunks, against per-head keys and values from
NumPy and an explicit softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import latent_attention_pallas
from jdisagg.ops import prefill_attention as ops_prefill
from jdisagg.ops.paged_attention import Implementation
from jdisagg.ops.quarantine import MARKER, SHOWS, seal
from tests.lanes import first_quick
from tests.ops.one_sequence import (
    CAUSAL,
    SCALE,
    SLOTS,
    TOKENS,
    attended_latents,
    decoded,
    in_a_chunk,
    latents,
    packed,
)

pytestmark = pytest.mark.one_device


@pytest.mark.parametrize("implementation", ["loop", "pages", "gather"])
def test_a_decode_step_over_cached_latents_is_attention_to_the_heads_keys(
    implementation: Implementation,
) -> None:
    q_TNH, cached_T1H, latent = latents()
    want_TNV = attended_latents(q_TNH, cached_T1H, latent, CAUSAL)
    runs = np.array([[6, 7, 8, 6], [33, 34, 35, 36]])  # of two rows, four tokens each
    for positions in (np.array([0, 7, 8, 23, 36]), runs):
        how = {"latent": latent, "implementation": implementation}
        got = decoded(q_TNH, cached_T1H, None, positions, **how)
        np.testing.assert_allclose(got, want_TNV[positions.reshape(-1)], atol=2e-5)


@pytest.mark.parametrize(
    ("splits", "heads", "per"), first_quick([(2, 5, 4), (None, 3, 1), (2, 20, 1), (1, 16, 1)], ci=3)
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
    ("platform", "dense", "past"),
    first_quick(
        [
            *(("cpu", 1024, 21), ("cpu", 16, 5), ("gpu", 1024, 21)),
            *(("cpu", 16, 0), ("tpu", 16, 16), ("gpu", 1024, 0), ("cpu", 1024, 16)),
        ],
        quick=3,
        ci=4,
    ),
)
def test_a_chunk_after_cached_latents_is_attention_to_all_of_them(
    past: int, platform: str, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU without a loop, in steps. Elsewhere a chunk of more than `dense` tokens loops over
    blocks of keys."""
    monkeypatch.setattr(ops_prefill, "UNROLLED_POSITIONS", 2 * SLOTS)
    monkeypatch.setattr(ops_prefill, "DENSE_TOKENS", dense)
    monkeypatch.setattr(ops_prefill, "KEY_BLOCK", 16)
    q_TNH, cached_T1H, latent = latents(past)
    got_TNV = in_a_chunk(q_TNH, cached_T1H, None, past, latent=latent, platform=platform)
    want_TNV = attended_latents(q_TNH, cached_T1H, latent, CAUSAL)[past:]
    np.testing.assert_allclose(got_TNV[: TOKENS - past], want_TNV, atol=2e-5)
    assert not got_TNV[TOKENS - past :].any()


@pytest.mark.parametrize("paged", [True, False])
def test_a_broken_token_shows_in_its_own_sequence_and_in_no_other(paged: bool) -> None:
    """Whatever the score of its key would have been."""
    for seed in range(4):
        q_TNH, cached_T1H, latent = latents(seed)
        cached_T1H[3, 0, seed] = np.nan
        sealed_T1H = np.asarray(seal(jnp.asarray(cached_T1H), None)[0])
        assert (sealed_T1H[3] == np.float32(MARKER)).all()
        if paged:
            at = np.array([2, 3, 30])  # the first sees nothing of it
            got = decoded(q_TNH, sealed_T1H, None, at, latent=latent)
        else:
            whole = packed(q_TNH, sealed_T1H, None, 20, np.arange(TOKENS), latent=latent)
            got = np.asarray(whole)[[30, 3, 15]]
        largest = np.abs(np.asarray(got)).max(axis=(1, 2))
        assert largest[0] < 100
        assert (largest[1:] > SHOWS).all()
