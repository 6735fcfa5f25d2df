"""How hand-offs share the link from one sender."""

import asyncio

from jdisagg.worker.peers import MOST_PULLS, LinkShare


async def pull(share: LinkShare, handoff: int, seconds: float, done: list[int]) -> None:
    await share.begin_turn(handoff)
    try:
        await asyncio.sleep(seconds)
        done.append(handoff)
    finally:
        share.end_turn()


async def test_turns_rotate_among_hand_offs() -> None:
    share, done = LinkShare(), list[int]()
    share.most = 1
    many = [asyncio.create_task(pull(share, 1, 1.0, done)) for _ in range(6)]
    await asyncio.sleep(0.5)
    few = [asyncio.create_task(pull(share, 2, 1.0, done)) for _ in range(2)]
    await asyncio.gather(*many, *few)
    assert done == [1, 1, 2, 1, 2, 1, 1, 1]


async def test_a_slow_link_carries_fewer_pulls_at_once_and_a_fast_one_many() -> None:
    share, done = LinkShare(), list[int]()
    pulls = [asyncio.create_task(pull(share, at, 1.0, done)) for at in range(MOST_PULLS + 1)]
    await asyncio.sleep(1.5)
    assert len(done) == MOST_PULLS
    share.took(3.0, limit_seconds=5.0)
    assert share.most == 1, "half of those in flight, and at least one"
    await asyncio.gather(*pulls)
    for _ in range(10):
        share.took(0.1, limit_seconds=5.0)
    assert share.most == 11
    share.took(2.0, limit_seconds=5.0)
    assert share.most == 11, "neither slow nor fast"


async def test_a_cancelled_turn_is_given_to_the_next() -> None:
    share, done = LinkShare(), list[int]()
    share.most = 1
    tasks = [asyncio.create_task(pull(share, at, 1.0, done)) for at in range(4)]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [1, 3]
    await asyncio.wait_for(pull(share, 9, 0.0, done), 1.0)
