"""The chunked and the one-step form of the recurrences, the gated delta rule with a gate per head
or per channel and Mamba-2's, and of the short convolution, against the recurrence written out token
by token, for rows packed in any way."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.model_api import Runs
from jdisagg.ops.gated_delta import DeltaInputs, delta_runs, delta_step, unit_length
from jdisagg.ops.short_convolution import convolve_runs, convolve_step
from jdisagg.ops.state_space import StateSpaceInputs, state_space_runs, state_space_step
from tests.lanes import first_quick

ROWS, TOKENS, GRAIN = 4, 160, 16
COUNTS = st.lists(st.integers(0, 40), min_size=ROWS, max_size=ROWS).filter(
    lambda counts: sum(-(-count // GRAIN) * GRAIN for count in counts) <= TOKENS
)
HEADS, KEY, VALUE, GROUPS, CHANNELS, TAPS = 6, 8, 5, 2, 6, 4
ZERO = (HEADS, KEY, VALUE)
Arrays = tuple[np.ndarray, np.ndarray]


def layout(counts: list[int], grain: int, tokens: int) -> Runs:
    """Packs rows of these lengths, each at the next multiple of the grain, as programs do."""
    row, index = np.full(tokens, -1, np.int32), np.full(tokens, -1, np.int32)
    first, at = [], 0
    for number, count in enumerate(counts):
        first.append(at)
        row[at : at + count], index[at : at + count] = number, np.arange(count)
        at += -(-count // grain) * grain
    arrays = (row, index, np.array(first, np.int32), np.array(counts))
    return Runs(*map(jnp.asarray, arrays), grain=grain)


@dataclass(frozen=True)
class Recurrence:
    """`by_hand` computes one sequence in float64. `written` is the input that a test breaks."""

    runs: Callable[..., tuple[jax.Array, jax.Array]]
    step: Callable[..., tuple[jax.Array, jax.Array]]
    inputs: Callable[[np.random.Generator, int], Any]
    by_hand: Callable[[Any, np.ndarray], Arrays]
    written: str
    noise: float

    def assert_near(self, found: jax.Array | np.ndarray, wanted: np.ndarray) -> None:
        """Within float noise of the largest number."""
        largest = max(1.0, float(np.abs(wanted).max(initial=0)))
        np.testing.assert_allclose(
            np.asarray(found) / largest, wanted / largest, atol=self.noise, rtol=self.noise
        )


def delta_inputs(rng: np.random.Generator, tokens: int, gates: int = 1) -> DeltaInputs:
    q, k = (
        np.asarray(unit_length(jnp.asarray(rng.normal(size=(tokens, HEADS, KEY)))))
        for _ in range(2)
    )
    v = rng.normal(size=(tokens, HEADS, VALUE)).astype(np.float32)
    g = -rng.exponential(size=(tokens, HEADS, gates)) * rng.choice([0.01, 1, 30], (1, 1, gates))
    b = rng.uniform(size=(tokens, HEADS)).astype(np.float32)
    return DeltaInputs(*(jnp.asarray(part, jnp.float32) for part in (q, k, v, g, b)))


def delta_by_hand(inputs: DeltaInputs, state: np.ndarray) -> Arrays:
    q, k, v, g, b = (np.asarray(part, np.float64) for part in inputs)
    out = []
    for t in range(len(q)):
        state = np.exp(g[t])[:, :, None] * state
        u = b[t][:, None] * (v[t] - np.einsum("nkv,nk->nv", state, k[t]))
        state = state + k[t][:, :, None] * u[:, None, :]
        out.append(np.einsum("nkv,nk->nv", state, q[t]))
    return np.array(out).reshape(-1, HEADS, VALUE), state


def state_space_inputs(rng: np.random.Generator, tokens: int) -> StateSpaceInputs:
    x = rng.normal(size=(tokens, HEADS, VALUE))
    b, c = rng.normal(size=(2, tokens, GROUPS, KEY))
    step = rng.exponential(size=(tokens, HEADS)) * rng.choice([0.01, 1, 30])
    decay = -step * rng.uniform(0.1, 4, size=HEADS)
    return StateSpaceInputs(*(jnp.asarray(part, jnp.float32) for part in (x, b, c, step, decay)))


def state_space_by_hand(inputs: StateSpaceInputs, state: np.ndarray) -> Arrays:
    x, b, c, step, g = (np.asarray(part, np.float64) for part in inputs)
    out, new = np.zeros(x.shape), np.array(state, np.float64)
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        for t in range(len(x)):
            written = np.outer(b[t, group], step[t, head] * x[t, head])
            new[head] = np.exp(g[t, head]) * new[head] + written
            out[t, head] = c[t, group] @ new[head]
    return out, new


DELTA = Recurrence(delta_runs, delta_step, delta_inputs, delta_by_hand, "v_TNH", 2e-5)
STATE_SPACE = Recurrence(
    state_space_runs, state_space_step, state_space_inputs, state_space_by_hand, "x_TNP", 2e-6
)
# Some channels keep all and others nothing.
CHANNELS_DELTA = replace(DELTA, inputs=partial(delta_inputs, gates=KEY))
ALL = pytest.mark.parametrize(
    "recurrence",
    [DELTA, CHANNELS_DELTA, STATE_SPACE],
    ids=["gated delta", "gate per channel", "state space"],
)
PLATFORMS = pytest.mark.parametrize(("platform",), first_quick([("cpu",), ("gpu",)]))


@partial(jax.jit, static_argnums=(0, 4, 5))
def packed(
    runs: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, ...],
    state: jax.Array,
    rows: tuple[jax.Array, ...],
    platform: str,
    grain: int = GRAIN,
) -> tuple[jax.Array, jax.Array]:
    return runs(inputs, state, Runs(*rows, grain=grain), platform)


def part_of(inputs: Any, first: int, last: int) -> Any:
    """In NumPy: JAX would compile a program for each part."""
    return type(inputs)(*(np.asarray(each)[first:last] for each in inputs))


@ALL
def test_packed_rows_go_on_from_their_states_as_the_recurrence_does(recurrence: Recurrence) -> None:
    @settings(max_examples=16)
    @given(COUNTS, st.integers(0, 99), st.sampled_from(["cpu", "gpu"]))
    def check(counts: list[int], seed: int, platform: str) -> None:
        rng = np.random.default_rng(seed)
        inputs, runs = recurrence.inputs(rng, TOKENS), layout(counts, GRAIN, TOKENS)
        state = rng.normal(size=(ROWS, *ZERO)).astype(np.float32)
        found = packed(recurrence.runs, inputs, jnp.asarray(state), runs[:4], platform)
        out, new = map(np.asarray, found)
        for row, count in enumerate(counts):
            first = int(np.asarray(runs.first_R)[row])
            wanted, after = recurrence.by_hand(part_of(inputs, first, first + count), state[row])
            recurrence.assert_near(out[first : first + count], wanted)
            recurrence.assert_near(new[row], after)

    check()


@ALL
@pytest.mark.parametrize(("platform", "grain"), first_quick([("cpu", 16), ("gpu", 64)]))
def test_a_sequence_in_pieces_and_by_steps_ends_as_in_one(
    recurrence: Recurrence, grain: int, platform: str
) -> None:
    rng, tokens = np.random.default_rng(3), 128
    inputs = recurrence.inputs(rng, tokens)
    wanted, after = recurrence.by_hand(inputs, np.zeros(ZERO))
    state, at = jnp.zeros((1, *ZERO)), 0
    for count in (64, 37):
        rows = layout([count], grain, 64)[:4]
        part = part_of(inputs, at, at + 64)
        out, state = packed(recurrence.runs, part, state, rows, platform, grain)
        recurrence.assert_near(np.asarray(out)[:count], wanted[at : at + count])
        at += count
    one_step = jax.jit(recurrence.step)
    for step in range(at, tokens):
        out, state = one_step(part_of(inputs, step, step + 1), state)
        recurrence.assert_near(out[0], wanted[step])
    recurrence.assert_near(state[0], after)


@ALL
@pytest.mark.parametrize(
    ("platform", "counts"), first_quick([("cpu", [20, 0, 48, 40]), ("gpu", [100])])
)
def test_states_inside_rows_are_those_of_rows_that_end_there(
    recurrence: Recurrence, counts: list[int], platform: str
) -> None:
    """After whole steps of the recurrence, at a row's end, or nowhere; ends are as without."""
    rng, stops = np.random.default_rng(7), [min(16, counts[0]), 0, 48, 32][: len(counts)]
    inputs, runs = recurrence.inputs(rng, TOKENS), layout(counts, GRAIN, TOKENS)
    state = jnp.asarray(rng.normal(size=(len(counts), *ZERO)), jnp.float32)
    plain, ends = packed(recurrence.runs, inputs, state, runs[:4], platform)
    out, both = jax.jit(
        lambda stop_R: recurrence.runs(inputs, state, runs._replace(stop_R=stop_R), platform)
    )(jnp.asarray(stops, jnp.int32))
    both = np.asarray(both)
    np.testing.assert_allclose(out, plain, atol=1e-5)
    np.testing.assert_allclose(both[: len(counts)], ends, atol=1e-5)
    for row, stop in enumerate(stops):
        first = int(np.asarray(runs.first_R)[row])
        _, after = recurrence.by_hand(part_of(inputs, first, first + stop), state[row])
        if stop:
            recurrence.assert_near(both[len(counts) + row], after)


