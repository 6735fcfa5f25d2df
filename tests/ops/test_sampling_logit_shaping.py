"""Penalties, bias, min_tokens and log-probabilities against a token-by-token reference in
float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import logit_shaping
from jdisagg.ops.logit_shaping import ShapingRows

pytestmark = pytest.mark.one_device

V = 400
shape_logits = jax.jit(logit_shaping.shape_logits)
logprobs = jax.jit(logit_shaping.logprobs, static_argnums=2)
update_counts = jax.jit(logit_shaping.update_counts)


def neutral(rows: int, **columns: np.ndarray) -> ShapingRows:
    values = {
        "presence": np.zeros(rows, np.float32),
        "frequency": np.zeros(rows, np.float32),
        "repetition": np.ones(rows, np.float32),
        "bias_ids": np.full((rows, 4), -1, np.int32),
        "bias_values": np.zeros((rows, 4), np.float32),
        "stop_ids": np.full((rows, 3), -1, np.int32),
        "min_position": np.zeros(rows, np.int32),
    }
    return ShapingRows(**{name: jnp.asarray(value) for name, value in (values | columns).items()})


def reference(
    logits: np.ndarray,
    rows: ShapingRows,
    row: int,
    prompt: list[int],
    generated: list[int],
    position: int,
) -> np.ndarray:
    out = logits.astype(np.float64).copy()
    parameters = {name: np.asarray(value)[row] for name, value in rows._asdict().items()}
    for token, bias in zip(parameters["bias_ids"], parameters["bias_values"], strict=True):
        if token >= 0:
            out[token] += bias
    for token in set(prompt) | set(generated):
        out[token] = (
            out[token] / parameters["repetition"]
            if out[token] > 0
            else out[token] * parameters["repetition"]
        )
    for token in set(generated):
        out[token] -= parameters["frequency"] * generated.count(token) + parameters["presence"]
    if position < parameters["min_position"]:
        out[[token for token in parameters["stop_ids"] if token >= 0]] = -np.inf
    return out


def test_logits_are_shaped_as_the_reference_does_token_by_token() -> None:
    random = np.random.default_rng(0)
    rows = 12
    prompts = [random.integers(V, size=30).tolist() for _ in range(rows)]
    outputs = [random.integers(40, size=random.integers(0, 50)).tolist() for _ in range(rows)]
    counts = np.stack(
        [logit_shaping.token_counts(p, o, V) for p, o in zip(prompts, outputs, strict=True)]
    )
    position = np.array([30 + len(output) for output in outputs], np.int32)
    shaping = neutral(
        rows,
        presence=random.uniform(-2, 2, rows).astype(np.float32),
        frequency=random.uniform(-2, 2, rows).astype(np.float32),
        repetition=random.uniform(0.5, 2, rows).astype(np.float32),
        bias_ids=np.array(
            [[*random.choice(V, 2, replace=False), -1, -1] for _ in range(rows)], np.int32
        ),
        bias_values=random.uniform(-100, 100, (rows, 4)).astype(np.float32),
        stop_ids=random.integers(-1, V, (rows, 3)).astype(np.int32),
        min_position=np.full(rows, 55, np.int32),
    )
    logits = random.standard_normal((rows, V)).astype(np.float32) * 5
    shaped = np.asarray(
        shape_logits(jnp.asarray(logits), shaping, jnp.asarray(counts), jnp.asarray(position))
    )
    for row in range(rows):
        expected = reference(
            logits[row], shaping, row, prompts[row], outputs[row], int(position[row])
        )
        np.testing.assert_allclose(shaped[row], expected, rtol=1e-5, atol=1e-5)


def test_a_neutral_row_keeps_its_logits_bit_for_bit() -> None:
    logits = np.random.default_rng(1).standard_normal((3, V)).astype(np.float32)
    logits[:, -8:] = -np.inf
    counts = np.stack([logit_shaping.token_counts([1, 2], [2, 2, 5], V)] * 3)
    shaped = shape_logits(
        jnp.asarray(logits), neutral(3), jnp.asarray(counts), jnp.full(3, 9, jnp.int32)
    )
    assert (np.asarray(shaped) == logits).all()


def test_lists_of_ids_may_be_empty() -> None:
    empty = neutral(
        2,
        bias_ids=np.zeros((2, 0), np.int32),
        bias_values=np.zeros((2, 0), np.float32),
        stop_ids=np.zeros((2, 0), np.int32),
    )
    logits = jnp.ones((2, V), jnp.float32)
    assert (
        shape_logits(logits, empty, jnp.zeros((2, V), jnp.int32), jnp.zeros(2, jnp.int32)) == logits
    ).all()


def test_min_tokens_masks_the_stop_ids_until_the_position_is_reached() -> None:
    shaping = neutral(
        1, stop_ids=np.array([[7, -1, 9]], np.int32), min_position=np.array([12], np.int32)
    )
    counts, logits = jnp.zeros((1, V), jnp.int32), jnp.ones((1, V), jnp.float32)
    below = np.asarray(shape_logits(logits, shaping, counts, jnp.asarray([11], jnp.int32)))[0]
    assert np.flatnonzero(below == -np.inf).tolist() == [7, 9]
    assert np.isfinite(shape_logits(logits, shaping, counts, jnp.asarray([12], jnp.int32))).all()


def test_counts_updated_token_by_token_equal_counts_built_from_the_sequence() -> None:
    random = np.random.default_rng(2)
    prompt, output = random.integers(V, size=10).tolist(), random.integers(20, size=30).tolist()
    counts = jnp.asarray(np.stack([logit_shaping.token_counts(prompt, [], V)] * 2))
    for token in output:
        counts = update_counts(
            counts, jnp.asarray([token, token], jnp.int32), jnp.asarray([True, False])
        )
    assert (np.asarray(counts[0]) == logit_shaping.token_counts(prompt, output, V)).all()
    assert (np.asarray(counts[1]) == logit_shaping.token_counts(prompt, [], V)).all()
    assert (update_counts(counts, jnp.asarray([-1, -1], jnp.int32)) == counts).all()


@pytest.mark.parametrize("top", [0, 1, 20])
def test_logprobs_are_those_of_a_float64_log_softmax_with_ties_by_id(top: int) -> None:
    random = np.random.default_rng(3)
    logits = random.integers(-8, 9, (5, 6000)).astype(np.float32)
    logits[:, 5990:] = -np.inf
    tokens = np.array([0, 5, 7, 5989, -1], np.int32)
    chosen, ids, values = (
        np.asarray(x) for x in logprobs(jnp.asarray(logits), jnp.asarray(tokens), top)
    )
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top]
    assert (ids == order).all()
    np.testing.assert_allclose(values, np.take_along_axis(exact, order, axis=1), atol=2e-6)
    np.testing.assert_allclose(chosen[:4], exact[np.arange(4), tokens[:4]], rtol=1e-6)
    assert np.isnan(chosen[4])


@pytest.mark.parametrize("vocabulary", [64, V, 1001])
def test_a_masks_first_id_is_the_lowest_bit_of_its_first_word(vocabulary: int) -> None:
    random = np.random.default_rng(3)
    logits = random.standard_normal((5, vocabulary)).astype(np.float32)
    allowed = random.random((5, vocabulary)) < 0.5
    padded = np.pad(allowed, ((0, 0), (0, -vocabulary % 32)))
    words = np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    masked = jax.jit(logit_shaping.mask_logits)(jnp.asarray(logits), jnp.asarray(words))
    np.testing.assert_array_equal(masked, np.where(allowed, logits, -np.inf))
