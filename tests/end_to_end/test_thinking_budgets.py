"""Answers of a real model whose reasoning is limited, in the forms of five families: the reasoning
ends after its budget, and each stream is that of the request alone on one mesh."""

import dataclasses

import pytest

from jdisagg.config import EngineConfig, Mode
from jdisagg.grammar.chat_answers import marker, with_thought_and_calls
from jdisagg.request import Grammar, Request, Thought
from jdisagg.scheduler import executor as limits_of
from tests.chat.reasoning_forms import FORMS
from tests.end_to_end.clusters import Running, running
from tests.end_to_end.drafts import KnowingDrafter, counted, learn, speculating
from tests.end_to_end.grammar_requests import PROMPT, SCHEMA
from tests.end_to_end.two_decoders import LEASES, TwoDecoders, storm
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.shapes import FEW_PAGES, config

pytestmark = pytest.mark.ci


def requests(run: Running) -> list[Request]:
    """All forms and budgets, greedy and seeded; of one form also with a schema of the content."""
    made: list[Request] = []
    for name, form in FORMS.items():
        marks, closing = form.format.marks, tuple(run.tokenizer.encode(form.closing)[1:])
        assert marks is not None
        opened = marker(marks.begin, None), marker(marks.end, None)
        content = with_thought_and_calls(SCHEMA, opened, True, [])
        for budget in (0, 1, 17):
            thought = Thought(budget, marks.begin, marks.end, (closing,), True, name == "harmony")
            grammars = [Grammar.of_any_text(), *([content] if name == "deepseek" else [])]
            for grammar in grammars:
                number = len(made)
                request = run.request(
                    PROMPT[: 9 + number],
                    f"t{number}",
                    grammar=dataclasses.replace(grammar, thought=thought),
                    max_tokens=70,
                    temperature=float(number % 2),
                    seed=number,
                    n=1 + (number % 5 == 4),
                )
                # <|end|> ends an answer of the shipped model, and a part of one of gpt-oss.
                made.append(dataclasses.replace(request, stop_ids=request.stop_ids[:1]))
    return made


def streams(done: list[Collected]) -> list[object]:
    return [(one.tokens, one.text, one.finish) for one in done]


_expected: list[Collected] = []


async def alone(monkeypatch: pytest.MonkeyPatch) -> list[Collected]:
    """On one mesh that steps through all tokens, each request alone."""
    if not _expected:
        with monkeypatch.context() as patch:
            patch.setattr(limits_of, "LONGEST_RUN", 1)
            async with running(config(Mode.UNIFIED), first_device=4) as run:
                asked = requests(run)
                _expected.extend([await run.complete(request) for request in asked])
                check(asked, _expected)
    return _expected


def check(asked: list[Request], done: list[Collected]) -> None:
    closed = 0
    for request, one in zip(asked, done, strict=True):
        assert request.sampling.grammar and request.sampling.grammar.thought
        thought = request.sampling.grammar.thought
        (closing,) = thought.closings
        for tokens in one.tokens.values():
            some = tuple(tokens[thought.budget :][: len(closing)])
            assert some == closing[: len(some)]
            closed += some == closing
    assert closed > len(asked) * 0.7, "hardly an answer was long enough"


@pytest.mark.parametrize(
    ("engine",),
    first_ci([(config(),), (config(Mode.CHUNKED, steps=4),), (config(prefill="pp=2"),)]),
    ids=("two meshes", "one mesh", "stages"),
)
async def test_reasoning_ends_after_its_budget(
    engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await alone(monkeypatch)
    async with running(engine) as run:
        assert streams(await run.complete_all(requests(run))) == streams(expected)
        assert sum(worker.counters["forced_tokens"] for worker in run.cluster._workers) > 50


async def test_drafts_change_no_limited_reasoning(
    monkeypatch: pytest.MonkeyPatch, knowing: type[KnowingDrafter]
) -> None:
    expected = await alone(monkeypatch)
    async with running(speculating(config())) as run:
        asked = requests(run)
        learn(knowing, asked, expected)
        assert streams(await run.complete_all(asked)) == streams(expected)
        assert counted(run, "accepted") > 100


async def test_moves_and_a_death_change_no_limited_reasoning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = await alone(monkeypatch)
    engine = config(**FEW_PAGES, limits=LEASES)
    async with running(engine, kind=TwoDecoders) as run:
        await storm(run, requests, streams, streams(expected))