@ALL
@PLATFORMS
def test_a_broken_row_reaches_no_other(recurrence: Recurrence, platform: str) -> None:
    rng = np.random.default_rng(5)
    inputs, runs = recurrence.inputs(rng, TOKENS), layout([20, 0, 17, 40], GRAIN, TOKENS)
    values = np.array(getattr(inputs, recurrence.written))
    values[3] = np.nan
    broken = inputs._replace(**{recurrence.written: values})
    state = jnp.asarray(rng.normal(size=(ROWS, *ZERO)), jnp.float32)
    out, new, broken_out, broken_new = (
        np.asarray(each)
        for given in (inputs, broken)
        for each in packed(recurrence.runs, given, state, runs[:4], platform)
    )
    np.testing.assert_array_equal(out[32:49], broken_out[32:49])
    np.testing.assert_array_equal(new[1:], broken_new[1:])
    np.testing.assert_array_equal(new[1], np.asarray(state)[1])
    assert not np.isfinite(broken_new[0]).all()


@pytest.mark.parametrize("gates", [1, KEY])
def test_keys_that_are_all_alike_stay_exact(gates: int) -> None:
    """The hardest triangular system of the delta rule: powers of it would reach binomials."""
    ones = jnp.ones((64, HEADS, KEY)) / np.sqrt(KEY)
    v = jnp.asarray(np.random.default_rng(0).normal(size=(64, HEADS, VALUE)), jnp.float32)
    inputs = DeltaInputs(ones, ones, v, jnp.zeros((64, HEADS, gates)), jnp.ones((64, HEADS)))
    wanted, _ = delta_by_hand(inputs, np.zeros(ZERO))
    out, _ = packed(delta_runs, inputs, jnp.zeros((1, *ZERO)), layout([64], 64, 64)[:4], "cpu", 64)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@jax.jit
