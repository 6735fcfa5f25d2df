"""Chunks of prompts that run in one program with decode steps change no stream."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.messages.step_commands import DecodeSteps
from jdisagg.request import Grammar, GrammarKind, Request
from tests.end_to_end.clusters import Running, golden_copy, golden_greedy, running
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.shapes import FAMILY, FEW_PAGES, config

ANIMAL = Grammar(GrammarKind.REGEX, "(a dog|a cat|the frog) and [0-9]{3}")
STORY = "once upon a time there was a little dog who lived in the forest"


def mixed(run: Running) -> list[DecodeSteps]:
    """The commands that ran a chunk with a step."""
    commands = [one for one in run.recording.decode if isinstance(one, DecodeSteps)]
    return [one for one in commands if one.chunk is not None and one.chunk.rows]


def requests(run: Running, prompts: Sequence[int]) -> list[Request]:
    """Requests of every kind of sampling, whose prompts have these numbers of tokens."""
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 0.7, "seed": 8, "n": 2, "logprobs": 2},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": ((20, 3.0),)},
        {"grammar": ANIMAL, "ignore_eos": False},
        {"temperature": 1.0, "seed": 9, "grammar": ANIMAL, "logprobs": 1, "ignore_eos": False},
    ]
    rng, words = random.Random(3), STORY.split()
    made = []
    for index, tokens in enumerate(prompts):
        text = " ".join(rng.choice(words) for _ in range(tokens))
        ids = (run.tokenizer.encode(text) * 2)[:tokens]
        options = {"max_tokens": 24, "ignore_eos": True, **kinds[index % len(kinds)]}
        made.append(run.request(ids, f"r{index}", **options))
    return made


def streams(done: Sequence[Collected]) -> list[object]:
    return [(one.tokens, one.text, one.finish) for one in done]


def logprobs(done: Sequence[Collected]) -> list[float]:
    return [each.logprob for one in done for child in one.logprobs.values() for each in child]


@pytest.mark.ci
async def test_streams_beside_chunks_are_those_of_each_request_alone() -> None:
    prompts = (20, 70, 130, 5, 33, 64, 150, 20, 65, 90, 12, 129)
    async with running(config(Mode.UNIFIED)) as run:
        expected = [await run.complete(request) for request in requests(run, prompts)]
    async with running(config(Mode.CHUNKED)) as run:
        done = await run.complete_all(requests(run, prompts))
        steps = mixed(run)
    assert streams(done) == streams(expected)
    assert logprobs(done) == pytest.approx(logprobs(expected), abs=1e-4)
    assert any(one.chunk and one.chunk.rows[0].start for one in steps), "a prompt went on"
    assert any(one.chunk and len(one.chunk.rows) > 1 for one in steps), "packed"
    assert any(one.masked for one in steps)


@pytest.mark.ci
async def test_preemption_and_cached_prefixes_change_no_stream_beside_chunks() -> None:
    prompts = (20, 70, 130, 5, 33, 64, 150, 20, 65, 90, 12, 129, 200, 180, 40, 77)
    async with running(config()) as run:
        expected = streams(await run.complete_all(requests(run, prompts)))
    prefix = PrefixConfig(True, 16, host_gib=0.25, restores="always")
    engine = replace(config(Mode.CHUNKED, **FEW_PAGES), prefix=prefix)
    async with running(engine) as run:
        for _ in range(2):
            done, _ = await run.complete_preempted(requests(run, prompts))
            assert streams(done) == expected
        assert mixed(run)
        assert run.cluster._workers[-1].counters["prefix_hit_tokens"] > 0


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family",), first_ci([("gpt_oss",), ("deepseek_v32",), ("gemma2",), ("minimax_m3",)], ci=2)
)
async def test_every_kind_of_attention_gives_the_published_tokens_beside_chunks(
    family: str, tmp_path
) -> None:
    """Sliding windows, caps, sinks, experts, latent and sparse attention, against transformers."""
    directory = golden_copy(family, tmp_path)
    prompt, greedy = golden_greedy(directory)
    async with running(config(Mode.CHUNKED, directory=directory, **FAMILY)) as run:
        limits = run.cluster.decode.executor.limits
        assert limits.mixed_buckets, "no mixed programs"
        wanted = [
            run.request(prompt, f"r{index}", max_tokens=len(greedy), ignore_eos=True)
            for index in range(12)
        ]
        done = await run.complete_all(wanted)
        assert mixed(run)
    for one in done:
        assert one.tokens[0] == greedy
