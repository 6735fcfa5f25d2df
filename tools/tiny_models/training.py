"""The training loop of the tiny models: packs the endless corpus into rows and trains on them.

Deterministic: the same seed, steps and versions give the same weights on the same machine. In the
last part of the run a row is as long as the model's context, so that all positions are trained.
Uses Flax NNX and Optax on one device, and donates parameters and optimizer state."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from tokenizers import Tokenizer

from jdisagg.errors import ConfigError
from tools.tiny_models.corpus import documents
from tools.tiny_models.network import PackedRows
from tools.tiny_models.stories import STORIES

_POOL_DOCUMENTS = 256
_IMBALANCE_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning-rate schedule and batch sizes. The rate warms up, stays constant, and decays
    linearly over `end_share`, the last fraction of the steps.

    A batch has as many rows of `row_tokens` tokens as fit into `tokens_per_step`. During the decay
    a row is as long as the model's context. Steps before the decay do not depend on `steps`, so a
    run can be resumed with a larger `steps` and gives the same result as an uninterrupted run."""

    steps: int
    seed: int = 0
    tokens_per_step: int = 1056
    row_tokens: int = 352
    matrix_rate: float = 0.02
    other_rate: float = 2e-3
    warmup_steps: int = 60
    end_share: float = 0.25
    seconds_at_most: float = 3600.0

    @property
    def end_begins(self) -> int:
        return self.steps - int(self.steps * self.end_share)

    def rate(self, peak: float) -> optax.Schedule:
        start = optax.linear_schedule(0.0, peak, self.warmup_steps)
        end = optax.linear_schedule(
            peak, 0.0, max(1, self.steps - self.end_begins), self.end_begins
        )
        return lambda count: jnp.minimum(start(count), end(count))


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """`told` are the means of what the objective returns, over the steps since the last report."""

    step: int
    told: tuple[float, ...]
    seconds: float


class Network(Protocol):
    """A model that is trained.

    Attributes:
        joins: Whether a row is one sequence, although it has several documents.
    """

    @property
    def context_tokens(self) -> int: ...
    @property
    def joins(self) -> bool: ...
    def __call__(self, rows: PackedRows) -> tuple[jax.Array, jax.Array]:
        """Returns logits, float32 [R, T, V], and the load imbalance of the router."""
        ...


_N = TypeVar("_N", bound=Network)
# Of the parameters that are trained, of those that are not, and of rows: what is minimised, and the
# figures that are told.
Objective = Callable[[nnx.State, nnx.State, PackedRows], tuple[jax.Array, jax.Array]]


def train(
    network: _N,
    tokenizer: Tokenizer,
    schedule: Schedule,
    on_progress: Callable[[TrainingProgress, _N], None],
    every: int = 100,
    keep: Path | None = None,
) -> _N:
    """Trains a `Network` from its random weights. Tells the loss and the imbalance (see `fit`)."""
    graph, parameters = nnx.split(network)
    weights_V = jnp.asarray(token_weights(tokenizer))

    def objective(
        parameters: nnx.State, _: nnx.State, rows: PackedRows
    ) -> tuple[jax.Array, jax.Array]:
        logits_RTV, imbalance = nnx.merge(graph, parameters)(rows)
        weighted = mean_loss(logits_RTV, rows.targets, weights_V)
        loss = mean_loss(logits_RTV, rows.targets)
        return weighted + _IMBALANCE_WEIGHT * imbalance, jnp.stack((loss, imbalance))

    def report(progress: TrainingProgress, parameters: nnx.State) -> None:
        on_progress(progress, nnx.merge(graph, parameters))

    packed = batches(network, tokenizer, schedule)
    trained = fit(parameters, nnx.State({}), objective, packed, schedule, report, every, keep)
    return nnx.merge(graph, trained)


