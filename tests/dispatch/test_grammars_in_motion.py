"""Sequences with a grammar that are handed off, moved, preempted and whose workers die, in virtual
time: the answer still follows the grammar, and is the one that an undisturbed run gives."""

import asyncio

import pytest

from tests.dispatch.constrained import follow, requests
from tests.dispatch.deaths import outlive
from tests.fakes.cluster import Fleet
from tests.fakes.fake_executor import Costs, toy_limits


@pytest.mark.parametrize("wire", [False, True])
async def test_the_first_token_is_constrained_and_a_handed_off_sequence_goes_on_behind_it(
    wire: bool,
) -> None:
    async with Fleet(wire=wire) as fleet:
        await follow(fleet, requests(9))


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


@pytest.mark.parametrize(
    ("name", "seconds"), [("decode0", 0.1), ("decode0", 0.25), ("prefill0", 0.01)]
)
async def test_sequences_whose_worker_dies_follow_their_grammars(name: str, seconds: float) -> None:
    async with Fleet(costs=Costs(prefill_token=1e-3, pull=0.02)) as fleet:
        await outlive(fleet, follow(fleet, requests(9)), name, seconds)


async def test_preempted_sequences_follow_their_grammars() -> None:
    decode = toy_limits(pages_per_rank=30, slots_per_rank=8)
    async with Fleet(decodes=1, decode=decode, growth_tokens=1) as fleet:
        await follow(fleet, requests(9))
        worker = fleet.decode_worker("decode0")
        assert (await worker.status()).preemptions > 0
        assert worker.counters["forced_tokens"] > 0
