"""Computes log-probabilities of prompt tokens, by applying the model's output head (LM head) to all
tokens of a prefill chunk.

The head runs in blocks of tokens, so that the logits of a whole chunk are never materialised
(except by `PromptScorer.logits`), and each device keeps its part of the vocabulary."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jdisagg.executor.programs import RANK, Programs
from jdisagg.executor.weights import Weights
from jdisagg.messages.step_commands import PrefillChunk, PrefillRow
from jdisagg.model_api import Shards
from jdisagg.ops.quarantine import reveal
from jdisagg.ops.token_scores import WHOLE, TokenScores, VocabularyShard, token_scores
from jdisagg.prompt.logprobs import LAST, SUM, PromptLogprobs
from jdisagg.request import MAX_TOP_LOGPROBS

# 32 MB of float32 logits for a vocabulary of 128k on one device.
BLOCK_TOKENS = 64


class PromptScorer:
    """`rows`: largest number of rows of a chunk on one dp rank."""

    def __init__(
        self, programs: Programs, weights: Weights, shards: Shards, vocabulary: int, rows: int
    ) -> None:
        self._programs, self._weights, self._shards = programs, weights, shards
        self._vocabulary, self._rows = vocabulary, rows

    def run(self, command: PrefillChunk, x: jax.Array, every_token: bool) -> tuple[jax.Array, ...]:
        """Issues the programs that compute what the rows ask for: for each token, the
        log-probability of the next token (the fields of `TokenScores`), and hidden states, float32
        [ranks, R, D]. `x` is as in `PrefillSampler.run`."""
        scores = self._scores(command, x) if _scored(command) else ()
        return (*scores, self._hidden(command, x, every_token)) if _pooled(command) else (*scores,)

    def _hidden(self, command: PrefillChunk, x: jax.Array, every_token: bool) -> jax.Array:
        stem, programs, count = self._weights.head, self._programs, self._rows
        taken = np.zeros((x.shape[0], count, x.shape[1]), np.float32)
        for row, index in _indexed(command):
            end = row.offset + len(row.tokens)
            if row.prompt_logprobs == SUM:
                taken[row.rank, index, row.offset : end] = 1
            elif row.prompt_logprobs == LAST and row.samples:
                taken[row.rank, index, end - 1 if every_token else index] = 1

        def body(leaves: tuple[jax.Array, ...], x: jax.Array, taken: jax.Array) -> Any:
            head: Any = stem.merge(leaves)
            y_TD = head.normed(reveal(x[0])).astype(jnp.float32)
            return programs.readable(jnp.matmul(taken[0], y_TD, precision="highest")[None])

        on_mesh = programs.argument(taken)

        def build() -> Callable[..., jax.Array]:
            in_specs = (stem.specs, RANK, RANK)
            return programs.compile(
                body, (stem.leaves, x, on_mesh), in_specs, programs.readable_spec
            )

        return programs.get(("hidden", x.shape[1]), build)(stem.leaves, x, on_mesh)

    def _scores(self, command: PrefillChunk, x: jax.Array) -> TokenScores:
        following = np.zeros(x.shape[:2], np.int32)
        for row in command.rows:
            span = slice(row.offset, row.offset + len(row.tokens))
            following[row.rank, span] = (*row.tokens[1:], max(row.following, 0))
        return self._program(x)(self._weights.head.leaves, x, self._programs.argument(following))

    def logits(self, row: PrefillRow, x: jax.Array) -> np.ndarray:
        """Returns the logits after each token of a row, float32 [T, V], on the host. Requires a
        mesh of one process. The call blocks, and needs device memory for the logits of the whole
        chunk."""
        stem, shards = self._weights.head, self._shards
        assert not self._programs.spans_processes

        def body(leaves: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
            return self._local_logits(leaves, x[0])[None].astype(jnp.float32)

        def build() -> Callable[..., jax.Array]:
            parts = PartitionSpec("dp", None, shards.tp or None)
            return self._programs.compile(body, (stem.leaves, x), (stem.specs, RANK), parts)

        program = self._programs.get(("prompt logits", x.shape[1]), build)
        whole = np.asarray(jax.device_get(program(stem.leaves, x)))
        span = slice(row.offset, row.offset + len(row.tokens))
        return whole[row.rank, span, : self._vocabulary]

    def _local_logits(self, leaves: tuple[jax.Array, ...], x_TD: jax.Array) -> jax.Array:
        head: Any = self._weights.head.merge(leaves)
        return head.logits(reveal(x_TD), replace(self._shards, tp=()))

    def _program(self, x: jax.Array) -> Callable[..., TokenScores]:
        stem, shards, programs = self._weights.head, self._shards, self._programs
        ranks, width, _ = x.shape
        block = min(BLOCK_TOKENS, width)
        vocabulary = self._vocabulary

        def of_block(
            leaves: tuple[jax.Array, ...], x_TD: jax.Array, token_T: jax.Array
        ) -> TokenScores:
            logits_TV = self._local_logits(leaves, x_TD)
            shard = WHOLE
            if shards.tp:
                shard = VocabularyShard(shards.tp, lax.axis_index(shards.tp) * logits_TV.shape[1])
            id_V = shard.first + jnp.arange(logits_TV.shape[1], dtype=jnp.int32)
            logits_TV = jnp.where((id_V < vocabulary)[None], logits_TV, -jnp.inf)
            return token_scores(logits_TV, token_T, shard, MAX_TOP_LOGPROBS)

        def body(leaves: tuple[jax.Array, ...], x: jax.Array, following: jax.Array) -> Any:
            padding = -width % block
            x_nTD = jnp.pad(x[0], ((0, padding), (0, 0))).reshape(-1, block, x.shape[2])
            token_nT = jnp.pad(following[0], (0, padding)).reshape(-1, block)
            scores = lax.map(lambda one: of_block(leaves, *one), (x_nTD, token_nT))
            flat = jax.tree.map(
                lambda part: part.reshape(-1, *part.shape[2:])[None, :width], scores
            )
            return programs.readable(flat)

        def build() -> Callable[..., TokenScores]:
            arguments = (stem.leaves, x, jax.ShapeDtypeStruct((ranks, width), jnp.int32))
            readable = TokenScores(*(programs.readable_spec,) * 4)  # type: ignore[arg-type]
            return programs.compile(body, arguments, (stem.specs, RANK, RANK), readable)

        return programs.get(("prompt scores", width), build)


def _scored(command: PrefillChunk) -> bool:
    asked = [row.prompt_logprobs for row in command.rows if row.prompt_logprobs is not None]
    return any(top >= 0 for top in asked)


def _pooled(command: PrefillChunk) -> bool:
    return any((row.prompt_logprobs or 0) < 0 for row in command.rows)


def _indexed(command: PrefillChunk) -> Iterator[tuple[PrefillRow, int]]:
    """Yields each row with its index among the rows of its dp rank."""
    used: Counter[int] = Counter()
    for row in command.rows:
        yield row, used[row.rank]
        used[row.rank] += 1


def read_scores(
    command: PrefillChunk, scores: Sequence[jax.Array]
) -> tuple[tuple[int, PromptLogprobs], ...]:
    """Blocks until they are computed."""
    host = [jax.device_get(part) for part in scores]
    read: list[tuple[int, PromptLogprobs]] = []
    for row, index in _indexed(command):
        top = row.prompt_logprobs
        if top is not None and top >= 0:
            read.append((row.sequence, _of_row(row, top, TokenScores(*host[:4]))))
        elif top == SUM or (top == LAST and row.samples):
            hidden = np.asarray(host[-1][row.rank, index], np.float32).tobytes()
            read.append((row.sequence, PromptLogprobs(top, hidden=hidden)))
    return tuple(read)


def _of_row(row: PrefillRow, top: int, host: TokenScores) -> PromptLogprobs:
    count = len(row.tokens) - (row.following < 0)
    at = (row.rank, slice(row.offset, row.offset + count))
    return PromptLogprobs(
        top,
        np.asarray(host.logprob[at], np.float32).tobytes(),
        np.asarray(host.rank[at], np.int32).tobytes(),
        np.asarray(host.top_ids[at][:, :top], np.int32).tobytes(),
        np.asarray(host.top_logprobs[at][:, :top], np.float32).tobytes(),
    )
