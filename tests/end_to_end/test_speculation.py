"""Drafts change no stream, whatever a drafter predicts: each stream equals that of the request
alone on a mesh that verifies none."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from jdisagg.config import EngineConfig, Mode
from jdisagg.messages.step_commands import DecodeSteps
from jdisagg.request import Request
from models.checkpoint import load_config
from tests.end_to_end import grammar_requests
from tests.end_to_end.clusters import Running, golden_copy, golden_greedy, running
from tests.end_to_end.drafts import KnowingDrafter, counted, learn, same_logprobs, speculating
from tests.end_to_end.mixed_requests import mixed_requests, streams
from tests.fakes.cluster import Collected
from tests.golden.arrays import arrays_of
from tests.lanes import first_ci
from tests.models.next_token_checkpoints import eagle_head
from tests.shapes import FAMILY, GOLDEN, config


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


@dataclass
class Both:
    """What a cluster gave with drafts, and one without."""

    done: list[Collected]
    without: list[Collected]
    drafted: int
    accepted: int
    sources: set[str]


async def both(
    engine: EngineConfig,
    source: str,
    asked: Callable[[Running], list[Request]],
    knowing: type[KnowingDrafter] | None = None,
    first_device: int = 0,
) -> Both:
    """The streams are equal; how many were drafted is for the test to judge."""
    async with running(engine, first_device=first_device) as run:
        without = await run.complete_all(asked(run))
    async with running(speculating(engine, source), first_device=first_device) as run:
        requests = asked(run)
        if knowing:
            learn(knowing, requests, without)
        done = await run.complete_all(requests)
        labelled = [pair for worker in run.cluster._workers for pair in worker.counters.labelled()]
        sources = {dict(labels)["source"] for name, labels in labelled if name == "drafted_tokens"}
        drafted, accepted = counted(run, "drafted"), counted(run, "accepted")
    assert streams(done) == streams(without)
    return Both(done, without, drafted, accepted, sources)


def few_requests(run: Running, step: int = 9, hot: float = 1.5, **options: object) -> list[Request]:
    options = {"max_tokens": 50, "ignore_eos": True} | options
    return [
        run.request(
            range(20, 30 + step * seed),
            f"k{seed}",
            seed=seed,
            temperature=hot * (seed % 2),
            **options,
        )
        for seed in range(6)
    ]


@pytest.mark.ci
@pytest.mark.parametrize(("mode",), first_ci([(Mode.DISAGGREGATED,), (Mode.CHUNKED,)]))
async def test_drafts_of_an_eagle_head_change_no_stream(
    mode: Mode, tmp_path: Path, always: None
) -> None:
    """A random head, whose input crosses the border of two groups of layers. At a high temperature
    it often draws the token of a model with random weights."""
    directory = golden_copy("llama_tied", tmp_path)
    engine = config(mode, directory=directory, **FAMILY)
    model = replace(engine.model, draft=str(eagle_head(directory, tmp_path)))
    found = await both(replace(engine, model=model), "eagle", few_requests)
    assert 0 < found.accepted < found.drafted and found.sources == {"eagle"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "mode", "decode"),
    first_ci(
        [
            ("clusters", Mode.DISAGGREGATED, "dp=2,tp=2"),
            ("unified", Mode.DISAGGREGATED, "tp=4"),
            ("clusters", Mode.CHUNKED, "tp=2"),
            ("clusters", Mode.UNIFIED, "dp=2"),
        ]
    ),
)
async def test_drafts_of_an_assistant_are_those_of_transformers_and_change_no_stream(
    name: str, mode: Mode, decode: str, tmp_path: Path, always: None
) -> None:
    """A random assistant, which reads windows in ring buffers and pages that a prefill mesh sent.
    Neither mesh has KV of its own."""
    folder = GOLDEN / "assistants" / name
    directory = golden_copy(f"gemma4_{name}", tmp_path)
    engine = config(mode, decode=decode, directory=directory, **FAMILY)
    async with running(engine) as run:
        without = await run.complete_all(few_requests(run))
    expected, (prompt, greedy) = arrays_of(folder / "expected.npz"), golden_greedy(directory)
    drafts_of = dict(zip(expected["places"].tolist(), expected["drafts"].tolist(), strict=True))
    drafting = replace(engine, model=replace(engine.model, draft=str(folder)))
    async with running(speculating(drafting, "assistant")) as run:
        assert streams(await run.complete_all(few_requests(run))) == streams(without)
        drafted, accepted = counted(run, "drafted"), counted(run, "accepted")
        assert 0 < accepted < drafted
        executor = run.cluster.decode.executor
        assert executor._decode is not None
        assert executor.limits.kv_spec == load_config(directory).kv_spec("float32")
        for count in (9, 20, 41):
            request = run.request(prompt, f"g{count}", max_tokens=count, ignore_eos=True)
            (done,) = await run.complete_all([request])
            assert list(done.tokens[0]) == greedy[:count]
            ends, kept = len(prompt) + count, np.asarray(executor._decode.only._drafts)
            first, *drafts = max(row for rank in kept.tolist() for row in rank)
            if first < ends:  # otherwise a step in flight has drafted beyond the last token
                compared = drafts[: ends - first]
                assert compared == drafts_of[first][: len(compared)]


@pytest.mark.ci
async def test_the_shipped_model_takes_several_tokens_a_step_with_its_own_layer(
    always: None,
) -> None:
    engine = speculating(config(), "mtp")
    async with running(engine) as run:
        (done,) = await run.complete_all([run.request("Once upon a time", max_tokens=100)])
        steps = sum(isinstance(command, DecodeSteps) for command in run.recording.decode)
    assert len(done.tokens[0]) > 1.6 * steps


@pytest.mark.ci
async def test_repeated_text_is_drafted_from_the_sequence_itself() -> None:
    """With the drafter and the decisions of a server."""

    def asked(run: Running) -> list[Request]:
        prompt = "Tom and Sue saw a dog. Tom and Sue saw a cat. Tom and Sue saw a"
        looping = {"frequency_penalty": -1.0, "ignore_eos": True}
        return [run.request(prompt, "r", max_tokens=150, **looping)]

    found = await both(config(Mode.UNIFIED), "ngram", asked, first_device=4)
    assert found.accepted > 30