def fit(
    parameters: nnx.State,
    frozen: nnx.State,
    objective: Objective,
    packed: Iterator[PackedRows],
    schedule: Schedule,
    on_progress: Callable[[TrainingProgress, nnx.State], None],
    every: int = 100,
    keep: Path | None = None,
) -> nnx.State:
    """The training loop. `frozen` are parameters that do not change. Calls `on_progress` after
    every `every` steps and after the last step. Stops early after `schedule.seconds_at_most`.

    `keep` is a file for the training state, which is saved at each call of `on_progress`. If the
    file exists, training resumes from the saved state."""
    optimizer = optimizer_of(schedule)

    def step(parameters: nnx.State, state: optax.OptState, frozen: nnx.State, rows: PackedRows):
        gradients, told = jax.grad(objective, has_aux=True)(parameters, frozen, rows)
        with jax.numpy_dtype_promotion("standard"):  # Optax counts on it
            updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, told

    run_step = jax.jit(step, donate_argnums=(0, 1))
    state = jax.jit(optimizer.init)(parameters)
    done = 0
    if keep is not None and keep.exists():
        done, (parameters, state) = _read_state(keep, (parameters, state))
    began = time.monotonic()
    recent: list[jax.Array] = []
    for number, rows in enumerate(islice(packed, done, None), start=done + 1):
        parameters, state, told = run_step(parameters, state, frozen, rows)
        recent.append(told)
        last = number == schedule.steps or time.monotonic() - began > schedule.seconds_at_most
        if number % every == 0 or last:
            means = np.mean(np.asarray(jax.device_get(recent)), axis=0)
            if keep is not None:
                _write_state(keep, number, (parameters, state))
            seconds = time.monotonic() - began
            on_progress(TrainingProgress(number, tuple(map(float, means)), seconds), parameters)
            recent.clear()
        if last:
            break
    return parameters


def mean_loss(
    logits_RTV: jax.Array, targets_RT: jax.Array, weights_V: jax.Array | None = None
) -> jax.Array:
    """Returns the weighted mean cross-entropy, in nats, over all tokens that have a target."""
    known_RT = jnp.maximum(targets_RT, 0)
    losses_RT = optax.softmax_cross_entropy_with_integer_labels(logits_RTV, known_RT)
    weights_RT = (targets_RT >= 0).astype(jnp.float32) * (
        1.0 if weights_V is None else weights_V[known_RT]
    )
    return jnp.sum(losses_RT * weights_RT) / jnp.sum(weights_RT)


def token_weights(tokenizer: Tokenizer) -> np.ndarray:
    """Returns each token's weight in the loss: four for names, two for other words that recur in a
    story, and one otherwise. A model learns common phrases early. It learns late which character
    did what, which makes a story coherent."""
    weights_V = np.ones(tokenizer.get_vocab_size(), np.float32)
    known = STORIES.words
    for words, weight in ((known.remembered, 2.0), (known.girls + known.boys, 4.0)):
        for word in words:
            for written in (word, " " + word):
                ids = tokenizer.encode(written, add_special_tokens=False).ids
                weights_V[ids[:1]] = weight
    return weights_V


