"""Drafts change no stream, whatever a drafter predicts: each stream equals that of the request
alone on a mesh that verifies none."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, Mode
from jdisagg.messages.step_commands import DecodeSteps
from jdisagg.request import Request
from tests.end_to_end import grammar_requests
from tests.end_to_end.clusters import Running, golden_copy, running
from tests.end_to_end.drafts import KnowingDrafter, counted, learn, same_logprobs, speculating
from tests.end_to_end.mixed_requests import mixed_requests, streams
from tests.end_to_end.two_decoders import LEASES, TwoDecoders, until_all_free
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.models.next_token_checkpoints import eagle_head, with_next_token_layer
from tests.shapes import FAMILY, FEW_PAGES, MOE, config

# On a busy machine the first use of a program, which compiles it, takes minutes.
PATIENTLY = replace(LEASES, step_seconds=600.0)


def all_requests(run: Running) -> list[Request]:
    """Greedy and seeded, penalties, log-probabilities, bias, stops, least tokens, n = 2, schemas
    and regular expressions."""
    plain = [one for one in mixed_requests(run) if len(one.prompt_token_ids) < 130]
    return [*plain, *grammar_requests.requests(run)]


_expected: list[Collected] = []


async def alone() -> list[Collected]:
    if not _expected:
        async with running(config(Mode.UNIFIED), first_device=4) as run:
            _expected.extend([await run.complete(request) for request in all_requests(run)])
            assert counted(run, "drafted") == 0
    return _expected


@pytest.mark.ci
@pytest.mark.parametrize(
    ("engine",),
    first_ci(
        [
            (config(),),
            (config(Mode.CHUNKED, steps=4),),
            (config(prefill="pp=2", decode="pp=2,tp=2", steps=4),),
        ]
    ),
    ids=("two meshes", "one mesh", "stages"),
)
async def test_drafts_change_no_stream(engine: EngineConfig, knowing: type[KnowingDrafter]) -> None:
    expected = await alone()
    async with running(speculating(engine)) as run:
        asked = all_requests(run)
        learn(knowing, asked, expected)
        done = await run.complete_all(asked)
        assert streams(done) == streams(expected)
        same_logprobs(done, expected)
        drafted, accepted = counted(run, "drafted"), counted(run, "accepted")
        assert 200 < accepted < drafted - 200


@pytest.mark.ci
@pytest.mark.parametrize(("mode",), first_ci([(Mode.DISAGGREGATED,), (Mode.CHUNKED,)]))
async def test_drafts_of_the_next_token_layer_change_no_stream(mode: Mode, always: None) -> None:
    """Of the shipped model, whose prompts' KV of the layer comes from the prefill mesh. The second
    time, prompts are in the prefix cache."""
    expected = await alone()
    engine = speculating(config(mode), "mtp")
    async with running(engine) as run:
        for _ in range(2):
            done = await run.complete_all(all_requests(run))
            assert streams(done) == streams(expected)
            same_logprobs(done, expected)
        drafted, accepted = counted(run, "drafted"), counted(run, "accepted")
        assert 300 < accepted < drafted - 100
        steps = [one for one in run.recording.decode if isinstance(one, DecodeSteps)]
        assert (mode is Mode.CHUNKED) == any(one.chunk is not None for one in steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
async def test_drafts_of_a_random_layer_change_no_stream(
    name: str, tmp_path: Path, always: None
) -> None:
    """Latents and experts, over all ranks of the decode mesh."""
    directory = with_next_token_layer(golden_copy(name, tmp_path), tmp_path)
    engine = config(decode="dp=2,ep=2", directory=directory, **FAMILY)
    done: list[list[Collected]] = []
    for one in (engine, speculating(engine, "mtp")):
        async with running(one) as run:
            asked = [
                run.request(
                    range(20, 30 + 9 * seed),
                    f"k{seed}",
                    max_tokens=50,
                    temperature=1.5 * (seed % 2),
                    seed=seed,
                    ignore_eos=True,
                )
                for seed in range(6)
            ]
            done.append(await run.complete_all(asked))
            accepted, drafted = counted(run, "accepted"), counted(run, "drafted")
    assert streams(done[1]) == streams(done[0])
    assert 0 < accepted < drafted


@pytest.mark.ci
@pytest.mark.parametrize(("mode",), first_ci([(Mode.DISAGGREGATED,), (Mode.CHUNKED,)]))
async def test_drafts_of_an_eagle_head_change_no_stream(
    mode: Mode, tmp_path: Path, always: None
) -> None:
    """A random head, whose input crosses the border of two groups of layers. At a high temperature
    it often draws the token of a model with random weights."""
    directory = golden_copy("llama_tied", tmp_path)
    head = eagle_head(directory, tmp_path)
    engine = config(mode, directory=directory, **FAMILY)
    done: list[list[Collected]] = []
    for one in (engine, speculating(engine, "eagle")):
        async with running(replace(one, model=replace(one.model, draft=str(head)))) as run:
            asked = [
                run.request(
                    range(20, 30 + 9 * seed),
                    f"k{seed}",
                    max_tokens=50,
                    temperature=1.5 * (seed % 2),
                    seed=seed,
                    ignore_eos=True,
                )
                for seed in range(6)
            ]
            done.append(await run.complete_all(asked))
            accepted, drafted = counted(run, "accepted"), counted(run, "drafted")
            sources = {
                labels
                for worker in run.cluster._workers
                for name, labels in worker.counters.labelled()
                if name == "drafted_tokens"
            }
    assert streams(done[1]) == streams(done[0])
    assert 0 < accepted < drafted and sources == {(("source", "eagle"),)}


@pytest.mark.ci
async def test_the_shipped_model_takes_several_tokens_a_step_with_its_own_layer(
    always: None,
) -> None:
    engine = speculating(config(), "mtp")
    async with running(engine) as run:
        (done,) = await run.complete_all([run.request("Once upon a time", max_tokens=100)])
        steps = sum(isinstance(command, DecodeSteps) for command in run.recording.decode)
    assert len(done.tokens[0]) > 1.6 * steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "drafts"), [("gpt_oss", True), ("qwen3_next", False), ("deepseek_v3", True)]
)
async def test_drafts_change_no_stream_whatever_is_kept_of_a_position(
    name: str, drafts: bool, tmp_path: Path, knowing: type[KnowingDrafter]
) -> None:
    """Windows in rings of pages, latents, and a state, which takes no drafts."""
    directory = golden_copy(name, tmp_path)
    engine = config(directory=directory, **FAMILY)
    done: list[list[Collected]] = []
    for one in (engine, speculating(engine)):
        async with running(one) as run:
            asked = [
                run.request(
                    range(20, 30 + 3 * seed),
                    f"k{seed}",
                    max_tokens=60,
                    temperature=float(seed % 2),
                    seed=seed,
                    repetition_penalty=1.0 + 0.2 * (seed == 3),
                    logprobs=1 if seed == 4 else None,
                    ignore_eos=True,
                )
                for seed in range(6)
            ]
            if done:
                learn(knowing, asked, done[0])
            done.append(await run.complete_all(asked))
            accepted, drafted = counted(run, "accepted"), counted(run, "drafted")
    assert streams(done[1]) == streams(done[0])
    same_logprobs(done[1], done[0])
    assert 50 < accepted < drafted - 50 if drafts else drafted == 0


@pytest.mark.slow
@pytest.mark.parametrize("source", ["ngram", "mtp"])
async def test_drafts_of_sequences_in_a_storm_change_no_stream(
    source: str, knowing: type[KnowingDrafter]
) -> None:
    """Too few pages, moves between two decode workers, of which one dies."""
    expected = await alone()
    storm = config(**FEW_PAGES, limits=PATIENTLY)
    async with running(speculating(storm, source), kind=TwoDecoders) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoDecoders)
        asked = all_requests(run)
        learn(knowing, asked, expected)
        moving = asyncio.create_task(cluster.move_some())
        done, _ = await run.complete_preempted(
            asked, enough=lambda: cluster.first.counters["sequences_moved"] > 0
        )
        assert streams(done) == streams(expected)
        dying = asyncio.create_task(cluster.die_when_busy())
        done = await run.complete_all(asked)
        moving.cancel()
        assert streams(done) == streams(expected)
        assert await asyncio.wait_for(dying, 1.0) >= 2, "nobody ran where the worker died"
        for worker in (cluster.first, cluster.second):
            assert 0 < worker.counters["accepted_tokens"] < worker.counters["drafted_tokens"]
        await until_all_free(run)


@pytest.mark.slow
async def test_drafts_of_experts_change_no_stream(knowing: type[KnowingDrafter]) -> None:
    engine = config(Mode.CHUNKED, decode="dp=2,ep=2", directory=MOE)
    done: list[list[Collected]] = []
    for one in (engine, speculating(engine)):
        async with running(one) as run:
            asked = grammar_requests.requests(run)
            if done:
                learn(knowing, asked, done[0])
            done.append(await run.complete_all(asked))
            accepted, drafted = counted(run, "accepted"), counted(run, "drafted")
    assert streams(done[1]) == streams(done[0])
    assert 50 < accepted < drafted - 50


@pytest.mark.ci
async def test_repeated_text_is_drafted_from_the_sequence_itself() -> None:
    """With the drafter and the decisions of a server."""
    engine = config(Mode.UNIFIED)
    done: list[list[Collected]] = []
    for one in (engine, speculating(engine)):
        async with running(one, first_device=4) as run:
            prompt = "Tom and Sue saw a dog. Tom and Sue saw a cat. Tom and Sue saw a"
            looping = {"frequency_penalty": -1.0, "ignore_eos": True}
            asked = [run.request(prompt, "r", max_tokens=150, **looping)]
            done.append(await run.complete_all(asked))
            accepted = counted(run, "accepted")
    assert streams(done[1]) == streams(done[0])
    assert accepted > 30