def packed_convolution(
    x: jax.Array, kernel: jax.Array, state: jax.Array, rows: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return convolve_runs(x, kernel, state, Runs(*rows, grain=GRAIN))


@settings(max_examples=8)
@given(COUNTS, st.integers(0, 99))
def test_the_convolution_sees_across_chunks_and_never_across_rows(
    counts: list[int], seed: int
) -> None:
    rng, runs = np.random.default_rng(seed), layout(counts, GRAIN, TOKENS)
    x = rng.normal(size=(TOKENS, CHANNELS)).astype(np.float32)
    kernel = rng.normal(size=(CHANNELS, TAPS)).astype(np.float32)
    state = rng.normal(size=(ROWS, TAPS - 1, CHANNELS)).astype(np.float32)
    y, new = map(np.asarray, packed_convolution(x, kernel, state, runs[:4]))
    for row, count in enumerate(counts):
        first = int(np.asarray(runs.first_R)[row])
        seen = np.concatenate([state[row], x[first : first + count]])
        wanted = [np.sum(seen[t : t + TAPS].T * kernel, axis=1) for t in range(count)]
        np.testing.assert_allclose(
            y[first : first + count], np.reshape(wanted, (-1, CHANNELS)), atol=1e-5
        )
        np.testing.assert_array_equal(new[row], seen[count:])


def test_the_convolution_gives_the_inputs_before_a_place_inside_a_row() -> None:
    rng, counts, stops = np.random.default_rng(2), [20, 0, 17, 40], [16, 0, 1, 40]
    runs = layout(counts, GRAIN, TOKENS)
    x = rng.normal(size=(TOKENS, CHANNELS)).astype(np.float32)
    kernel = rng.normal(size=(CHANNELS, TAPS)).astype(np.float32)
    state = rng.normal(size=(ROWS, TAPS - 1, CHANNELS)).astype(np.float32)
    stopped = runs._replace(stop_R=jnp.asarray(stops, jnp.int32))
    _, both = jax.jit(lambda *given: convolve_runs(*given, stopped))(x, kernel, state)
    both = np.asarray(both)
    for row, (count, stop) in enumerate(zip(counts, stops, strict=True)):
        first = int(np.asarray(runs.first_R)[row])
        seen = np.concatenate([state[row], x[first : first + count]])
        np.testing.assert_array_equal(both[row], seen[count:])
        np.testing.assert_array_equal(both[ROWS + row], seen[stop : stop + TAPS - 1])


def test_a_step_of_the_convolution_is_a_row_of_one_token_and_a_bias_is_added_once() -> None:
    rng = np.random.default_rng(1)
    x, kernel, state, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, CHANNELS), (CHANNELS, TAPS), (2, TAPS - 1, CHANNELS), (CHANNELS,))
    )
    one = layout([1], 16, 16)
    runs_of_one = jax.jit(lambda x, before, added: convolve_runs(x, kernel, before, one, added))
    x, state = np.asarray(x), np.asarray(state)
    for added in (None, bias):
        plus = np.zeros((1, CHANNELS), np.float32) if added is None else np.asarray(added)[None]
        y, new = map(np.asarray, jax.jit(convolve_step)(x, kernel, state, added))
        for row in range(2):
            padded, before = np.pad(x[row : row + 1], ((0, 15), (0, 0))), state[row : row + 1]
            y_T, new_R = map(np.asarray, runs_of_one(padded, before, added))
            np.testing.assert_allclose(y[row], y_T[0], rtol=1e-6, atol=1e-6)
            plain, _ = runs_of_one(padded, before, None)
            np.testing.assert_allclose(y_T, plain + plus, atol=1e-5)
            np.testing.assert_array_equal(new[row], new_R[0])
