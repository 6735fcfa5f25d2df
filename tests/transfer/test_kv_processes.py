"""The transfer channel between real processes: jobs of several processes, deaths, stops, restarts,
and a receiver that stalls."""

import math
import signal
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jdisagg.layout.axes import MESH_AXES, Layout
from jdisagg.transfer.channel import PullTarget, block_sharding, resident_zeros
from tests import time_scale
from tests.transfer.conformance import arrives, case, finished, settled
from tests.transfer.connections import connections_since, inodes
from tests.transfer.kv_processes import TRANSPORTS, Arrived, Block, MakeOffer, MakePull, Process
from tests.transfer.world import PATIENCE_SECONDS, World, card

BIG_TOKENS = 1 << 21  # 128 MB
RESET_SECONDS = time_scale.seconds(5.0)
# A block that takes several times its limit, at so many bytes per second of each connection.
SLOW_BYTES, SLOW_RATE, SLOW_LIMIT_SECONDS = 1 << 20, 50_000, 2.0


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def one_device() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), MESH_AXES)


def offer_everywhere(processes: list[Process], offer: MakeOffer) -> None:
    for process in processes:
        process.do(offer)
    for process in processes:
        assert process.answer().error == ""


@pytest.mark.ci
def test_each_process_of_a_job_sends_and_receives_its_own_shards(world: World) -> None:
    job = world.job(devices=2, count=2)
    world.channel.connect("job", card(*(process.end for process in job)))
    for number, (source, rank) in enumerate([("tp=4", 0), ("dp=2,tp=2", 0), ("dp=2,tp=2", 1)]):
        offer_everywhere(job, MakeOffer(number, Block(source), rank))
        for destination in ("tp=1", "dp=2,tp=2", "tp=4"):
            here = case(source, destination)
            target = PullTarget(here.zeros, 0, "job")
            pull = world.channel.pull(number, target, PATIENCE_SECONDS)
            arrives(pull, here, source_rank=rank)
    for process in job:
        world.introduce(process)
    for number, source in enumerate(("tp=1", "tp=4"), 10):
        here = case(source, "tp=4")
        world.channel.offer(number, here.block, 0)
        for destination in ("tp=4", "dp=2,tp=2"):
            layout = Layout.parse(destination)
            heads = 4 // layout.tp
            granule = math.gcd(4 // Layout.parse(source).tp, heads)
            for rank in range(layout.dp):
                ask = MakePull(number, "here", Block(destination), rank, granule, PATIENCE_SECONDS)
                for process in job:
                    process.do(ask)
                shards = merged([process.answer() for process in job])
                assert len(shards) == layout.tp
                devices = sorted(shards, key=lambda device: (device // 2048, device))
                for first, device in zip(range(0, 4, heads), devices, strict=True):
                    wanted = here.values[:1, :, first : first + heads]
                    np.testing.assert_array_equal(shards[device], wanted)


def merged(answers: list[Arrived]) -> dict[int, np.ndarray]:
    assert not [answer.error for answer in answers if answer.error]
    shards: dict[int, np.ndarray] = {}
    for answer in answers:
        assert not shards.keys() & answer.shards.keys()
        shards |= answer.shards
    return shards


@pytest.mark.ci
def test_a_killed_sender_fails_its_pulls_and_its_successor_serves_under_a_new_name(
    world: World,
) -> None:
    first = world.start("first")
    world.is_pulled_from("first")
    here = case("tp=4", "tp=2")
    waiting = world.channel.pull(2, PullTarget(here.zeros, 0, "first"), 1.0)
    first.end_it()
    for pull in (waiting, world.pull("first", 1.0)):
        assert "HandoffError" in type(finished(pull).failed()).__name__
    world.channel.disconnect("first")
    world.start("second")
    world.is_pulled_from("second")


@pytest.mark.ci
def test_pulls_from_a_stopped_sender_end_at_their_deadline_and_it_serves_again_when_it_goes_on(
    world: World,
) -> None:
    sender = world.start("peer")
    offer_everywhere([sender], MakeOffer(2, Block("tp=1", tokens=BIG_TOKENS), 0))
    world.is_pulled_from("peer")
    zeros = resident_zeros(one_device(), 2, 4, BIG_TOKENS, 2, np.dtype(np.float32))
    in_its_bytes = world.channel.pull(2, PullTarget(zeros, 0, "peer"), 2.0)
    time.sleep(0.03)
    sender.signal(signal.SIGSTOP)
    unanswered = world.pull("peer", 0.5)
    for pull in (unanswered, in_its_bytes):
        error = finished(pull).failed()
        assert error is not None and "within the deadline" in error.message
    settled(lambda: world.channel.under_way() == 0)  # the connection was dropped
    sender.signal(signal.SIGCONT)
    world.is_pulled_from("peer")


@pytest.mark.ci
def test_a_receiver_that_stalls_in_the_middle_of_its_bytes_does_not_slow_another(
    world: World,
) -> None:
    (stalled,) = world.job(devices=1)
    world.introduce(stalled)
    block = Block("tp=1", tokens=BIG_TOKENS)
    values = jax.numpy.zeros(block.shape(1), jax.numpy.float32)
    world.channel.offer(1, jax.device_put(values, jax.devices()[0]), 0)
    other = case("tp=4", "tp=2")
    world.channel.offer(2, other.block, 0)
    stalled.do(MakePull(1, "here", block, 0, 4, PATIENCE_SECONDS))
    while world.channel.postings() == 0:
        time.sleep(0.001)
    time.sleep(0.03)  # into the middle of its bytes
    stalled.signal(signal.SIGSTOP)
    world.channel.connect("", card(world.here))
    for _ in range(3):
        target = PullTarget(other.zeros, 0, "")
        arrives(world.channel.pull(2, target, PATIENCE_SECONDS), other)
    assert world.channel.postings() >= 1
    assert not stalled.has_answered(), "the other receiver should be stalled"
    stalled.signal(signal.SIGCONT)
    assert stalled.answer().error == ""


@pytest.mark.parametrize("breaks", ["reset", "close"])
def test_any_connection_of_the_kv_plane_may_break_and_the_next_pull_opens_another(
    world: World, breaks: str
) -> None:
    (process,) = world.job()
    process.do(MakeOffer(1, Block("tp=4"), 0))
    assert process.answer().error == ""
    before = inodes()
    world.channel.connect("job", card(process.end))
    world.is_pulled_from("job")
    for number in range(1 + TRANSPORTS):  # of control and of data
        now = sorted(connections_since(before), key=lambda one: one.inode)
        assert len(now) == 1 + TRANSPORTS
        getattr(now[number], breaks)()
        for _ in range(2):
            pull = world.pull("job", seconds=RESET_SECONDS)
            settled(pull.is_ready)
            # A pull that begins before the channel has counted an error takes the same connection.
            settled(lambda: world.channel.under_way() == 0)
        world.is_pulled_from("job")
        assert now[number].inode not in inodes()


@pytest.mark.ci
def test_a_pull_may_take_longer_than_its_limit_while_its_bytes_arrive(world: World) -> None:
    (process,) = world.job(devices=1)
    before = inodes()
    world.introduce(process)
    seconds = SLOW_BYTES / (SLOW_RATE * (1 + TRANSPORTS))
    assert seconds > 3 * SLOW_LIMIT_SECONDS
    for number, block in enumerate([Block("tp=1"), Block("tp=1", tokens=SLOW_BYTES // 64)]):
        array = jax.device_put(block.values(1), block_sharding(one_device()))
        world.channel.offer(number, array, 0)
        began = time.monotonic()
        process.do(MakePull(number, "here", block, 0, 4, SLOW_LIMIT_SECONDS))
        answer = process.answer()
        assert answer.error == ""
        np.testing.assert_array_equal(answer.shards[0], block.values(1))
        for connection in connections_since(before):
            connection.pace(SLOW_RATE)
    assert time.monotonic() - began > seconds / 2, "it was slow"