def held_out_losses(
    network: Network, tokenizer: Tokenizer, seed: int, row_count: int = 64
) -> dict[str, float]:
    """Returns the loss on held-out text, in nats per token, of the network and of two baselines:
    unigram and bigram counts."""
    graph, parameters = nnx.split(network)
    evaluate = jax.jit(
        lambda parameters, rows: mean_loss(nnx.merge(graph, parameters)(rows)[0], rows.targets)
    )
    context = network.context_tokens
    rows_of = packed_rows(encoded(tokenizer, documents(seed, held_out=True)), context)
    held_out = [_rows_for(network, rows_of, 4) for _ in range(row_count // 4)]
    loss = float(np.mean([float(evaluate(parameters, rows)) for rows in held_out]))
    rows_of = packed_rows(encoded(tokenizer, documents(seed)), context)
    counts = np.zeros((tokenizer.get_vocab_size(),) * 2)
    for _ in range(1000):
        row = next(rows_of)
        known = row.targets >= 0
        np.add.at(counts, (np.asarray(row.tokens)[known], np.asarray(row.targets)[known]), 1)
    once = (counts.sum(0) + 0.1) / (counts.sum() + 0.1 * len(counts))
    twice = (counts + 5 * once[None, :]) / (counts.sum(1, keepdims=True) + 5)
    pairs = [
        (np.asarray(rows.tokens)[rows.targets >= 0], np.asarray(rows.targets)[rows.targets >= 0])
        for rows in held_out
    ]
    before, after = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return {
        "model": loss,
        "bigram": float(-np.log(twice[before, after]).mean()),
        "unigram": float(-np.log(once[after]).mean()),
    }


def encoded(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[list[int]]:
    """Yields the token ids of each document, `<s>` first."""
    for text in texts:
        yield tokenizer.encode(text).ids


def packed_rows(sequences: Iterator[list[int]], row_tokens: int) -> Iterator[PackedRows]:
    """Yields rows of whole documents as NumPy arrays [T]. Each row starts with the document that
    has waited longest, and is filled up with other waiting documents, the longest that fits first.
    Documents longer than a row are dropped."""
    pool: list[list[int]] = []
    while True:
        while len(pool) < _POOL_DOCUMENTS:
            ids = next(sequences)
            if len(ids) <= row_tokens:
                pool.append(ids)
        tokens, documents, positions = (np.zeros(row_tokens, np.int32) for _ in range(3))
        targets = np.full(row_tokens, -1, np.int32)
        start, count = 0, 0
        # The oldest comes first, so that none waits forever.
        chosen: int | None = 0
        while chosen is not None:
            ids = pool.pop(chosen)
            stop, count = start + len(ids), count + 1
            tokens[start:stop], targets[start : stop - 1] = ids, ids[1:]
            documents[start:stop], positions[start:stop] = count, np.arange(len(ids))
            start, room = stop, row_tokens - stop
            chosen = max(
                (i for i, ids in enumerate(pool) if len(ids) <= room),
                key=lambda i: len(pool[i]),
                default=None,
            )
        yield PackedRows(tokens, targets, documents, positions)  # type: ignore[arg-type]


def batches(network: Network, tokenizer: Tokenizer, schedule: Schedule) -> Iterator[PackedRows]:
    sequences = encoded(tokenizer, documents(schedule.seed))
    parts = (
        (schedule.row_tokens, schedule.end_begins),
        (network.context_tokens, schedule.steps - schedule.end_begins),
    )
    for row_tokens, steps in parts:
        rows_of = packed_rows(sequences, row_tokens)
        for _ in range(steps):
            yield _rows_for(network, rows_of, max(1, schedule.tokens_per_step // row_tokens))


def joined(row: PackedRows) -> PackedRows:
    """Makes the documents of a row one sequence, in which `<s>` follows an end."""
    tokens, there = np.asarray(row.tokens), np.asarray(row.documents) > 0
    targets = np.where(np.append(there[1:], False), np.append(tokens[1:], 0), -1)
    positions = np.arange(len(tokens), dtype=np.int32)
    return PackedRows(tokens, targets.astype(np.int32), np.ones_like(tokens), positions)  # type: ignore[arg-type]


def _rows_for(network: Network, rows_of: Iterator[PackedRows], count: int) -> PackedRows:
    rows = [joined(row) if network.joins else row for row in islice(rows_of, count)]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)


def optimizer_of(schedule: Schedule) -> optax.GradientTransformation:
    """Returns the optimizer: Muon (Jordan et al., 2024) for the layers' matrices, which halves the
    text needed, and AdamW for embedding, router and norms."""
    return optax.partition(
        {
            "matrix": optax.contrib.muon(schedule.rate(schedule.matrix_rate), weight_decay=0.02),
            "other": optax.adamw(schedule.rate(schedule.other_rate), b2=0.98, weight_decay=0.0),
        },
        lambda parameters: jax.tree_util.tree_map_with_path(_kind, parameters),
    )


def _kind(path: tuple[object, ...], leaf: jax.Array) -> str:
    name = jax.tree_util.keystr(path)
    return (
        "matrix" if leaf.ndim == 2 and "embedding" not in name and "router" not in name else "other"
    )


def _write_state(file: Path, step: int, state: tuple[nnx.State, optax.OptState]) -> None:
    partial = file.with_suffix(".partial.npz")
    np.savez(partial, np.asarray(step), *(np.asarray(leaf) for leaf in jax.tree.leaves(state)))
    partial.replace(file)


def _read_state(
    file: Path, like: tuple[nnx.State, optax.OptState]
) -> tuple[int, tuple[nnx.State, optax.OptState]]:
    try:
        with np.load(file) as kept:
            step, *leaves = (kept[f"arr_{number}"] for number in range(len(kept.files)))
        return int(step), jax.tree.unflatten(
            jax.tree.structure(like), [jnp.asarray(leaf) for leaf in leaves]
        )
    except (OSError, ValueError, KeyError, AttributeError, EOFError, BadZipFile) as error:
        raise ConfigError(
            f"{file} holds no state of this training ({error}); give the file that it was kept in,"
            " or a new one"
        ) from error
