"""The chunked and the one-step form of the gated delta rule and of the short convolution against
the recurrence written out token by token, for rows packed in any way."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.model_api import Runs
from jdisagg.ops.gated_delta import DeltaInputs, delta_runs, delta_step, unit_length
from jdisagg.ops.short_convolution import convolve_runs, convolve_step
from tests.ops.packed_rows import COUNTS, GRAIN, ROWS, TOKENS, layout

HEADS, KEY, VALUE, CHANNELS, TAPS = 3, 8, 5, 6, 4


@partial(jax.jit, static_argnums=3)
def packed_delta(
    inputs: DeltaInputs, state: jax.Array, rows: tuple[jax.Array, ...], platform: str
) -> tuple[jax.Array, jax.Array]:
    return delta_runs(inputs, state, Runs(*rows, grain=GRAIN), platform)


@jax.jit
def packed_convolution(
    x: jax.Array, kernel: jax.Array, state: jax.Array, rows: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return convolve_runs(x, kernel, state, Runs(*rows, grain=GRAIN))


def random_inputs(rng: np.random.Generator, tokens: int) -> DeltaInputs:
    q, k = (
        np.asarray(unit_length(jnp.asarray(rng.normal(size=(tokens, HEADS, KEY)))))
        for _ in range(2)
    )
    v = rng.normal(size=(tokens, HEADS, VALUE)).astype(np.float32)
    g = -rng.exponential(size=(tokens, HEADS)).astype(np.float32) * rng.choice([0.01, 1, 30])
    b = rng.uniform(size=(tokens, HEADS)).astype(np.float32)
    return DeltaInputs(*map(jnp.asarray, (q, k, v, g, b)))


def by_hand(inputs: DeltaInputs, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One sequence, in float64."""
    q, k, v, g, b = (np.asarray(part, np.float64) for part in inputs)
    out = []
    for t in range(len(q)):
        state = np.exp(g[t])[:, None, None] * state
        u = b[t][:, None] * (v[t] - np.einsum("nkv,nk->nv", state, k[t]))
        state = state + k[t][:, :, None] * u[:, None, :]
        out.append(np.einsum("nkv,nk->nv", state, q[t]))
    return np.array(out).reshape(-1, HEADS, VALUE), state


@settings(max_examples=16, deadline=None)
@given(COUNTS, st.integers(0, 99), st.sampled_from(["cpu", "gpu"]))
def test_packed_rows_go_on_from_their_states_as_the_recurrence_does(
    counts: list[int], seed: int, platform: str
) -> None:
    rng = np.random.default_rng(seed)
    inputs, runs = random_inputs(rng, TOKENS), layout(counts, GRAIN, TOKENS)
    state = rng.normal(size=(ROWS, HEADS, KEY, VALUE)).astype(np.float32)
    out, new = packed_delta(inputs, jnp.asarray(state), runs[:4], platform)
    for row, count in enumerate(counts):
        first = int(runs.first_R[row])
        part = DeltaInputs(*(each[first : first + count] for each in inputs))
        wanted, after = by_hand(part, state[row])
        np.testing.assert_allclose(out[first : first + count], wanted, atol=2e-5, rtol=2e-5)
        np.testing.assert_allclose(new[row], after, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("grain", [16, 64])
def test_a_sequence_in_pieces_and_by_steps_ends_as_in_one(grain: int, platform: str) -> None:
    rng, tokens = np.random.default_rng(3), 128
    inputs = random_inputs(rng, tokens)
    wanted, after = by_hand(inputs, np.zeros((HEADS, KEY, VALUE)))
    state, at = jnp.zeros((1, HEADS, KEY, VALUE)), 0
    in_runs = jax.jit(
        lambda part, state, rows: delta_runs(part, state, Runs(*rows, grain=grain), platform)
    )
    one_step = jax.jit(delta_step)
    for count in (64, 37):
        part = DeltaInputs(*(each[at : at + 64] for each in inputs))
        out, state = in_runs(part, state, layout([count], grain, 64)[:4])
        np.testing.assert_allclose(out[:count], wanted[at : at + count], atol=2e-5, rtol=2e-5)
        at += count
    for step in range(at, tokens):
        out, state = one_step(DeltaInputs(*(each[step : step + 1] for each in inputs)), state)
        np.testing.assert_allclose(out[0], wanted[step], atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(state[0], after, atol=2e-5, rtol=2e-5)


def test_keys_that_are_all_alike_stay_exact() -> None:
    """The hardest triangular system: powers of it would reach binomials."""
    ones = jnp.ones((64, HEADS, KEY)) / np.sqrt(KEY)
    v = jnp.asarray(np.random.default_rng(0).normal(size=(64, HEADS, VALUE)), jnp.float32)
    inputs = DeltaInputs(ones, ones, v, jnp.zeros((64, HEADS)), jnp.ones((64, HEADS)))
    wanted, _ = by_hand(inputs, np.zeros((HEADS, KEY, VALUE)))
    out, _ = delta_runs(inputs, jnp.zeros((1, HEADS, KEY, VALUE)), layout([64], 64, 64))
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_broken_row_reaches_no_other(platform: str) -> None:
    rng = np.random.default_rng(5)
    inputs, runs = random_inputs(rng, TOKENS), layout([20, 0, 17, 40], GRAIN, TOKENS)
    broken = inputs._replace(v_TNH=inputs.v_TNH.at[3].set(jnp.nan))
    state = jnp.asarray(rng.normal(size=(ROWS, HEADS, KEY, VALUE)), jnp.float32)
    out, new = packed_delta(inputs, state, runs[:4], platform)
    broken_out, broken_new = packed_delta(broken, state, runs[:4], platform)
    np.testing.assert_array_equal(out[32:49], broken_out[32:49])
    np.testing.assert_array_equal(new[1:], broken_new[1:])
    np.testing.assert_array_equal(new[1], state[1])
    assert not np.isfinite(broken_new[0]).all()


@settings(max_examples=8, deadline=None)
@given(COUNTS, st.integers(0, 99))
def test_the_convolution_sees_across_chunks_and_never_across_rows(
    counts: list[int], seed: int
) -> None:
    rng, runs = np.random.default_rng(seed), layout(counts, GRAIN, TOKENS)
    x = rng.normal(size=(TOKENS, CHANNELS)).astype(np.float32)
    kernel = rng.normal(size=(CHANNELS, TAPS)).astype(np.float32)
    state = rng.normal(size=(ROWS, TAPS - 1, CHANNELS)).astype(np.float32)
    y, new = packed_convolution(*map(jnp.asarray, (x, kernel, state)), runs[:4])
    for row, count in enumerate(counts):
        first = int(runs.first_R[row])
        seen = np.concatenate([state[row], x[first : first + count]])
        wanted = [np.sum(seen[t : t + TAPS].T * kernel, axis=1) for t in range(count)]
        np.testing.assert_allclose(
            y[first : first + count], np.reshape(wanted, (-1, CHANNELS)), atol=1e-5
        )
        np.testing.assert_array_equal(new[row], seen[count:])


def test_a_step_of_the_convolution_is_a_row_of_one_token() -> None:
    rng = np.random.default_rng(1)
    x, kernel, state = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, CHANNELS), (CHANNELS, TAPS), (2, TAPS - 1, CHANNELS))
    )
    y, new = convolve_step(x, kernel, state)
    for row in range(2):
        padded = jnp.pad(x[row : row + 1], ((0, 15), (0, 0)))
        y_T, new_R = convolve_runs(padded, kernel, state[row : row + 1], layout([1], 16, 16))
        np.testing.assert_allclose(y[row], y_T[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(new[row], new_R[0])
