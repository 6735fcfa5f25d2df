"""A prefill's last layer is computed for the rows that sample alone, and their logits are those of
a dense pass."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, Mode
from jdisagg.engine.replica import build_replica
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.prefill_program import ChunkForm
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import (
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    SampledToken,
    SampleSpec,
)
from jdisagg.model_api import Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.request import SamplingParams
from jdisagg.transfer.in_process import InProcessChannel
from models.checkpoint import load_model
from tests.end_to_end.clusters import LLAMA, MOE

GOLDEN = Path(__file__).parents[1] / "golden"
CHUNK, PAGE, TOP = 64, 8, 5
GREEDY = SampleSpec(0, SamplingParams(temperature=0.0, logprobs=TOP))
OTHER = SampleSpec(1, SamplingParams(temperature=0.0, logprobs=TOP))


def prefiller(directory: Path, layout: str, groups: int = 2) -> MeshExecutor:
    shape = Layout.parse(layout)
    loaded = load_model(str(directory), shape, jax.devices()[: shape.devices])
    config = InstanceConfig(
        layout=shape,
        page_size=PAGE,
        pages_per_rank=40,
        slots_per_rank=2,
        chunk_tokens=CHUNK,
        min_chunk_tokens=CHUNK,
    )
    role = MeshRole(True, False, emit=True)
    return build_replica(
        "p",
        config,
        Mode.DISAGGREGATED,
        loaded,
        role,
        InProcessChannel(MonotonicClock()),
        256,
        groups,
    ).executor


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
    pages = tuple(range(16 * (sequence % 2), 16 * (sequence % 2) + -(-end // PAGE)))
    return PrefillRow(sequence, rank, offset, ids[start:end], start, pages, samples)


def run(executor: MeshExecutor, *rows: PrefillRow) -> dict[tuple[int, int], SampledToken]:
    result = executor.issue_and_wait(PrefillChunk(1, CHUNK, rows))
    assert isinstance(result, PrefillResult)
    return {(one.sequence, one.child): one for one in result.samples}


@cache
def dense(directory: Path) -> Callable[[np.ndarray], jax.Array]:
    model = load_model(str(directory), Layout(), jax.devices()[-1:]).model
    return jax.jit(
        lambda tokens_T: jax.nn.log_softmax(
            model(tokens_T, jnp.arange(tokens_T.shape[0]), dense_causal_attend)
        )
    )


def check(directory: Path, ids: tuple[int, ...], sampled: SampledToken) -> None:
    padded = np.pad(np.array(ids, np.int32), (0, 2 * CHUNK - len(ids)))
    want_V = np.asarray(dense(directory)(padded))[len(ids) - 1]
    assert sampled.token == want_V.argmax()
    assert sampled.logprobs is not None and len(sampled.logprobs.top) == TOP
    np.testing.assert_allclose(sampled.logprobs.logprob, want_V.max(), atol=2e-5)
    for token, logprob in sampled.logprobs.top:
        np.testing.assert_allclose(logprob, want_V[token], atol=2e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("directory", "layout"),
    [
        (MOE, "dp=2,tp=2,ep=4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((LLAMA, "tp=1"), (LLAMA, "dp=2,tp=2"), (MOE, "tp=2,ep=2"), (MOE, "dp=2"))
        ),
    ],
)
def test_rows_sample_as_in_a_dense_pass_whatever_shares_their_chunk(
    directory: Path, layout: str
) -> None:
    """A long prompt's first chunk samples nothing; its end shares one with a whole short prompt, of
    which two children sample; on the other rank, if there is one, the last chunk's only row samples
    nothing, then goes on alone."""
    executor = prefiller(directory, layout)
    try:
        long, short, late = prompt(1, 101), prompt(2, 9), prompt(3, 70)
        other = Layout.parse(layout).dp > 1
        assert not run(executor, part(0, 0, 0, long, 0, 64))
        rows = [part(0, 0, 0, long, 64, 101, GREEDY), part(1, 0, 48, short, 0, 9, GREEDY, OTHER)]
        sampled = run(executor, *rows, *([part(2, 1, 0, late, 0, 64)] if other else []))
        assert set(sampled) == {(0, 0), (1, 0), (1, 1)}
        check(directory, long, sampled[0, 0])
        for child in (0, 1):
            check(directory, short, sampled[1, child])
        if other:
            check(directory, late, run(executor, part(2, 1, 0, late, 64, 70, GREEDY))[2, 0])
    finally:
        executor.close()


@pytest.mark.ci
def test_the_last_layer_computes_little_more_than_its_keys_and_values() -> None:
    executor = prefiller(LLAMA, "tp=1", groups=4)
    try:
        executor.warm_prefill(CHUNK, ChunkForm())
        programs = {
            key[2:4]: program
            for key, program in executor.programs._built.items()
            if key[0] == "group"
        }  # type: ignore[index]
        whole, ending = (
            programs[ChunkForm(), last].cost_analysis()["flops"]  # type: ignore[attr-defined]
            for last in (False, True)
        )
        config = load_model(str(LLAMA), Layout(), jax.devices()[:1]).model.config
        head = config.attention.head_dim
        keys_values = 2 * config.width * 2 * config.attention.kv_heads * head
        of_a_row = 2 * config.width * (2 * config.attention.query_heads * head + 3 * config.ffn)
        assert whole > CHUNK * (keys_values + of_a_row)
        # besides the products, attention to a page
        least = CHUNK * keys_values + of_a_row
        assert least <= ending < 1.1 * CHUNK * keys_values + 2.5 * of_a_row
    finally:
        executor.close()


@pytest.mark.parametrize(
    "name",
    [
        "llama_biased",
        *(
            pytest.param(name, marks=pytest.mark.ci)
            for name in ("mistral_window", "qwen2_windows", "qwen3", "mixtral", "qwen3_moe_step")
        ),
    ],
)
def test_a_layer_gives_the_rows_it_is_asked_for(name: str) -> None:
    model = load_model(GOLDEN / name, Layout(), jax.devices()[:1]).model
    asked = np.array([7, -1, 2, 7], np.int32)
    real, cached = asked >= 0, []

    def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, **how: Any) -> jax.Array:
        cached.append((k_TKH, v_TKH))
        if not q_TNH.shape[0]:
            return q_TNH
        q_all_TNH = (
            jnp.zeros((k_TKH.shape[0], *q_TNH.shape[1:]), q_TNH.dtype)
            .at[asked[real]]
            .set(q_TNH[real])
        )
        return dense_causal_attend(q_all_TNH, k_TKH, v_TKH, **how)[asked]

    x_TD = jax.random.normal(jax.random.key(0), (12, model.config.width))
    positions_T, valid_T = jnp.arange(12) + 3, jnp.ones(12, bool)
    for layer in model.layers:
        whole_TD = layer(x_TD, positions_T, dense_causal_attend, Shards(), valid_T)
        rows_RD = layer(x_TD, positions_T, attend, Shards(), valid_T, jnp.asarray(asked))
        np.testing.assert_allclose(rows_RD[real], whole_TD[asked[real]], atol=1e-5)
        none_RD = layer(x_TD, positions_T, attend, Shards(), valid_T, jnp.zeros(0, jnp.int32))
        assert none_RD.shape == (0, model.config.width)
    for (k, v), (k_again, v_again) in zip(cached[::2], cached[1::2], strict=True):
        assert k.shape[0] == v.shape[0] == 12
        np.testing.assert_array_equal(k, k_again)
        np.testing.assert_array_equal(v, v_again)
