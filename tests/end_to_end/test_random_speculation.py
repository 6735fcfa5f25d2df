"""The long form of `test_speculation.py`: over 2,000 random streams with drafts of each source
equal those of a mesh that verifies none."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode
from jdisagg.request import Grammar, GrammarKind, Request
from jdisagg.scheduler.draft_worth import DraftWorth
from tests.end_to_end.clusters import Running, running
from tests.end_to_end.drafts import KnowingDrafter as KnowingDrafter
from tests.end_to_end.drafts import counted, learn, same_logprobs
from tests.end_to_end.mixed_requests import streams
from tests.fakes.cluster import Collected
from tests.models.next_token_checkpoints import eagle_head
from tests.shapes import LLAMA, config

COUNT = 430  # requests, with some 520 streams
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "Tom", "saw", "one", "red", "ball", "in")
GRAMMARS = (
    Grammar(GrammarKind.REGEX, "[0-9] one two three [0-9]{9}"),
    Grammar(GrammarKind.REGEX, "[a-z ]{20}"),
)


def random_requests(run: Running) -> list[Request]:
    """Requests with random prompts, half of which begin alike, and random options."""
    rng = random.Random(11)
    return [_request(run, rng, f"s{index}") for index in range(COUNT)]


def _request(run: Running, rng: random.Random, name: str) -> Request:
    words = rng.choices(WORDS, k=rng.randint(1, 40))
    text = " ".join(words if rng.random() < 0.5 else [*WORDS, *WORDS, *words])
    options: dict[str, object] = {"max_tokens": rng.randint(1, 40), "seed": rng.getrandbits(40)}
    options["temperature"] = rng.choice((0.0, 0.0, 0.6, 1.0, 1.6))
    choices: tuple[dict[str, object], ...] = (
        {"top_p": rng.choice((0.5, 0.9))},
        {"top_k": rng.choice((1, 5, 40))},
        {"min_p": 0.1},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"frequency_penalty": rng.choice((-1.0, 0.5))},
        {"logit_bias": ((rng.randrange(300), 4.0), (rng.randrange(300), -100.0))},
        {"min_tokens": rng.randint(1, options["max_tokens"])},  # type: ignore[arg-type]
        {"stop": (rng.choice((" the", ". ", "a")),)},
        {"stop_token_ids": (rng.randrange(300),)},
        {"ignore_eos": True},
        {"logprobs": rng.randint(0, 5)},
        {"n": rng.randint(2, 3)},
        {"grammar": rng.choice(GRAMMARS)},
    )
    for choice in choices:
        if rng.random() < 0.15:
            options |= choice
    return run.request(text, name, **options)


async def served(run: Running, asked: list[Request]) -> list[Collected]:
    """Completes requests, as many at once as may wait."""
    half = len(asked) // 2
    return [*await run.complete_all(asked[:half]), *await run.complete_all(asked[half:])]


_expected: list[Collected] = []


async def without_drafts() -> list[Collected]:
    if not _expected:
        engine = config(Mode.UNIFIED)
        async with running(engine, first_device=4) as run:
            _expected.extend(await served(run, random_requests(run)))
    return _expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "mode", "prefill", "decode"),
    [
        ("ngram", Mode.CHUNKED, "tp=1", "dp=2"),
        ("mtp", Mode.DISAGGREGATED, "tp=1", "tp=2"),
        ("eagle", Mode.DISAGGREGATED, "tp=2", "dp=2"),
        ("mtp", Mode.CHUNKED, "tp=1", "tp=1"),
    ],
)
async def test_random_streams_are_those_without_drafts(
    source: str,
    mode: Mode,
    prefill: str,
    decode: str,
    knowing: type[KnowingDrafter],
    tmp_path: Path,
) -> None:
    """Drafts are verified in every step. Those of the sequence's own tokens come from a drafter
    that makes errors."""
    expected = await without_drafts()
    assert DraftWorth().pays(0.0), "the fixture takes all drafts"
    engine = config(mode, prefill, decode, speculate=source)
    if source == "eagle":
        engine = replace(
            engine, model=replace(engine.model, draft=str(eagle_head(LLAMA, tmp_path)))
        )
    async with running(engine) as run:
        asked = random_requests(run)
        learn(knowing, asked, expected)
        done = await served(run, asked)
        drafted, accepted = counted(run, "drafted"), counted(run, "accepted")
    differ = [
        one.request_id
        for one, ours, theirs in zip(asked, streams(done), streams(expected), strict=True)
        if ours != theirs
    ]
    assert not differ
    same_logprobs(done, expected)
    count = sum(len(one.tokens) for one in done)
    print(f"{source}, {mode.value}: {count} streams, {accepted} of {drafted} drafts accepted")
    assert count > 500 and 0 < accepted < drafted
