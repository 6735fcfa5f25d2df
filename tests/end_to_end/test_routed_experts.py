"""The experts that a server returns for each token are those of a dense pass over prompt and
answer: for every layout, after hits, hand-offs, preemptions and moves, and with drafts."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.errors import ConfigError, InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, golden_copy, golden_greedy, running
from tests.end_to_end.dense_experts import dense_experts, told
from tests.end_to_end.two_decoders import LEASES, TwoDecoders
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.shapes import FAMILY, FEW_PAGES, LLAMA, MOE, config

ASKED = {"return_routed_experts": True, "logprobs": 0, "ignore_eos": True}
TEXT = "Once upon a time there was a little girl named Lily who lived in a small house. "


def recording(engine: EngineConfig) -> EngineConfig:
    meshes = {
        name: replace(getattr(engine, name), routed_experts=True) for name in ("prefill", "decode")
    }
    return replace(engine, **meshes)


def check(directory: Path, request: Request, done: Collected) -> None:
    for child, tokens in done.tokens.items():
        whole = [*request.prompt_token_ids, *tokens][:-1]
        np.testing.assert_array_equal(told(done.logprobs[child]), dense_experts(directory, whole))


async def check_all(
    run: Running, directory: Path, prompts: Sequence[Sequence[int]], name: str, **sampling: object
) -> None:
    asked = [
        run.request(prompt, f"{name}{at}", **{**ASKED, "max_tokens": 20, **sampling})
        for at, prompt in enumerate(prompts)
    ]
    for request, done in zip(asked, await run.complete_all(asked), strict=True):
        check(directory, request, done)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    first_ci(
        [
            (Mode.DISAGGREGATED, "tp=2", "dp=2"),
            (Mode.DISAGGREGATED, "dp=2,tp=2,ep=4", "tp=4,ep=4"),
            (Mode.CHUNKED, "tp=1", "tp=1"),
            (Mode.DISAGGREGATED, "tp=4,ep=4", "dp=4,ep=4"),
        ],
        ci=3,
    ),
)
async def test_experts_are_those_of_a_dense_pass_also_of_cached_prompts(
    mode: Mode, prefill: str, decode: str
) -> None:
    """Prompts of several chunks and one token, two answers of one, another that does not ask; then
    the same again, of which all full blocks are cached."""
    engine = replace(config(mode, prefill, decode, directory=MOE), prefix=PrefixConfig(True, 16))
    async with running(recording(engine)) as run:
        long = run.tokenizer.encode(8 * TEXT)
        prompts = [long[:150], long[3:40], long[7:8], long[:70]]
        await check_all(run, MOE, prompts, "first")
        silent = run.request(long[:90], "silent", logprobs=1)
        both, done = await asyncio.gather(
            check_all(run, MOE, prompts, "second", n=2, temperature=1.0, seed=5),
            run.complete(silent),
        )
        assert both is None and all(one.experts is None for one in done.logprobs[0])
        assert sum(worker.counters["prefix_hit_tokens"] for worker in run.cluster._workers) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("deepseek_v3", Mode.DISAGGREGATED),
        ("qwen3_next", Mode.DISAGGREGATED),
        ("nemotron_h_moe", Mode.DISAGGREGATED),
        ("gemma4_moe", Mode.UNIFIED),
        ("gpt_oss", Mode.CHUNKED),
    ],
)
async def test_experts_of_each_kind_of_layer_are_those_of_a_dense_pass(
    name: str, mode: Mode, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    engine = config(mode, "tp=1", directory=directory, **FAMILY)
    prompt, greedy = golden_greedy(directory)
    async with running(recording(engine)) as run:
        await check_all(run, directory, [prompt, [*prompt, *greedy[:9]]], "r")


@pytest.mark.ci
@pytest.mark.parametrize(("speculate",), first_ci([("off",), ("ngram",)]))
async def test_experts_of_preempted_and_moved_sequences_are_those_of_a_dense_pass(
    speculate: str,
) -> None:
    limits = replace(LEASES, step_seconds=600.0)
    engine = config(directory=MOE, limits=limits, speculate=speculate, **FEW_PAGES)
    engine = replace(recording(engine), prefix=PrefixConfig(True, 16))
    async with running(engine, kind=TwoDecoders) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoDecoders)
        ids = run.tokenizer.encode(8 * TEXT)
        asked = [
            run.request(ids[at : at + 60], f"r{at}", **{**ASKED, "max_tokens": 80})
            for at in range(12)
        ]
        moving = asyncio.create_task(cluster.move_some(both_ways=True))
        done, preemptions = await run.complete_preempted(asked, enough=lambda: cluster.moved > 0)
        moving.cancel()
        assert preemptions > 0
        for request, one in zip(asked, done, strict=True):
            check(MOE, request, one)


async def test_a_request_for_experts_is_refused_by_a_server_that_does_not_record_them() -> None:
    for directory, reason in ((MOE, "--routed_experts"), (LLAMA, "has no experts")):
        async with running(config(Mode.UNIFIED, directory=directory)) as run:
            with pytest.raises(InvalidRequestError, match=f"return_routed_experts: .*{reason}"):
                await run.complete(run.request("Once", **ASKED))


@pytest.mark.parametrize(
    ("directory", "changes", "reason"),
    [
        (LLAMA, {}, "no layer with experts"),
        (MOE, {"layout": Layout(pp=2)}, "pp=1"),
        (MOE, {"codec": "int8"}, "codec=none"),
    ],
)
async def test_a_server_that_cannot_record_experts_does_not_start(
    directory: Path, changes: dict[str, object], reason: str
) -> None:
    engine = recording(config(directory=directory))
    engine = replace(engine, decode=replace(engine.decode, **changes))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"routed_experts.*{reason}"):
        async with running(engine):
            pass
