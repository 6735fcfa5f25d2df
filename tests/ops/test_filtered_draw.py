"""The GPU's kernel of top-k and top-p against the CPU's form, token for token, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.filtered_draw_pallas import filtered_draw, needed_shares, shares, unit_of
from jdisagg.ops.sampling import INVALID_TOKEN, SamplingRows, sample

pytestmark = pytest.mark.one_device

WIDTH, ROWS = 1001, 64
by_loops = jax.jit(sample)
by_kernel = jax.jit(partial(sample, platform="gpu", interpret=True))
TOP_K = (0, 1, 2, 5, 64, 65, 400, WIDTH - 1, WIDTH, 2**31 - 1)
TOP_P = (1.0, 0.999999, 0.95, 0.5, 0.01, 1e-6, 1e-44)
RANDOM = np.random.default_rng(0)
LOGITS = {
    "flat": RANDOM.standard_normal((ROWS, WIDTH)) * 0.01,
    "usual": RANDOM.standard_normal((ROWS, WIDTH)) * 3,
    "peaks": RANDOM.standard_normal((ROWS, WIDTH)) * 30,
    "ties": RANDOM.integers(-3, 4, (ROWS, WIDTH)),
    "equal": np.zeros((ROWS, WIDTH)),
    "both zeros": np.where(RANDOM.random((ROWS, WIDTH)) < 0.5, 0.0, -0.0),
    "few finite": np.where(RANDOM.random((ROWS, WIDTH)) < 0.99, -np.inf, 1.5),
    "one finite": np.where(np.arange(WIDTH) == 3, 1.0, -np.inf) + np.zeros((ROWS, 1)),
}


def rows_of(seed: int) -> SamplingRows:
    """Every top_k with every top_p, in an order of its own, some with min_p, every seventh
    greedy."""
    random = np.random.default_rng(seed)
    pairs = [(k, p) for k in TOP_K for p in TOP_P]
    chosen = [pairs[number] for number in random.permutation(len(pairs))[:ROWS]]
    top_k, top_p = zip(*chosen, strict=True)
    return SamplingRows(
        temperature=jnp.asarray(np.where(np.arange(ROWS) % 7 == 6, 0, 0.8).astype(np.float32)),
        top_k=jnp.asarray(np.array(top_k, np.int32)),
        top_p=jnp.asarray(np.array(top_p, np.float32)),
        min_p=jnp.asarray(np.where(np.arange(ROWS) % 3 == 2, 0.05, 0).astype(np.float32)),
        seed=jnp.asarray(random.integers(2**32, size=(ROWS, 2)).astype(np.uint32)),
        child=jnp.zeros(ROWS, jnp.int32),
        position=jnp.arange(ROWS, dtype=jnp.int32),
    )


@pytest.mark.parametrize("name", LOGITS)
def test_the_kernel_draws_the_tokens_of_the_cpu(name: str) -> None:
    logits_BV = jnp.asarray(LOGITS[name].astype(np.float32))
    for seed in range(4):
        rows = rows_of(seed)
        expected = np.asarray(by_loops(logits_BV, rows))
        assert np.asarray(by_kernel(logits_BV, rows)).tolist() == expected.tolist()
        assert (expected >= 0).all()


def test_rows_without_a_finite_largest_logit_are_invalid_and_change_no_other() -> None:
    logits_BV = LOGITS["usual"].astype(np.float32)
    clean = np.asarray(by_loops(jnp.asarray(logits_BV), rows_of(9)))
    logits_BV[::4, 7], logits_BV[1::4] = np.nan, -np.inf
    found = np.asarray(by_kernel(jnp.asarray(logits_BV), rows_of(9)))
    bad = np.arange(ROWS) % 4 < 2
    assert (found[bad] == INVALID_TOKEN).all() and (found[~bad] == clean[~bad]).all()


@pytest.mark.parametrize("lanes", [32, 128])
def test_the_number_of_lanes_changes_no_token(lanes: int) -> None:
    """More and fewer lanes than the k of top-k, and a vocabulary of several reads. The last of them
    is not whole."""
    random = np.random.default_rng(lanes)
    logits_BV = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    rows = rows_of(3)
    arrays = (
        jnp.asarray(logits_BV),
        jnp.asarray(random.random((ROWS, WIDTH)).astype(np.float32)),
        jnp.asarray(logits_BV.max(axis=1)),
        jnp.ones(ROWS, jnp.float32),
        rows.top_k,
        rows.top_p,
    )
    draw = partial(filtered_draw, interpret=True)
    expected = np.asarray(jax.jit(draw)(*arrays))
    assert np.asarray(jax.jit(partial(draw, lanes=lanes))(*arrays)).tolist() == expected.tolist()
    for row, (token, k, p) in enumerate(zip(expected, rows.top_k, rows.top_p, strict=True)):
        scores = np.asarray(arrays[1][row])
        assert token == by_sorting(logits_BV[row], scores, int(k), float(p))


def by_sorting(logits: np.ndarray, scores: np.ndarray, k: int, p: float) -> int:
    """Returns the token by Python's integers, which have no limit."""
    kept, weights = np.full(WIDTH, True), np.exp(logits - logits.max())
    if 0 < k < WIDTH:
        kept = logits >= np.sort(logits)[-k]
    if p < 1:
        total = float(weights[kept].sum(dtype=np.float64))
        unit = 2.0 ** (29 - int(np.floor(np.log2(total))))
        parts = [int(weight * unit + 0.5) for weight in np.where(kept, weights, 0)]
        order = np.argsort(-logits)
        before = np.concatenate([[0], np.cumsum(np.array(parts, object)[order])[:-1]])
        inside = np.full(WIDTH, False)
        inside[order] = (before == 0) | (before < p * sum(parts))
        kept &= inside
    return int(np.argmax(np.where(kept, scores, -np.inf)))


def test_sums_of_shares_fit_for_every_vocabulary() -> None:
    for width in (2, 128_256, 262_144):
        for weight in (1.0, 0.999, 2.0**-12):
            weights = jnp.full(width, weight, jnp.float32).at[0].set(1)
            total = jnp.sum(weights)
            whole = np.asarray(shares(weights, unit_of(total))).astype(np.int64).sum()
            assert 2**28 < whole < 2**31
            needed = np.asarray(needed_shares(jnp.float32(1 - 2.0**-24), jnp.int32(whole)))
            assert 0 < needed <= whole * (1 + 1e-6)
