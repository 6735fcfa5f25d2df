"""The chunked and the one-step form of Mamba-2's recurrence against the recurrence written out
token by token, for rows packed in any way."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.model_api import Runs
from jdisagg.ops.short_convolution import convolve_runs, convolve_step
from jdisagg.ops.state_space import StateSpaceInputs, state_space_runs, state_space_step
from tests.ops.packed_rows import COUNTS, GRAIN, ROWS, TOKENS, layout

HEADS, GROUPS, SIZE, STATE = 6, 2, 5, 8


@partial(jax.jit, static_argnums=(3, 4))
def packed(
    inputs: StateSpaceInputs,
    state: jax.Array,
    rows: tuple[jax.Array, ...],
    platform: str,
    grain: int = GRAIN,
) -> tuple[jax.Array, jax.Array]:
    return state_space_runs(inputs, state, Runs(*rows, grain=grain), platform)


def random_inputs(rng: np.random.Generator, tokens: int) -> StateSpaceInputs:
    x = rng.normal(size=(tokens, HEADS, SIZE))
    b, c = rng.normal(size=(2, tokens, GROUPS, STATE))
    step = rng.exponential(size=(tokens, HEADS)) * rng.choice([0.01, 1, 30])
    decay = -step * rng.uniform(0.1, 4, size=HEADS)
    return StateSpaceInputs(*(jnp.asarray(part, jnp.float32) for part in (x, b, c, step, decay)))


def by_hand(inputs: StateSpaceInputs, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One sequence, in float64, head by head."""
    x, b, c, step, g = (np.asarray(part, np.float64) for part in inputs)
    out, new = np.zeros(x.shape), np.array(state, np.float64)
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        for t in range(len(x)):
            written = np.outer(b[t, group], step[t, head] * x[t, head])
            new[head] = np.exp(g[t, head]) * new[head] + written
            out[t, head] = c[t, group] @ new[head]
    return out, new


def assert_near(found: jax.Array, wanted: np.ndarray) -> None:
    """Within float noise of the largest number."""
    largest = max(1.0, float(np.abs(wanted).max(initial=0)))
    np.testing.assert_allclose(np.asarray(found) / largest, wanted / largest, atol=2e-6)


@settings(max_examples=16, deadline=None)
@given(COUNTS, st.integers(0, 99), st.sampled_from(["cpu", "gpu"]))
def test_packed_rows_go_on_from_their_states_as_the_recurrence_does(
    counts: list[int], seed: int, platform: str
) -> None:
    rng = np.random.default_rng(seed)
    inputs, runs = random_inputs(rng, TOKENS), layout(counts, GRAIN, TOKENS)
    state = rng.normal(size=(ROWS, HEADS, STATE, SIZE)).astype(np.float32)
    out, new = packed(inputs, jnp.asarray(state), runs[:4], platform)
    for row, count in enumerate(counts):
        first = int(runs.first_R[row])
        part = StateSpaceInputs(*(each[first : first + count] for each in inputs))
        wanted, after = by_hand(part, state[row])
        assert_near(out[first : first + count], wanted)
        assert_near(new[row], after)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("grain", [16, 64])
def test_a_sequence_in_pieces_and_by_steps_ends_as_in_one(grain: int, platform: str) -> None:
    rng, tokens = np.random.default_rng(3), 128
    inputs = random_inputs(rng, tokens)
    wanted, after = by_hand(inputs, np.zeros((HEADS, STATE, SIZE)))
    state, at = jnp.zeros((1, HEADS, STATE, SIZE)), 0
    for count in (64, 37):
        part = StateSpaceInputs(*(each[at : at + 64] for each in inputs))
        out, state = packed(part, state, layout([count], grain, 64)[:4], platform, grain)
        assert_near(out[:count], wanted[at : at + count])
        at += count
    one_step = jax.jit(state_space_step)
    for step in range(at, tokens):
        part = StateSpaceInputs(*(each[step : step + 1] for each in inputs))
        out, state = one_step(part, state)
        assert_near(out[0], wanted[step])
    assert_near(state[0], after)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_broken_row_reaches_no_other(platform: str) -> None:
    rng = np.random.default_rng(5)
    inputs, runs = random_inputs(rng, TOKENS), layout([20, 0, 17, 40], GRAIN, TOKENS)
    broken = inputs._replace(x_TNP=inputs.x_TNP.at[3].set(jnp.nan))
    state = jnp.asarray(rng.normal(size=(ROWS, HEADS, STATE, SIZE)), jnp.float32)
    out, new = packed(inputs, state, runs[:4], platform)
    broken_out, broken_new = packed(broken, state, runs[:4], platform)
    np.testing.assert_array_equal(out[32:49], broken_out[32:49])
    np.testing.assert_array_equal(new[1:], broken_new[1:])
    np.testing.assert_array_equal(new[1], state[1])
    assert not np.isfinite(broken_new[0]).all()


def test_the_bias_of_a_convolution_is_added_once_to_each_output() -> None:
    rng = np.random.default_rng(1)
    x, kernel, state, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((16, 6), (6, 4), (1, 3, 6), (6,))
    )
    rows = layout([16], 16, 16)
    plain, _ = convolve_runs(x, kernel, state, rows)
    biased, _ = convolve_runs(x, kernel, state, rows, bias)
    one, _ = convolve_step(x[:1], kernel, state, bias)
    np.testing.assert_allclose(biased, plain + bias[None], atol=1e-5)
    np.testing.assert_allclose(one, biased[:1], atol=1e-5)
