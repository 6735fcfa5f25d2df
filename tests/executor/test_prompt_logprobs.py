"""Log-probabilities of a prompt's tokens are those of a dense pass, however the prompt is cut and
whatever shares its chunks; ranks and the most likely tokens with them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import PrefillChunk, PrefillResult, PrefillRow
from jdisagg.prompt_logprobs import PromptLogprobs
from tests.end_to_end.clusters import LLAMA, MOE
from tests.executor.test_prefill_rows import (
    CHUNK,
    GOLDEN,
    GREEDY,
    check,
    dense,
    part,
    prefiller,
    prompt,
)
from tests.golden.arrays import arrays_of

TOP = 4
NEAR = 1e-4  # of logarithms as far as -20, in float32


def asking(row: PrefillRow, ids: tuple[int, ...]) -> PrefillRow:
    end = row.start + len(row.tokens)
    following = ids[end] if end < len(ids) else -1
    return msgspec.structs.replace(row, prompt_logprobs=TOP, following=following)


def run(executor: MeshExecutor, *rows: PrefillRow) -> PrefillResult:
    result = executor.issue_and_wait(PrefillChunk(1, CHUNK, rows))
    assert isinstance(result, PrefillResult)
    return result


def check_prompt(directory: Path, ids: tuple[int, ...], found: PromptLogprobs) -> None:
    padded = np.pad(np.array(ids, np.int32), (0, 2 * CHUNK - len(ids)))
    want_TV = np.asarray(dense(directory)(padded))
    assert len(found) == len(ids) - 1
    for at, token in enumerate(found):
        want_V = want_TV[at]
        np.testing.assert_allclose(token.logprob, want_V[ids[at + 1]], atol=NEAR)
        near = np.abs(want_V - want_V[ids[at + 1]]) < 2 * NEAR
        larger = int(np.sum(want_V > want_V[ids[at + 1]]))
        assert abs(token.rank - 1 - larger) <= near.sum() - 1
        np.testing.assert_allclose(
            [value for _, value in token.top], np.sort(want_V)[::-1][:TOP], atol=NEAR
        )
        for token_id, value in token.top:
            np.testing.assert_allclose(value, want_V[token_id], atol=NEAR)


@pytest.mark.parametrize(
    ("directory", "layout"),
    [
        (LLAMA, "dp=2,tp=2"),
        pytest.param(MOE, "tp=4,ep=4", marks=pytest.mark.slow),
        pytest.param(LLAMA, "tp=1", marks=pytest.mark.slow),
    ],
)
def test_prompts_are_scored_as_in_a_dense_pass(directory: Path, layout: str) -> None:
    """A long prompt in two chunks; the second one's other row does not ask, and samples as ever."""
    executor = prefiller(directory, layout)
    try:
        long, short = prompt(1, 101), prompt(2, 9)
        first = run(executor, asking(part(0, 0, 0, long, 0, 64), long))
        assert not first.samples
        last = asking(part(0, 0, 0, long, 64, 101, GREEDY), long)
        second = run(executor, last, part(1, 0, 48, short, 0, 9, GREEDY))
        assert [key for key, _ in (*first.prompts, *second.prompts)] == [0, 0]
        parts = [found for _, found in (*first.prompts, *second.prompts)]
        check_prompt(directory, long, PromptLogprobs.joined(parts))
        check(directory, long, second.samples[0])
        check(directory, short, second.samples[1])
        if Layout.parse(layout).dp > 1:
            other = run(executor, asking(part(1, 1, 0, short, 0, 9, GREEDY), short))
            check_prompt(directory, short, other.prompts[0][1])
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("gemma2", "tp=2", marks=pytest.mark.ci),
        *(
            pytest.param(name, layout, marks=pytest.mark.slow)
            for name, layout in (
                ("qwen3_next", "tp=1"),
                ("deepseek_v3", "tp=2"),
                ("gpt_oss", "tp=2"),
            )
        ),
    ],
)
def test_prompts_are_scored_as_transformers_does(name: str, layout: str) -> None:
    """Of models whose last layers differ: capped logits, sinks, one latent, a state beside. Two
    devices hold unlike parts of a vocabulary of 131."""
    expected = arrays_of(GOLDEN / name / "expected.npz")
    ids, logits_TV = tuple(expected["prompt"].tolist()), expected["logits"].astype(np.float64)
    want_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)
    executor = prefiller(GOLDEN / name, layout)
    try:
        ((_, found),) = run(executor, asking(part(0, 0, 0, ids, 0, len(ids), GREEDY), ids)).prompts
    finally:
        executor.close()
    assert len(found) == len(ids) - 1
    for want_V, after, token in zip(want_TV, ids[1:], found, strict=False):
        np.testing.assert_allclose(token.logprob, want_V[after], atol=NEAR)
        near = np.sum(np.abs(want_V - want_V[after]) < 2 * NEAR)
        assert abs(token.rank - 1 - np.sum(want_V > want_V[after])) < near
        likely = np.sort(want_V)[::-1][:TOP]
        np.testing.assert_allclose([value for _, value in token.top], likely, atol=NEAR)
