"""Faults in the channel of a cluster in one process: tokens stay right, pages and offers are freed,
and each fault took effect."""

import asyncio
import random
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.soak.faults import Fault, FaultPlan, FaultyChannel, garbled
from jdisagg.clock import Clock, MonotonicClock
from jdisagg.config import LimitsConfig, Mode
from jdisagg.engine import embedded
from jdisagg.transfer.channel import PullTarget, block_sharding
from jdisagg.transfer.in_process import InProcessChannel
from tests import time_scale
from tests.end_to_end.clusters import Running, running
from tests.fakes.cluster import Collected
from tests.shapes import config

# A busy machine takes longer than one for a sound pull, again and again.
PULL_SECONDS = time_scale.seconds(2.0)


def requests(run: Running) -> list:
    rng = random.Random(3)
    made = []
    for index in range(24):
        ids = [rng.randrange(300) for _ in range(rng.choice((3, 40, 70, 150)))]
        seeded = {"temperature": 0.8, "seed": index} if index % 2 else {}
        made.append(
            run.request(ids, f"r{index}", max_tokens=rng.choice((4, 12)), ignore_eos=True, **seeded)
        )
    return made


def tokens(done: list[Collected]) -> list[dict[int, list[int]]]:
    return [one.tokens for one in done]


_EXPECTED: list[dict[int, list[int]]] = []


async def expected() -> list[dict[int, list[int]]]:
    """One by one on one mesh; computed once."""
    if not _EXPECTED:
        async with running(config(Mode.UNIFIED)) as run:
            _EXPECTED.extend(tokens([await run.complete(request) for request in requests(run)]))
    return _EXPECTED


async def under(monkeypatch: pytest.MonkeyPatch, plan: FaultPlan) -> list[dict[int, list[int]]]:
    """All at once, over a channel that goes wrong by `plan`; `running` checks that pages and offers
    are freed."""
    monkeypatch.setattr(
        embedded,
        "InProcessChannel",
        lambda clock: FaultyChannel(InProcessChannel(clock), plan, clock),
    )
    limits = LimitsConfig(handoff_lease_seconds=3.0, pull_seconds=PULL_SECONDS, max_attempts=20)
    async with running(config(limits=limits)) as run, asyncio.timeout(300):
        return tokens(await run.complete_all(requests(run)))


FORCED: list[Mapping[tuple[str, int], Fault]] = [
    {("pull", 2): Fault.DROP, ("offer", 9): Fault.ERROR},
    {
        ("pull", 1): Fault.ERROR,
        ("pull", 2): Fault.DUPLICATE,
        ("offer", 3): Fault.DELAY,
        ("pull", 7): Fault.DELAY,
    },
    {("offer", 1): Fault.DROP, ("offer", 5): Fault.DUPLICATE},
    {("pull", 1): Fault.CORRUPT, ("pull", 9): Fault.WRONG_ID, ("pull", 20): Fault.CORRUPT},
]


@pytest.mark.ci
async def test_each_fault_alone_changes_no_token(monkeypatch: pytest.MonkeyPatch):
    for forced in FORCED:
        plan = FaultPlan(forced=forced)
        assert await under(monkeypatch, plan) == await expected(), forced
        faults = {(operation, fault) for (operation, _), fault in forced.items()}
        assert set(plan.took_effect) == faults


def test_a_garbled_block_differs_in_one_value_of_the_rank_that_receives():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1), ("dp", "kv", "rep"))
    block = jax.device_put(
        jnp.arange(2 * 3 * 4 * 16 * 8, dtype=jnp.float32).reshape(2, 3, 4, 16, 8),
        block_sharding(mesh),
    )
    changed = np.argwhere(
        np.asarray(garbled(block, 1, random.Random(0))).view(np.uint32)
        != np.asarray(block).view(np.uint32)
    )
    assert len(changed) == 1 and changed[0][0] == 1 and changed[0][3] == 0


def test_a_wrong_id_is_another_offers_when_one_is_known():
    clock: Clock = MonotonicClock()
    plan = FaultPlan(forced={("pull", 2): Fault.WRONG_ID})
    channel = FaultyChannel(InProcessChannel(clock), plan, clock)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("dp", "kv", "rep"))
    zeros = jax.device_put(jnp.zeros((1, 1, 1, 16, 4)), block_sharding(mesh))
    for offer in (1, 2):
        channel.offer(offer, zeros + offer, 0)
    pulls = [channel.pull(offer, PullTarget(zeros, 0), 5.0) for offer in (1, 2)]
    jax.block_until_ready([pull.arrays() for pull in pulls if pull.is_ready()])
    assert [float(np.asarray(pull.arrays()[0]).max()) for pull in pulls] == [1.0, 1.0]
    assert plan.took_effect == {("pull", Fault.WRONG_ID): 1}
