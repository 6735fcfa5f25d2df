"""Sequences with a grammar that are handed off, moved, preempted and whose workers die, in virtual
time: the answer still follows the grammar, and is the one that an undisturbed run gives."""

import asyncio
import json
import re

import pytest

from jdisagg.request import FinishReason, GrammarKind, Request
from tests.fakes.cluster import Collected, Fleet, toy_request
from tests.fakes.fake_executor import Costs, toy_limits
from tests.fakes.toy_grammars import END, toy_grammar, toy_text

REGEX = "[a-f]{3}(-[0-9]{4}){2,6}"
AGES = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "ages": AGES},
    "required": ["kind", "ages"],
    "additionalProperties": False,
}


def requests(count: int) -> list[Request]:
    """With grammars of two kinds and without one, greedy and not, with penalties, of two
    children."""
    grammars = (
        toy_grammar(GrammarKind.REGEX, REGEX),
        toy_grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        None,
    )
    return [
        toy_request(
            number,
            prompt_tokens=10 + 5 * number,
            stop_ids=(END,),
            max_tokens=60,
            temperature=float(number % 2),
            seed=number,
            n=1 + (number % 4 == 3),
            repetition_penalty=1.0 + 0.1 * (number % 6 == 1),
            logprobs=number % 2 or None,
            grammar=grammars[number % 3],
        )
        for number in range(count)
    ]


async def follow(fleet: Fleet, asked: list[Request]) -> None:
    """Streams all at once; each is the undisturbed one, and what its grammar says."""
    answers = await asyncio.gather(*(fleet.collect(request) for request in asked))
    ended = 0
    for request, answer in zip(asked, answers, strict=True):
        fleet.check(request, answer)
        ended += follows(request, answer)
    assert ended > len(asked) / 3, "hardly an answer was whole"


def follows(request: Request, answer: Collected) -> int:
    """How many of its answers are whole, all of which follow."""
    grammar, ended = request.sampling.grammar, 0
    for child, reason in answer.finish.items() if grammar is not None else ():
        text = toy_text(tuple(answer.tokens[child]))
        if reason is not FinishReason.STOP:
            continue
        ended += 1
        if grammar is not None and grammar.kind is GrammarKind.REGEX:
            assert re.fullmatch(REGEX, text)
        else:
            found = json.loads(text)
            assert found["kind"] in ("cat", "dog") and all(age <= 99 for age in found["ages"])
    return ended


@pytest.mark.parametrize("wire", [False, True])
async def test_the_first_token_is_constrained_and_a_handed_off_sequence_goes_on_behind_it(
    wire: bool,
) -> None:
    async with Fleet(wire=wire) as fleet:
        await follow(fleet, requests(9))
        await fleet.check_quiet()


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("seconds", [0.05, 0.2])
async def test_sequences_that_move_to_another_decode_worker_follow_their_grammars(
    seconds: float, wire: bool
) -> None:
    async with Fleet(wire=wire, decode=toy_limits(pages_per_rank=200)) as fleet:
        streams = asyncio.create_task(follow(fleet, requests(6)))
        await asyncio.sleep(seconds)
        await fleet.decode_worker("decode0").drain(30.0)
        await streams
        assert fleet.path.counters["sequences_moved"] > 0
        assert fleet.decode_worker("decode1").counters["forced_tokens"] > 0
        await fleet.check_quiet()


@pytest.mark.parametrize(
    ("name", "seconds"), [("decode0", 0.1), ("decode0", 0.25), ("prefill0", 0.01)]
)
async def test_sequences_whose_worker_dies_follow_their_grammars(name: str, seconds: float) -> None:
    async with Fleet(costs=Costs(prefill_token=1e-3, pull=0.02)) as fleet:
        streams = asyncio.create_task(follow(fleet, requests(9)))
        await asyncio.sleep(seconds)
        await fleet.kill(name)
        await streams
        counters = fleet.path.counters
        assert counters["sources_replaced"] + counters["attempts_failed"] > 0
        await fleet.check_quiet(settle_seconds=10.0)


async def test_preempted_sequences_follow_their_grammars() -> None:
    decode = toy_limits(pages_per_rank=30, slots_per_rank=8)
    async with Fleet(decodes=1, decode=decode, growth_tokens=1) as fleet:
        await follow(fleet, requests(9))
        worker = fleet.decode_worker("decode0")
        assert (await worker.status()).preemptions > 0
        assert worker.counters["forced_tokens"] > 0
        await fleet.check_quiet()
