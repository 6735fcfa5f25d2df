"""Log-probabilities of a prompt's tokens are those of a dense pass, however the prompt is cut and
whatever shares its chunks; ranks and the most likely tokens with them."""

import msgspec
import numpy as np
import pytest

from jdisagg.messages.step_commands import PrefillRow
from jdisagg.prompt.logprobs import PromptLogprobs
from tests.executor.meshes import Pair
from tests.executor.prompts import (
    GREEDY,
    check,
    check_prompt,
    check_scores,
    part,
    prefiller,
    prompt,
    run,
)
from tests.golden.arrays import arrays_of
from tests.lanes import first_ci
from tests.shapes import GOLDEN, LLAMA, MOE

TOP = 4
OTHER = msgspec.structs.replace(GREEDY, child=1)


def asking(row: PrefillRow, ids: tuple[int, ...]) -> PrefillRow:
    end = row.start + len(row.tokens)
    following = ids[end] if end < len(ids) else -1
    return msgspec.structs.replace(row, prompt_logprobs=TOP, following=following)


def test_prompts_are_scored_and_rows_sample_as_in_a_dense_pass(two: Pair) -> None:
    """A long prompt in two chunks, of which the first samples nothing; its end shares one with a
    whole short prompt, which does not ask and of which two children sample."""
    long, short = prompt(1, 101), prompt(2, 9)
    first = run(two.prefill, asking(part(0, 0, 0, long, 0, 64), long))
    assert not first.samples
    last = asking(part(0, 0, 0, long, 64, 101, GREEDY), long)
    second = run(two.prefill, last, part(1, 0, 48, short, 0, 9, GREEDY, OTHER))
    prompts = (*first.prompts, *second.prompts)
    assert [key for key, _ in prompts] == [0, 0]
    check_prompt(LLAMA, long, PromptLogprobs.joined([part for _, part in prompts]))
    sampled = {(one.sequence, one.child): one for one in second.samples}
    assert set(sampled) == {(0, 0), (1, 0), (1, 1)}
    for (sequence, _), sample in sampled.items():
        check(LLAMA, (long, short)[sequence], sample)


@pytest.mark.ci
def test_prompts_of_each_rank_are_scored_as_in_a_dense_pass() -> None:
    """The other rank's only row samples nothing, then goes on alone."""
    executor = prefiller(MOE, "dp=2,tp=2,ep=4")
    try:
        asks, late = prompt(1, 37), prompt(3, 70)
        rows = asking(part(0, 0, 0, asks, 0, 37, GREEDY), asks), part(1, 1, 0, late, 0, 64)
        first = run(executor, *rows)
        ((_, found),) = first.prompts
        check_prompt(MOE, asks, found)
        last = run(executor, part(1, 1, 0, late, 64, 70, GREEDY))
        for ids, (sample,) in ((asks, first.samples), (late, last.samples)):
            check(MOE, ids, sample)
    finally:
        executor.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "layout"),
    first_ci([("gemma2", "tp=2"), ("qwen3_next", "tp=1"), ("deepseek_v3", "tp=2")]),
)
def test_prompts_are_scored_as_transformers_does(name: str, layout: str) -> None:
    """Of models whose last layers differ: capped logits, one latent, a state beside. Two devices
    hold unlike parts of a vocabulary of 131."""
    expected = arrays_of(GOLDEN / name / "expected.npz")
    ids, logits_TV = tuple(expected["prompt"].tolist()), expected["logits"].astype(np.float64)
    want_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)
    executor = prefiller(GOLDEN / name, layout)
    try:
        ((_, found),) = run(executor, asking(part(0, 0, 0, ids, 0, len(ids), GREEDY), ids)).prompts
    finally:
        executor.close()
    check_scores(want_TV, ids, found)
