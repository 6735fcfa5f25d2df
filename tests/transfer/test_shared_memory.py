"""KV between processes of one host by shared memory: the channel's rules hold, nothing passes
through the transfer engine, and no memory outlives who needs it."""

import dataclasses
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from jdisagg.errors import HandoffError
from jdisagg.messages.kv_plane import (
    InMemory,
    KvMessage,
    Opened,
    Posted,
    Pulled,
    PullRequest,
    Withdraw,
)
from jdisagg.transfer import shared_memory
from jdisagg.transfer.backend_choice import Memories
from jdisagg.transfer.channel_thread import ComputeWait
from jdisagg.transfer.negotiated_channel import NegotiatedChannel
from jdisagg.transfer.shared_memory import (
    Region,
    SharedInlet,
    SharedMemory,
    SharedOutlet,
    reachable,
)
from tests.transfer.conformance import (
    LONG_SECONDS,
    ChannelConformance,
    Ends,
    ManualClock,
    answer,
    arrives,
    behind_work,
    case,
    finished,
    one_piece,
    settled,
)
from tests.transfer.kv_processes import Block, MakePull
from tests.transfer.loopback import RECEIVER, SENDER, Loopback, card
from tests.transfer.world import PATIENCE_SECONDS, World


@pytest.fixture
def ends(loopback: Loopback) -> Iterator[Ends]:
    clock = ManualClock()
    channels: list[NegotiatedChannel] = []
    for end in (SENDER, RECEIVER):
        memory = SharedMemory()
        end = dataclasses.replace(end, memory=memory.name)
        channel = NegotiatedChannel(
            clock, end, loopback.of(end), transports=2, memories=Memories(memory)
        )
        loopback.channels[end] = channel
        channels.append(channel)
    sender, receiver = channels
    (sender_end, _) = loopback.channels
    receiver.connect("", card(sender_end))
    yield Ends(sender, receiver, clock)
    for channel in channels:
        channel.close()


def regions() -> int:
    """Descriptors and mappings of shared memory that this process has."""
    folder = f"/proc/{os.getpid()}"
    with open(f"{folder}/maps") as maps:
        mapped = sum("memfd:jdisagg-kv" in line for line in maps)
    for descriptor in os.listdir(f"{folder}/fd"):
        try:
            mapped += "memfd:jdisagg-kv" in os.readlink(f"{folder}/fd/{descriptor}")
        except OSError:
            continue  # the listing's own
    return mapped


def collected() -> bool:
    """JAX lets go of what arrays were made of at its next chance."""
    return gc.collect() >= 0


class TestSharedMemoryChannel(ChannelConformance):
    pass


