"""Answers whose reasoning is limited, in virtual time: they are handed off, moved, preempted and
their workers die. Each is the answer of an undisturbed run, and its reasoning ends in time."""

import asyncio
import dataclasses
import itertools

import pytest

from jdisagg.grammar.chat_answers import marker, with_thought_and_calls
from jdisagg.request import Grammar, GrammarKind, Request
from tests.chat.reasoning_forms import FORMS
from tests.dispatch.deaths import outlive
from tests.fakes.cluster import Fleet, toy_request
from tests.fakes.fake_executor import Costs, toy_limits
from tests.fakes.toy_grammars import END, GRAMMARS, toy_text

CONTENT = Grammar(GrammarKind.REGEX, "[a-f]{3}(-[0-9]{4}){2,6}")


def grammar_of(name: str, budget: int, *, restricted: bool) -> Grammar:
    form = FORMS[name]
    limited = form.limited(budget, begun=True)
    if not restricted or form.format.in_headers:
        return limited
    marks = marker("<think>", None), marker("</think>", None)
    found = with_thought_and_calls(CONTENT, marks, True, [])
    GRAMMARS._find(found)
    return dataclasses.replace(found, thought=limited.thought)


def requests() -> list[Request]:
    """All formats and budgets, with a grammar of the content and without, greedy and not."""
    cases = itertools.product(FORMS, (0, 1, 17), (False, True))
    return [
        toy_request(
            number,
            prompt_tokens=10 + number,
            stop_ids=(END,),
            max_tokens=80,
            temperature=float(number % 2),
            seed=number,
            n=1 + (number % 7 == 3),
            repetition_penalty=1.0 + 0.1 * (number % 6 == 1),
            grammar=grammar_of(name, budget, restricted=restricted),
        )
        for number, (name, budget, restricted) in enumerate(cases)
    ]


async def follow(fleet: Fleet) -> None:
    asked = requests()
    closed = 0
    for request, answer in zip(asked, await fleet.collect_all(asked), strict=True):
        assert request.sampling.grammar is not None
        thought = request.sampling.grammar.thought
        assert thought is not None
        closing = toy_text(thought.closings[0])
        for tokens in answer.tokens.values():
            text = toy_text(tuple(tokens))
            if len(text) > thought.budget:
                assert closing.startswith(text[thought.budget :][: len(closing)])
                closed += 1
    assert closed > len(asked) / 2


@pytest.mark.parametrize("wire", [False, True])
async def test_reasoning_ends_in_time_behind_a_hand_off(wire: bool) -> None:
    async with Fleet(wire=wire) as fleet:
        await follow(fleet)
        forced = [fleet.decode_worker(name).counters["forced_tokens"] for name in ("decode0",)]
        assert sum(forced) > 0


async def test_reasoning_ends_in_time_where_sequences_move() -> None:
    async with Fleet(wire=True, decode=toy_limits(pages_per_rank=400)) as fleet:
        streams = asyncio.create_task(follow(fleet))
        await asyncio.sleep(0.1)
        await fleet.decode_worker("decode0").drain(30.0)
        await streams
        assert fleet.path.counters["sequences_moved"] > 0


@pytest.mark.parametrize(("name", "seconds"), [("decode0", 0.2), ("prefill0", 0.01)])
async def test_reasoning_ends_in_time_where_a_worker_dies(name: str, seconds: float) -> None:
    async with Fleet(costs=Costs(prefill_token=1e-3, pull=0.02)) as fleet:
        await outlive(fleet, follow(fleet), name, seconds)


async def test_reasoning_of_preempted_sequences_ends_in_time() -> None:
    decode = toy_limits(pages_per_rank=30, slots_per_rank=8)
    async with Fleet(decodes=1, decode=decode, growth_tokens=1) as fleet:
        await follow(fleet)
        assert (await fleet.decode_worker("decode0").status()).preemptions > 0
