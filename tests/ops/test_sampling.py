"""Sampling against a plain reference: numpy, float64, sorting, and its own hash in Python
integers. `test_filtered_draw.py` holds the kernel of GPUs against the form that is tested here."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from jdisagg.ops import sampling
from jdisagg.ops.sampling import INVALID_TOKEN, SamplingRows

sample = jax.jit(sampling.sample, static_argnames="platform")
greedy = jax.jit(sampling.greedy, static_argnames="platform")


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    child: int = 0
    position: int = 1


def pack(rows: list[Row]) -> SamplingRows:
    def column(name: str, dtype: type) -> jax.Array:
        return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

    seeds = np.array([[row.seed & 0xFFFFFFFF, row.seed >> 32] for row in rows], np.uint32)
    floats = (column(name, np.float32) for name in ("temperature", "top_p", "min_p"))
    temperature, top_p, min_p = floats
    return SamplingRows(
        temperature,
        column("top_k", np.int32),
        top_p,
        min_p,
        jnp.asarray(seeds),
        column("child", np.int32),
        column("position", np.int32),
    )


def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


@functools.cache
def reference_exponential(row: Row, vocabulary: int) -> np.ndarray:
    key = []
    for start in (0x243F6A88, 0xB7E15162):
        x = start
        for word in (row.seed & 0xFFFFFFFF, row.seed >> 32, row.child, row.position):
            x = mix((x * 0x9E3779B1 + word) & 0xFFFFFFFF)
        key.append(x)
    x = (np.arange(vocabulary, dtype=np.uint64) * 0x9E3779B1 + key[0]) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13 ^ np.uint64(key[1])) * 0xC2B2AE35 & 0xFFFFFFFF
    bits = x ^ x >> 16
    return -np.log1p(-((bits >> 1) + 0.5) / 2.0**31)


def reference_set(logits: np.ndarray, row: Row) -> np.ndarray:
    """Returns the tokens that the filters leave, by sorting. Ties are kept or dropped together."""
    weight = np.exp((logits - logits.max()) / row.temperature)
    keep = np.isfinite(logits)
    if row.top_k:
        keep &= logits >= np.sort(logits)[::-1][min(row.top_k, len(logits)) - 1]
    order = np.argsort(-logits, kind="stable")
    mass = np.where(keep, weight, 0)[order]
    before = (np.cumsum(mass) - mass) / mass.sum()
    # the first of each group of equal logits
    _, first = np.unique(-logits[order], return_index=True)
    group = np.searchsorted(first, np.arange(len(logits)), side="right") - 1
    inside = np.empty(len(logits), bool)
    inside[order] = (before[first][group] < row.top_p) if row.top_p < 1 else True
    return keep & (inside | (logits == logits.max())) & (weight >= row.min_p)


def acceptable(logits: np.ndarray, row: Row) -> set[int]:
    """Returns the reference's choice, and any that float32 rounding could make instead, usually one
    token."""
    logits = logits.astype(np.float64)
    if row.temperature == 0:
        return {int(np.argmax(logits))}
    score = (logits - logits.max()) / row.temperature - np.log(
        reference_exponential(replace(row, top_k=0, top_p=1, min_p=0, temperature=1), len(logits))
    )
    strict = reference_set(
        logits, replace(row, top_p=row.top_p * (1 - 1e-5), min_p=min(1, row.min_p * (1 + 1e-5)))
    )
    loose = reference_set(
        logits, replace(row, top_p=min(1, row.top_p * (1 + 1e-5)), min_p=row.min_p * (1 - 1e-5))
    )
    return set(
        np.flatnonzero(
            loose & (score > score[strict].max() - 2e-4 / min(1, row.temperature))
        ).tolist()
    )


BATCH, VOCABULARY = 176, 2048


def choose(logits: np.ndarray, rows: list[Row]) -> jax.Array:
    """Padding to one shape changes no token, and the tests share one program."""
    count, width = logits.shape
    large = width > VOCABULARY
    more = (0, 0 if large else BATCH - count), (0, 0 if large else VOCABULARY - width)
    padded = np.pad(logits, more, constant_values=-np.inf)
    tokens = sample(jnp.asarray(padded), pack([*rows, *[Row()] * more[0][1]]))
    return tokens[: len(rows)]


def check(logits_BV: np.ndarray, rows: list[Row]) -> None:
    tokens = np.asarray(choose(logits_BV, rows))
    sure = 0
    for token, logits, row in zip(tokens, logits_BV, rows, strict=True):
        allowed = acceptable(logits, row)
        assert int(token) in allowed, (row, token, allowed)
        sure += len(allowed) == 1
    assert sure >= 0.8 * len(rows)  # else the comparison shows nothing


FILTERS = [
    Row(),
    Row(top_p=0.95),
    Row(top_p=0.5),
    Row(top_p=0.01),
    Row(top_p=1e-6),
    Row(top_p=1e-44),
    Row(top_k=1),
    Row(top_k=5),
    Row(top_k=64),
    Row(top_k=65),
    Row(top_k=700),
    Row(top_k=2**31 - 1),
    Row(min_p=0.05),
    Row(min_p=1.0),
    Row(top_k=40, top_p=0.9),
    Row(top_k=300, top_p=0.7, min_p=0.1),
    Row(temperature=0.01),
    Row(temperature=0.01, top_p=0.9),
    Row(temperature=100.0, top_p=0.9),
    Row(temperature=0.0, top_p=0.3, top_k=3, min_p=0.9),
    Row(temperature=1e-30),
    Row(temperature=0.7, top_p=0.95, min_p=0.02),
]


@pytest.mark.parametrize("spread", [0.02, 1.0, 8.0], ids=["flat", "middling", "peaky"])
def test_every_filter_agrees_with_the_sorting_reference(spread: float) -> None:
    random = np.random.default_rng(int(spread * 100))
    rows = [
        replace(row, seed=int(random.integers(2**63)), position=int(random.integers(5000)))
        for row in FILTERS
        for _ in range(6)
    ]
    check((random.standard_normal((len(rows), 2048)) * spread).astype(np.float32), rows)


def test_a_nucleus_of_most_of_a_large_vocabulary_agrees_with_the_reference() -> None:
    random = np.random.default_rng(1)
    rows = [Row(temperature=0.8, top_p=0.95, seed=9, position=p) for p in range(24)]
    check((random.standard_normal((24, 32000)) * 0.3).astype(np.float32), rows)


def test_equal_logits_stand_or_fall_together() -> None:
    random = np.random.default_rng(2)
    rows = [replace(row, seed=5, position=p) for row in FILTERS for p in range(8)]
    check(random.integers(-3, 4, (len(rows), 512)).astype(np.float32), rows)
    tied = np.array([[2, 1, 1, 1, 0, 0, 0, 0]] * BATCH, np.float32)
    tokens = np.asarray(choose(tied, [Row(top_k=2, position=p) for p in range(BATCH)]))
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_logits_of_minus_infinity_are_never_chosen() -> None:
    random = np.random.default_rng(3)
    rows = [replace(row, seed=7, position=p) for row in FILTERS for p in range(4)]
    logits = random.standard_normal((len(rows), 640)).astype(np.float32)
    logits[random.random(logits.shape) < 0.9] = -np.inf
    logits[:, 3] = 0
    check(logits, rows)


def test_greedy_takes_the_smallest_of_the_largest() -> None:
    logits = np.array([[0, 3, 3, 1, 0], [-1, -2, -1, -9, -np.inf]], np.float32)
    for platform in ("cpu", "tpu"):
        assert greedy(jnp.asarray(logits), platform=platform).tolist() == [1, 0]
    assert choose(logits, [Row(temperature=0)] * 2).tolist() == [1, 0]


def test_greedy_rows_of_a_mixed_batch_are_greedy_even_when_probabilities_tie_in_float32() -> None:
    logits = np.zeros((2, 200), np.float32)
    logits[:, 150] = 1e-9
    assert greedy(jnp.asarray(logits)).tolist() == [150, 150]
    assert choose(logits, [Row(temperature=0), Row()])[0] == 150


def test_a_token_does_not_depend_on_batch_slot_or_padding() -> None:
    random = np.random.default_rng(4)
    rows = [replace(row, seed=11, position=p) for p, row in enumerate(FILTERS)]
    logits = random.standard_normal((len(rows), 1000)).astype(np.float32)
    together = np.asarray(sample(jnp.asarray(logits), pack(rows)))
    backwards = np.asarray(sample(jnp.asarray(logits[::-1].copy()), pack(rows[::-1])))[::-1]
    padded = np.pad(logits, ((0, 0), (0, 48)), constant_values=-np.inf)
    assert (
        together.tolist()
        == backwards.tolist()
        == np.asarray(sample(jnp.asarray(padded), pack(rows))).tolist()
    )
    alone = [
        int(sample(jnp.asarray(logits[i : i + 1]), pack([row]))[0]) for i, row in enumerate(rows)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_without_a_finite_largest_logit_gives_the_invalid_token_and_spares_the_others(
    poison: float,
) -> None:
    random = np.random.default_rng(5)
    rows = [replace(row, seed=1, position=p) for p, row in enumerate(FILTERS)]
    logits = random.standard_normal((len(rows), 300)).astype(np.float32)
    clean = np.asarray(choose(logits, rows))
    clean_greedy = np.asarray(greedy(jnp.asarray(logits)))
    bad = np.arange(0, len(rows), 2)
    logits[bad, random.integers(300, size=len(bad))] = poison
    logits[0] = -np.inf
    for tokens, before in (
        (choose(logits, rows), clean),
        (greedy(jnp.asarray(logits)), clean_greedy),
    ):
        assert (np.asarray(tokens)[bad] == INVALID_TOKEN).all()
        assert (np.delete(np.asarray(tokens), bad) == np.delete(before, bad)).all()


def test_tokens_come_with_the_frequencies_of_the_softmax() -> None:
    count = 40_000
    logits = np.array([1.5, 0.2, -1.0, 0.2, -4.0, 0.9, -np.inf, 0.0], np.float32)
    rows = SamplingRows(
        temperature=jnp.full(count, 0.7, jnp.float32),
        top_k=jnp.zeros(count, jnp.int32),
        top_p=jnp.ones(count, jnp.float32),
        min_p=jnp.zeros(count, jnp.float32),
        seed=jnp.broadcast_to(jnp.asarray([[3, 4]], jnp.uint32), (count, 2)),
        child=jnp.arange(count, dtype=jnp.int32) % 4,
        position=jnp.arange(count, dtype=jnp.int32) // 4,
    )
    tokens = np.asarray(sample(jnp.broadcast_to(jnp.asarray(logits)[None], (count, 8)), rows))
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum() * count
    seen = np.bincount(tokens, minlength=8)
    possible = expected > 0
    assert (seen[~possible] == 0).all()
    # 6 degrees of freedom: p = 4e-5
    assert ((seen - expected)[possible] ** 2 / expected[possible]).sum() < 30


def test_children_of_one_request_draw_independently() -> None:
    logits = jnp.zeros((400, 4), jnp.float32)
    draws = [
        np.asarray(sample(logits, pack([Row(seed=8, child=child, position=p) for p in range(400)])))
        for child in range(3)
    ]
    for other in draws[1:]:
        assert abs((draws[0] == other).mean() - 0.25) < 0.1


def test_sampling_works_on_the_shards_of_a_mesh() -> None:
    random = np.random.default_rng(6)
    rows = [replace(row, seed=2, position=p) for p, row in enumerate(FILTERS[:16])]
    logits = jnp.asarray(random.standard_normal((16, 384)).astype(np.float32))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    for check_vma in (False, True):
        sharded = jax.shard_map(
            sampling.sample,
            mesh=mesh,
            in_specs=PartitionSpec("dp"),
            out_specs=PartitionSpec("dp"),
            check_vma=check_vma,
        )
        assert (
            np.asarray(jax.jit(sharded)(logits, pack(rows))).tolist()
            == np.asarray(sample(logits, pack(rows))).tolist()
        )


def test_a_gpu_runs_the_kernel_of_filters_only_if_a_row_has_a_filter() -> None:
    """The kernel, which XLA cannot compute and select, is in a branch, and nowhere else."""
    traced = sample.trace(jnp.zeros((4, 400)), pack([Row()] * 4), platform="gpu")

    def calls(jaxpr: core.Jaxpr, inside: bool) -> list[bool]:
        found = []
        for equation in jaxpr.eqns:
            conditional = inside or equation.primitive.name == "cond"
            if equation.primitive.name == "pallas_call":
                found.append(inside)
            else:
                for inner in core.jaxprs_in_params(equation.params):
                    found += calls(inner, conditional)
        return found

    assert calls(traced.jaxpr.jaxpr, False) == [True]