def test_the_answer_says_where_the_pieces_lie_and_the_engine_is_not_used(
    ends: Ends, loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, block = loopback.heard(), case("tp=2", "tp=4")
    monkeypatch.setattr("jdisagg.transfer.transfer_engine.EngineOptions.start_server", None)
    ends.sender.offer(7, block.block, 0)
    arrives(ends.pull(7, block), block)
    assert list(loopback.channels.values())[1].channels() == (f"{SENDER.control} shared memory",)
    answers = [message for message in messages if isinstance(message, Posted)]
    assert answers
    assert all(answer.memory is not None for answer in answers)
    assert not any(isinstance(message, Opened) for message in messages)


def test_a_region_is_used_again_once_nothing_of_it_is_needed_and_not_before(
    ends: Ends, loopback: Loopback
) -> None:
    messages, block = loopback.heard(), case("tp=1", "tp=1")
    ends.sender.offer(1, block.block, 0)
    kept = finished(ends.receiver.pull(1, block.target(0), LONG_SECONDS))
    other = dataclasses.replace(block, block=block.block + 1, values=block.values + 1)
    ends.sender.offer(2, other.block, 0)
    second = finished(ends.receiver.pull(2, block.target(0), LONG_SECONDS))
    for pull, whose in ((kept, block), (second, other)):
        arrives(pull, whose)
    assert not any(isinstance(message, Pulled) for message in messages)
    del kept, pull, second
    settled(lambda: collected() and sum(isinstance(each, Pulled) for each in messages) == 2)
    sender = next(iter(loopback.channels.values()))
    settled(lambda: sender.postings() == 0)
    arrives(ends.pull(1, block), block)
    places = [each.memory for each in messages if isinstance(each, Posted)]
    assert places[0] is not None and places[1] is not None and places[2] is not None
    assert places[0].inode != places[1].inode
    assert places[2].inode in (places[0].inode, places[1].inode)


def test_what_was_taken_back_while_its_receiver_maps_it_stays_as_it_was(
    ends: Ends, loopback: Loopback
) -> None:
    block = case("tp=1", "tp=1")
    ends.sender.offer(1, block.block, 0)
    pull = finished(ends.receiver.pull(1, block.target(0), LONG_SECONDS))
    ends.clock.seconds = 2 * LONG_SECONDS  # beyond the posting's time
    sender = next(iter(loopback.channels.values()))
    settled(lambda: sender.postings() == 0)
    for number in range(2, 6):  # none of them may take its region
        ends.sender.offer(number, block.block + number, 0)
        finished(ends.receiver.pull(number, block.target(0), LONG_SECONDS)).arrays()
    arrives(pull, block)


def test_a_block_that_is_still_computed_is_written_when_it_is_there_and_keeps_no_other_waiting(
    ends: Ends, loopback: Loopback
) -> None:
    messages, block = loopback.heard(), case("tp=2", "tp=2")
    late = behind_work(block.block)
    ends.sender.offer(1, late, 0)
    slow = ends.receiver.pull(1, block.target(0), LONG_SECONDS)
    there = case("tp=1", "tp=2")
    ends.sender.offer(2, jax.block_until_ready(there.block), 0)
    arrives(ends.pull(2, there), there)
    arrives(slow, block)
    answered = [each.pull_id for each in messages if isinstance(each, Posted)]
    asked = [each.pull_id for each in messages if isinstance(each, PullRequest)]
    assert sorted(set(answered)) == sorted(set(asked))


def test_where_a_block_will_lie_is_said_before_it_is_computed_and_no_message_after(
    ends: Ends, loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The computation is held in this test's hand."""
    computed: list[Callable[[], object]] = []
    monkeypatch.setattr("jdisagg.transfer.kv_sender.is_ready", lambda array: False)
    monkeypatch.setattr(ComputeWait, "then", lambda self, number, arrays, job: computed.append(job))
    messages, block = loopback.heard(), case("tp=2", "tp=2")
    ends.sender.offer(1, block.block, 0)
    pull = ends.receiver.pull(1, block.target(0), LONG_SECONDS)
    settled(lambda: any(isinstance(message, Posted) for message in messages) and bool(computed))
    assert not pull.is_ready()
    before = list(messages)
    for job in computed:
        job()
    arrives(pull, block)
    assert messages == before


def test_a_region_that_is_used_again_holds_nothing_until_it_is_written() -> None:
    memory = SharedMemory()
    outlet, reader = SharedOutlet(memory), SharedInlet(memory.name)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    aval = jax.ShapeDtypeStruct((1, 1, 1, 4, 4), np.float32, sharding=place)
    inodes = set()
    for pull_id in range(2):
        values = np.full(aval.shape, pull_id, aval.dtype)
        lies = outlet.reserve(pull_id, one_piece(values), 1000.0).memory
        assert isinstance(lies, InMemory)
        (leaf,) = reader.pull(answer(lies), [aval], lambda: True, lambda: None)
        assert not leaf.is_ready()
        outlet.write(pull_id)
        assert leaf.is_ready()
        np.testing.assert_array_equal(leaf.array(), values)
        outlet.pulled(pull_id)
        inodes.add(lies.inode)
    assert len(inodes) == 1
    reader.close(in_flight=False)
    memory.close()


def test_a_withdrawn_pull_of_a_block_that_is_still_computed_keeps_no_memory(
    ends: Ends, loopback: Loopback
) -> None:
    messages, block = loopback.heard(), case("tp=2", "tp=2")
    before = regions()
    ends.sender.offer(1, behind_work(block.block), 0)
    ends.receiver.pull(1, block.target(0), LONG_SECONDS).cancel()
    settled(lambda: any(isinstance(message, Withdraw) for message in messages))
    sender = next(iter(loopback.channels.values()))
    settled(lambda: sender.postings() == 0)
    ends.sender.revoke(1, "over")
    ends.receiver.disconnect("")  # what it had mapped by then it would keep for the next
    settled(lambda: collected() and regions() <= before)


def test_no_memory_is_kept_when_all_is_over(loopback: Loopback, ends: Ends) -> None:
    block = case("tp=2", "tp=4")
    for number in range(30):
        ends.sender.offer(number, block.block, 0)
        pull = ends.receiver.pull(number, block.target(0), LONG_SECONDS)
        if number % 3:
            finished(pull)
        else:
            pull.cancel()
        if number % 5 == 0:
            ends.sender.revoke(number, "enough")
        else:
            ends.sender.release(number)
    del pull
    for channel in loopback.channels.values():
        settled(lambda channel=channel: channel.under_way() == 0)
    for channel in loopback.channels.values():
        channel.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
    settled(lambda: collected() and regions() == 0)


def test_an_answer_that_names_memory_which_is_not_there_fails_the_pull_and_the_next_arrives(
    ends: Ends, loopback: Loopback
) -> None:
    block, spoiled = case("tp=2", "tp=2"), []

    def spoil(message: KvMessage) -> list[KvMessage]:
        if isinstance(message, Posted) and message.memory and not spoiled:
            spoiled.append(message)
            other = InMemory(message.memory.descriptor, 1, message.memory.offsets)
            return [Posted(message.pull_id, message.link, "", 4, message.pieces, other)]
        return [message]

    loopback.tamper = spoil
    ends.sender.offer(1, block.block, 0)
    with pytest.raises(HandoffError, match="taken back"):
        arrives(ends.pull(1, block), block)
    assert spoiled
    arrives(ends.pull(1, block), block)


@pytest.mark.parametrize(
    "lies",
    [
        lambda region: InMemory(region.descriptor, region.inode, (region.size,)),
        lambda region: InMemory(region.descriptor, region.inode, (0,)),  # where its state is
        lambda region: InMemory(region.descriptor, region.inode, ()),
        lambda region: InMemory(10**6, region.inode, (0,)),
    ],
)
def test_leaves_beyond_a_region_or_of_none_are_refused(lies) -> None:
    memory = SharedMemory()
    region = memory.take(4096)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    aval = jax.ShapeDtypeStruct((16,), np.float32, sharding=device)
    with pytest.raises(HandoffError):
        reader = SharedInlet(memory.name)
        reader.pull(answer(lies(region)), [aval], lambda: True, lambda: None)
    region.close()
    memory.close()


@pytest.mark.parametrize("name", ["", "nonsense", "1:2:xyz", "PID:0:00", "0:0:"])
def test_a_name_of_no_memory_is_not_reachable(name: str) -> None:
    assert not reachable(name.replace("PID", str(os.getpid())))


def test_who_cannot_map_the_sender_pulls_through_the_engine(loopback: Loopback) -> None:
    """As another host sees it: the same numbers, another secret."""
    clock, memory, own = ManualClock(), SharedMemory(), SharedMemory()
    pid, descriptor, _ = memory.name.split(":")
    elsewhere = dataclasses.replace(SENDER, memory=f"{pid}:{descriptor}:{'00' * 16}")
    messages = loopback.heard()
    sender = NegotiatedChannel(
        clock, elsewhere, loopback.of(elsewhere), transports=2, memories=Memories(memory)
    )
    receiver = NegotiatedChannel(
        clock, RECEIVER, loopback.of(RECEIVER), transports=2, memories=Memories(own)
    )
    loopback.channels |= {elsewhere: sender, RECEIVER: receiver}
    receiver.connect("", card(elsewhere))
    block = case("tp=2", "tp=2")
    sender.offer(7, block.block, 0)
    arrives(Ends(sender, receiver, clock).pull(7, block), block)
    assert any(isinstance(message, Opened) for message in messages)
    assert all(each.memory is None for each in messages if isinstance(each, Posted))
    assert receiver.channels() == (f"{elsewhere.control} transfer engine",)
    receiver.close()
    sender.close()


def test_spare_regions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SPARE_BYTES", 3 * 4096)
    memory = SharedMemory()
    before = regions()
    taken: list[Region] = [memory.take(4096) for _ in range(8)]
    each = (regions() - before) // 8
    for region in taken:
        memory.give_back(region)
    assert regions() - before == 3 * each > 0
    memory.close()


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_processes_that_are_killed_leave_no_memory_and_their_receivers_keep_what_they_have(
    death: signal.Signals,
) -> None:
    world = World(Memories(SharedMemory()))
    try:
        job = world.start("job")
        assert job.end.memory
        block, pull = case("tp=4", "tp=2"), finished(world.pull("job"))
        # and in the other direction: it holds what it pulled here when it dies
        world.introduce(job)
        world.channel.offer(2, block.block, 0)
        job.do(MakePull(2, "here", Block("tp=4"), 0, 1, PATIENCE_SECONDS))
        assert job.answer().error == ""
        job.signal(death)
        job.end_it()
        arrives(pull, block)
        with pytest.raises(HandoffError):
            finished(world.pull("job", 1.0)).arrays()
        del pull
        world.channel.close()
        settled(lambda: collected() and regions() == 0)
    finally:
        world.close()
