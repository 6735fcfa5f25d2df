"""Drafts of models with recurrent state: each stream equals that of the request alone on a mesh
that verifies none, also where others lost or doubled a part of the state: after a hit at a border
within accepted drafts, an append, a cancellation, a preemption, a move, a death."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, golden_copy, golden_greedy, running
from tests.end_to_end.drafts import KnowingDrafter, counted, learn, speculating
from tests.end_to_end.family_storms import alone_and_crowded, mixed_requests, streams
from tests.end_to_end.short_turns import Talk
from tests.end_to_end.two_decoders import TwoDecoders, storm
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.models.next_token_checkpoints import with_next_token_layer
from tests.shapes import FAMILY, config

BLOCK = 16


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "source", "prefill", "decode"),
    first_ci(
        [
            ("qwen3_next", "ngram", "tp=2", "dp=2"),
            ("granite4_hybrid", "ngram", "tp=1", "dp=2"),
            ("qwen3_5", "mtp", "tp=2", "dp=2"),
            ("kimi_linear", "ngram", "tp=2", "dp=2,ep=2"),
            ("lfm2", "ngram", "tp=1", "dp=2"),
            ("minimax", "ngram", "tp=2", "dp=2,ep=2"),
            ("nemotron_h_moe", "ngram", "tp=1", "dp=2"),
        ],
        ci=3,
    ),
)
async def test_a_storm_changes_no_stream(
    name: str, source: str, prefill: str, decode: str, tmp_path: Path, knowing: type[KnowingDrafter]
) -> None:
    """Prefix hits, host memory, preemption, moves between two decode workers, one of which dies."""
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    if source == "mtp":
        directory = with_next_token_layer(directory, tmp_path, mtp=True)
    whole = [*prompt, *greedy]
    alone, crowded = alone_and_crowded(directory, prefill, decode)
    if source == "mtp":
        crowded = replace(crowded, prefill=replace(crowded.prefill, speculate=source))

    def asked(run: Running) -> list[Request]:
        return mixed_requests(run, whole)

    async with running(alone, first_device=4) as run:
        done = [await run.complete(request) for request in asked(run)]
        learn(knowing, asked(run), done)
    async with running(speculating(crowded, source), kind=TwoDecoders) as run:
        await storm(run, asked, streams, streams(done))
        drafted, accepted = counted(run, "drafted"), counted(run, "accepted")
        assert 0 < accepted < drafted
        assert source == "mtp" or accepted > 300


class LongAnswers(Talk):
    """Answers that cross several borders of blocks, so that the next turn begins at a snapshot
    within an answer."""

    BEGINNINGS = (20, 27)

    def _next(self) -> Request:
        rng, self._count = self._random, self._count + 1
        ids = (rng.choice(self._histories) + self.words(rng.choice((1, 3, 5))))[:130]
        options = {"temperature": 0.8 * (self._count % 2), "seed": rng.getrandbits(40)}
        return self._run.request(
            ids, f"r{self._count}", max_tokens=rng.choice((18, 40)), ignore_eos=True, **options
        )


async def talk(run: Running, waves: int = 4) -> tuple[list[Request], list[Collected], int]:
    spoken, asked, answers, cached = LongAnswers(run, seed=4), [], [], 0
    for _ in range(waves):
        wave = spoken.wave(4)
        done = await run.complete_all(wave)
        spoken.heard(wave, done)
        asked, answers = [*asked, *wave], [*answers, *done]
        cached += sum(one.usage.cached_tokens for one in done if one.usage)
    return asked, answers, cached


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "mode", "errors"),
    first_ci(
        [
            ("qwen3_next", Mode.DISAGGREGATED, 0.1),
            ("granite4_hybrid", Mode.CHUNKED, 0.0),
            ("lfm2", Mode.DISAGGREGATED, 0.3),
        ]
    ),
)
async def test_turns_go_on_from_snapshots_within_accepted_drafts(
    name: str,
    mode: Mode,
    errors: float,
    tmp_path: Path,
    knowing: type[KnowingDrafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(knowing, "errors", errors)
    directory = golden_copy(name, tmp_path)
    engine = config(mode, "tp=1", "dp=2", directory=directory, **FAMILY)
    async with running(replace(engine, prefix=PrefixConfig())) as run:
        asked, expected, none = await talk(run)
    learn(knowing, asked, expected)
    kept = replace(engine, prefix=PrefixConfig(True, BLOCK))
    async with running(speculating(kept)) as run:
        _, done, cached = await talk(run)
        assert streams(done) == streams(expected)
        drafted, accepted = counted(run, "drafted"), counted(run, "accepted")
        snapshots = [one for worker in run.cluster._workers for one in worker._kept.snapshots]
    assert none == 0 and cached > 100
    assert 150 < accepted < drafted
    # begun and used snapshots within answers: prompts end at most of them
    assert sum(one.used for one in snapshots) > 4
