"""What does choosing a token cost, against greedy and against a decode step?

    JAX_PLATFORMS=cpu python -m benchmarks.sampling [--batches=1,8,32] [--rounds=40]
    [--vocabulary=32000]

All variants run interleaved, round by round, over logits that are nearly flat (a model of random
weights: a nucleus of most of the vocabulary), middling and peaked, at a new position each round, so
that runs with rejected winners count as often as they come. Prints milliseconds of wall clock, 10th
percentile / median / mean (on a busy machine the first is nearest the truth), and of processor
time, mean. `library argmax` is `jnp.argmax`, for comparison."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jdisagg.ops.logit_shaping import ShapingRows, logprobs, shape_logits, update_counts
from jdisagg.ops.sampling import SamplingRows, greedy, sample

_BATCHES = flags.DEFINE_list("batches", ["1", "8", "32"], "Rows of a step.")
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Rounds over all variants.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 32000, "Columns of the logits.")

SPREADS = {"flat": 0.3, "middling": 1.0, "peaked": 4.0}
PARAMETERS: dict[str, dict[str, float]] = {
    "temperature": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.5": {"top_p": 0.5},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "top_k 500": {"top_k": 500},
    "min_p 0.05": {"min_p": 0.05},
}

Variant = Callable[[jax.Array, int], object]


def rows_of(
    batch: int, first_position: int, top_k: float = 0, top_p: float = 1, min_p: float = 0
) -> SamplingRows:
    return SamplingRows(
        temperature=jnp.full(batch, 0.8, jnp.float32),
        top_k=jnp.full(batch, int(top_k), jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        min_p=jnp.full(batch, min_p, jnp.float32),
        seed=jnp.asarray(np.arange(2 * batch, dtype=np.uint32).reshape(batch, 2)),
        child=jnp.zeros(batch, jnp.int32),
        position=jnp.arange(batch, dtype=jnp.int32) + first_position,
    )


def variants(batch: int, vocabulary: int) -> dict[str, Variant]:
    jit_greedy, jit_sample, jit_argmax = (
        jax.jit(greedy),
        jax.jit(sample),
        jax.jit(lambda x: jnp.argmax(x, axis=-1)),
    )

    def sampled(parameters: dict[str, float]) -> Variant:
        rows = rows_of(batch, 0, **parameters)
        return lambda logits, turn: jit_sample(
            logits, rows._replace(position=rows.position + np.int32(turn * batch))
        )

    return {
        "library argmax": lambda logits, turn: jit_argmax(logits),
        "greedy": lambda logits, turn: jit_greedy(logits),
        **{name: sampled(parameters) for name, parameters in PARAMETERS.items()},
        "shaped, logprobs 20": shaped(batch, vocabulary),
    }


def shaped(batch: int, vocabulary: int) -> Variant:
    """Returns the whole slower program: penalties, bias, minimum length, top_p, log-probabilities
    and counts (donated)."""
    rows = rows_of(batch, 0, top_p=0.95)
    ones = jnp.ones(batch, jnp.float32)
    shaping = ShapingRows(
        presence=0.5 * ones,
        frequency=0.2 * ones,
        repetition=1.1 * ones,
        bias_ids=jnp.full((batch, 16), 5, jnp.int32),
        bias_values=jnp.ones((batch, 16), jnp.float32),
        stop_ids=jnp.full((batch, 8), 7, jnp.int32),
        min_position=jnp.full(batch, 10, jnp.int32),
    )

    def step(
        logits_BV: jax.Array, counts_BV: jax.Array, position_B: jax.Array
    ) -> tuple[jax.Array, ...]:
        shaped_BV = shape_logits(logits_BV, shaping, counts_BV, position_B)
        token_B = sample(shaped_BV, rows._replace(position=position_B))
        return (update_counts(counts_BV, token_B), token_B, *logprobs(shaped_BV, token_B, 20))

    jit_step = jax.jit(step, donate_argnums=1)
    counts = [jnp.zeros((batch, vocabulary), jnp.int32)]

    def run(logits: jax.Array, turn: int) -> tuple[jax.Array, ...]:
        counts[0], *chosen = jit_step(logits, counts[0], rows.position + np.int32(turn * batch))
        return tuple(chosen)

    return run


def measure(
    batch: int, spread: float, rounds: int, vocabulary: int
) -> dict[str, tuple[float, ...]]:
    """Returns, per variant, the 10th percentile, median and mean of wall-clock time, and mean
    processor time, in milliseconds."""
    logits = jnp.asarray(
        (np.random.default_rng(0).standard_normal((batch, vocabulary)) * spread).astype(np.float32)
    )
    runs = variants(batch, vocabulary)
    for variant in runs.values():
        jax.block_until_ready(variant(logits, 0))
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor = dict.fromkeys(runs, 0.0)
    for turn in range(1, rounds + 1):
        for name, variant in runs.items():
            wall_begun, processor_begun = time.perf_counter(), time.process_time()
            jax.block_until_ready(variant(logits, turn))
            wall[name].append(1e3 * (time.perf_counter() - wall_begun))
            processor[name] += 1e3 * (time.process_time() - processor_begun)
    return {
        name: (*np.percentile(times, (10, 50)), float(np.mean(times)), processor[name] / rounds)
        for name, times in wall.items()
    }


def main(_: list[str]) -> None:
    print(
        f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, vocabulary {_VOCABULARY.value};"
        " ms: p10 / median / mean, processor"
    )
    for batch in map(int, _BATCHES.value):
        for name, spread in SPREADS.items():
            print(f"batch {batch}, {name} logits")
            for variant, (low, median, mean, processor) in measure(
                batch, spread, _ROUNDS.value, _VOCABULARY.value
            ).items():
                print(
                    f"  {variant:24}{low:8.3f} /{median:8.3f} /{mean:8.3f} {processor:9.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    app.run(main)
