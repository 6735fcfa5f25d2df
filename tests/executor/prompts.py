"""Prompts in chunks of a prefill mesh, and what a dense pass says of them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.clock import MonotonicClock
from jdisagg.config import Mode
from jdisagg.engine.replica import build_executor
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import (
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    SampledToken,
    SampleSpec,
)
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import SamplingParams
from jdisagg.transfer.in_process import InProcessChannel
from models.checkpoint import load_model
from tests.shapes import CHUNK, CONTEXT, LAYER_GROUPS, PREFILL_PAGE, instance

TOP = 5
NEAR = 1e-4  # of logarithms as far as -20, in float32
GREEDY = SampleSpec(0, SamplingParams(temperature=0.0, logprobs=TOP))


def prefiller(directory: Path, layout: str, groups: int = LAYER_GROUPS) -> MeshExecutor:
    shape = Layout.parse(layout)
    loaded = load_model(str(directory), shape, jax.devices()[: shape.devices])
    config = instance(layout, pages_per_rank=24, layer_groups=groups)
    role, channel = MeshRole(True, False, emit=True), InProcessChannel(MonotonicClock())
    how = (Mode.DISAGGREGATED, loaded, role, channel, CONTEXT, groups)
    return build_executor("p", config, *how)


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(5, 1000, tokens).tolist())


def part(
    sequence: int,
    rank: int,
    offset: int,
    ids: tuple[int, ...],
    start: int,
    end: int,
    *samples: SampleSpec,
) -> PrefillRow:
    pages = tuple(range(8 * (sequence % 2), 8 * (sequence % 2) + -(-end // PREFILL_PAGE)))
    return PrefillRow(sequence, rank, offset, ids[start:end], start, pages, samples)


def run(executor: MeshExecutor, *rows: PrefillRow) -> PrefillResult:
    result = executor.issue_and_wait(PrefillChunk(1, CHUNK, rows))
    assert isinstance(result, PrefillResult)
    return result


@cache
def dense(directory: Path) -> Callable[[np.ndarray], jax.Array]:
    """Returns a program: logarithms of probabilities of a padded prompt."""
    model = load_model(str(directory), Layout(), jax.devices()[-1:]).model
    return jax.jit(
        lambda tokens_T: jax.nn.log_softmax(
            model(tokens_T, jnp.arange(tokens_T.shape[0]), dense_causal_attend)
        )
    )


def wanted(directory: Path, ids: tuple[int, ...]) -> np.ndarray:
    return np.asarray(dense(directory)(np.pad(np.array(ids, np.int32), (0, 128 - len(ids)))))


def check(directory: Path, ids: tuple[int, ...], sampled: SampledToken) -> None:
    want_V = wanted(directory, ids)[len(ids) - 1]
    assert sampled.token == want_V.argmax()
    assert sampled.logprobs is not None and len(sampled.logprobs.top) == TOP
    np.testing.assert_allclose(sampled.logprobs.logprob, want_V.max(), atol=2e-5)
    for token, logprob in sampled.logprobs.top:
        np.testing.assert_allclose(logprob, want_V[token], atol=2e-5)


def check_prompt(directory: Path, ids: tuple[int, ...], found: PromptLogprobs) -> None:
    check_scores(wanted(directory, ids), ids, found)


def check_scores(want_TV: np.ndarray, ids: tuple[int, ...], found: PromptLogprobs) -> None:
    """`want_TV`: logarithms of probabilities."""
    assert len(found) == len(ids) - 1
    for want_V, after, token in zip(want_TV, ids[1:], found, strict=False):
        np.testing.assert_allclose(token.logprob, want_V[after], atol=NEAR)
        near = np.abs(want_V - want_V[after]) < 2 * NEAR
        larger = int(np.sum(want_V > want_V[after]))
        assert abs(token.rank - 1 - larger) <= near.sum() - 1
        likely = np.sort(want_V)[::-1][: len(token.top)]
        np.testing.assert_allclose([value for _, value in token.top], likely, atol=NEAR)
        for token_id, value in token.top:
            np.testing.assert_allclose(value, want_V[token_id], atol=NEAR)
