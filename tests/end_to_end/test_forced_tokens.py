"""Tokens that a grammar forces are taken several per step. Every stream equals that of a mesh that
steps through them one by one."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.request import Grammar, GrammarKind
from jdisagg.scheduler import executor as limits_of
from tests.end_to_end.clusters import Running, golden_copy, running
from tests.end_to_end.grammar_requests import requests
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.shapes import FAMILY, config

pytestmark = pytest.mark.ci


def streams(done: list[Collected]) -> list[object]:
    return [(one.tokens, one.text, one.finish, _values(one)) for one in done]


def _values(one: Collected) -> dict[int, int]:
    return {child: len(values) for child, values in one.logprobs.items()}


def forced(run: Running) -> int:
    return sum(worker.counters["forced_tokens"] for worker in run.cluster._workers)


async def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """On one mesh that takes no runs, each request alone."""
    with monkeypatch.context() as patch:
        patch.setattr(limits_of, "LONGEST_RUN", 1)
        async with running(config(Mode.UNIFIED), first_device=4) as run:
            done = [await run.complete(request) for request in requests(run)]
            assert forced(run) == 0
    return streams(done)


@pytest.mark.parametrize(
    ("engine",),
    first_ci(
        [(config(),), (config(Mode.CHUNKED, steps=4),), (config(prefill="pp=2", decode="pp=2"),)]
    ),
    ids=("two meshes", "one mesh", "stages"),
)
async def test_runs_change_no_stream(engine: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await one_by_one(monkeypatch)
    async with running(engine) as run:
        done = await run.complete_all(requests(run))
        assert streams(done) == expected
        assert forced(run) > 100


# A text with a single tokenization: one token per character.
MARKS = Grammar(GrammarKind.REGEX, r"(@#~\^7[0-9]Z@#~\^[A-F]@#){2,5}")


@pytest.mark.parametrize(
    ("name",),
    first_ci(
        [
            ("gpt_oss",),
            ("qwen3_next",),
            ("granite4_hybrid",),
            ("deepseek_v3",),
            ("mistral_window",),
        ],
        ci=2,
    ),
)
async def test_runs_change_no_stream_whatever_is_kept_of_a_position(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents, windows in rings of pages, and a state, of which snapshots are made in answers."""
    directory = golden_copy(name, tmp_path)
    engine = config(Mode.CHUNKED, directory=directory, **FAMILY)
    engine = replace(engine, prefix=PrefixConfig(True, 16))
    done: dict[int, list[object]] = {}
    for longest in (1, limits_of.LONGEST_RUN):
        monkeypatch.setattr(limits_of, "LONGEST_RUN", longest)
        async with running(engine) as run:
            asked = [
                run.request(
                    range(20, 30 + 3 * seed),
                    f"k{seed}",
                    grammar=MARKS,
                    max_tokens=60,
                    temperature=float(seed % 2),
                    seed=seed,
                )
                for seed in range(6)
            ]
            done[longest] = streams(await run.complete_all(asked))
            assert (forced(run) > 0) == (longest > 1)
    assert done[1] == done[longest]
