"""Vectorised speeds against the cost model, one worker at a time."""

from dataclasses import replace

import numpy as np
import pytest

from jdisagg.costs.speeds import ASSUMED, Kind, Speed, speed_of
from jdisagg.layout.axes import Layout
from jdisagg.scheduler.prompts import causal_pairs
from tests.costs.named import A100, GB200, H100, LLAMA_8B, LLAMA_70B, OPT_13B, QWEN_235B

KINDS = (
    Kind(LLAMA_70B, Layout(tp=8), H100),
    Kind(QWEN_235B, Layout(dp=8, tp=4, ep=32), GB200),
    Kind(OPT_13B, Layout(pp=2), A100),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.geometry.name)
def test_steps_of_a_column_are_the_cost_models_within_a_few_percent(kind: Kind) -> None:
    draw = np.random.default_rng(0)
    sequences = draw.integers(1, 600, 300).astype(float)
    contexts = sequences * np.exp(draw.uniform(np.log(20), np.log(30000), 300))
    speed = Speed(kind)
    found = speed.step_seconds(sequences, contexts)
    fullest = np.ceil(sequences / kind.layout.pp)
    shares = fullest / sequences
    wanted = [
        speed.model.decode_of(int(count), context).seconds
        for count, context in zip(fullest, contexts * shares, strict=True)
    ]
    assert np.abs(found / wanted - 1).max() < (0.03 if kind.layout.pp == 1 else 0.08), (
        "a sequence more may make no batch fuller"
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.geometry.name)
def test_a_chunked_prompt_costs_the_sum_of_its_chunks_or_of_the_time_between_them_in_a_pipeline(
    kind: Kind,
) -> None:
    speed = Speed(kind)
    model, chunk = speed.model, 1024
    for tokens, cached in ((500, 0), (1024, 0), (7000, 0), (3000, 2000)):
        starts = range(0, tokens, chunk)
        costs = [model.prefill([(min(chunk, tokens - start), cached + start)]) for start in starts]
        wanted = sum(map(model.interval_seconds, costs[:-1])) + costs[-1].seconds
        assert speed.prefill_seconds(tokens, cached, chunk) == pytest.approx(wanted, rel=0.03), (
            "rounded up to 16 tokens"
        )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.geometry.name)
def test_prompts_of_a_column_cost_what_they_cost_one_by_one(kind: Kind) -> None:
    draw, speed = np.random.default_rng(1), Speed(kind)
    new = draw.integers(1, 9000, 200).astype(float)
    cached = draw.integers(0, 20000, 200).astype(float)
    for chunk in (2048, 0):
        wanted = [
            speed.prefill_seconds(int(tokens), int(known), chunk)
            for tokens, known in zip(new, cached, strict=True)
        ]
        assert np.abs(speed.prefills_seconds(new, cached, chunk) / wanted - 1).max() < 0.05


def test_a_backlog_of_full_chunks_takes_as_long_as_the_prompts_it_was_made_of() -> None:
    for stages in (1, 4):
        speed = Speed(replace(KINDS[0], layout=Layout(tp=8, pp=stages)))
        per_token, per_pair = speed.backlog_rates(2048)
        predicted = 8 * (8192 * per_token + causal_pairs(0, 8192) * per_pair)
        chunks = [speed.model.prefill([(2048, start)]) for start in range(0, 8192, 2048)]
        assert predicted == pytest.approx(
            8 * sum(map(speed.model.interval_seconds, chunks)), rel=0.02
        )


def test_a_layout_that_does_not_divide_the_model_has_assumed_times() -> None:
    undivided = Kind(LLAMA_8B, Layout(tp=7), H100)
    assert speed_of(undivided) is speed_of(ASSUMED)
    assert speed_of(KINDS[0]) is speed_of(KINDS[0])
