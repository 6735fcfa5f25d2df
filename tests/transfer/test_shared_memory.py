"""KV between processes of one host by shared memory: the suite of backends, and that no memory
outlives its last user."""

import dataclasses
import gc
import os

import jax
import numpy as np
import pytest

from jdisagg.errors import HandoffError
from jdisagg.messages.kv_plane import InMemory, Posted, Pulled, Withdraw
from jdisagg.transfer import shared_memory
from jdisagg.transfer.backend import AnnouncedArrays
from jdisagg.transfer.negotiated_channel import Memories
from jdisagg.transfer.shared_memory import (
    Region,
    SharedInlet,
    SharedMemory,
    SharedOutlet,
    reachable,
)
from tests.transfer.conformance import (
    LONG_SECONDS,
    Ends,
    answer,
    arrives,
    behind_work,
    case,
    finished,
    one_piece,
    settled,
)
from tests.transfer.kv_processes import Block, MakePull
from tests.transfer.loopback import SENDER, Loopback, Pair
from tests.transfer.process_conformance import MemoryConformance, fails_and_the_next_arrives
from tests.transfer.world import PATIENCE_SECONDS, World


@pytest.fixture
def memories() -> tuple[Memories, Memories]:
    return Memories(SharedMemory()), Memories(SharedMemory())


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


class TestSharedMemoryChannel(MemoryConformance):
    title, memory, early = "shared memory", InMemory, True

    def check_nothing_is_open(self, pair: Pair) -> None:
        settled(lambda: collected() and regions() == 0)


def test_a_region_is_used_again_once_nothing_of_it_is_needed_and_not_before(
    ends: Ends, pair: Pair
) -> None:
    messages, block = pair.messages, case("tp=1", "tp=1")
    ends.sender.offer(1, block.block, 0)
    kept = finished(ends.pull(1, block))
    other = dataclasses.replace(block, block=block.block + 1, values=block.values + 1)
    ends.sender.offer(2, other.block, 0)
    second = finished(ends.pull(2, block))
    for pull, whose in ((kept, block), (second, other)):
        arrives(pull, whose)
    assert not any(isinstance(message, Pulled) for message in messages)
    del kept, pull, second
    settled(lambda: collected() and sum(isinstance(each, Pulled) for each in messages) == 2)
    settled(lambda: pair.sender.postings() == 0)
    arrives(ends.pull(1, block), block)
    first, second, third = (each.memory.inode for each in messages if isinstance(each, Posted))  # type: ignore[union-attr]
    assert first != second
    assert third in (first, second)


def test_what_was_taken_back_while_its_receiver_maps_it_stays_as_it_was(
    ends: Ends, pair: Pair
) -> None:
    block = case("tp=1", "tp=1")
    ends.sender.offer(1, block.block, 0)
    pull = finished(ends.pull(1, block))
    ends.clock.seconds = 2 * LONG_SECONDS  # beyond the posting's time
    settled(lambda: pair.sender.postings() == 0)
    for number in range(2, 6):  # none of them may take its region
        ends.sender.offer(number, block.block + number, 0)
        finished(ends.pull(number, block)).arrays()
    arrives(pull, block)


def test_a_pipe_with_the_numbers_of_a_sender_on_another_host_is_not_read() -> None:
    secret = b"0123456789abcdef"
    reading, writing = os.pipe()
    try:
        os.write(writing, secret)
        assert not reachable(f"{os.getpid()}:{reading}:{secret.hex()}")
        assert os.read(reading, len(secret)) == secret
    finally:
        os.close(reading)
        os.close(writing)


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
        (leaf,) = reader.pull(AnnouncedArrays(answer(lies), [aval]))
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
    ends: Ends, pair: Pair
) -> None:
    messages, block = pair.messages, case("tp=2", "tp=2")
    before = regions()
    ends.sender.offer(1, behind_work(block.block), 0)
    ends.pull(1, block).cancel()
    settled(lambda: any(isinstance(message, Withdraw) for message in messages))
    settled(lambda: pair.sender.postings() == 0)
    ends.sender.revoke(1, "over")
    ends.receiver.disconnect("")  # what it had mapped by then it would keep for the next
    settled(lambda: collected() and regions() <= before)


def test_a_sender_whose_last_receiver_leaves_keeps_no_spare_region(ends: Ends, pair: Pair) -> None:
    before, block = regions(), case("tp=1", "tp=1")
    ends.sender.offer(1, block.block, 0)
    arrives(ends.pull(1, block), block)
    settled(lambda: collected() and pair.quiet())
    ends.receiver.disconnect("")
    settled(lambda: collected() and regions() <= before)


def test_an_answer_that_names_memory_which_is_not_there_fails_the_pull_and_the_next_arrives(
    pair: Pair,
) -> None:
    fails_and_the_next_arrives(pair, lambda lies: InMemory(lies.descriptor, 1, lies.offsets))


def test_leaves_beyond_a_region_or_of_none_are_refused() -> None:
    memory = SharedMemory()
    region, reader = memory.take(4096), SharedInlet(memory.name)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    aval = jax.ShapeDtypeStruct((16,), np.float32, sharding=device)
    for lies in (
        InMemory(region.descriptor, region.inode, (region.size,)),
        InMemory(region.descriptor, region.inode, (0,)),  # where its state is
        InMemory(region.descriptor, region.inode, ()),
        InMemory(10**6, region.inode, (0,)),
    ):
        with pytest.raises(HandoffError):
            reader.pull(AnnouncedArrays(answer(lies), [aval]))
    reader.close(in_flight=False)
    region.close()
    memory.close()


def test_a_name_of_no_memory_is_not_reachable() -> None:
    for name in ("", "nonsense", "1:2:xyz", f"{os.getpid()}:0:00", "0:0:"):
        assert not reachable(name), name


def test_who_cannot_map_the_sender_pulls_through_the_engine(loopback: Loopback) -> None:
    """As another host sees it: the same numbers, another secret."""
    memory = SharedMemory()
    pid, descriptor, _ = memory.name.split(":")
    memory.name = f"{pid}:{descriptor}:{'00' * 16}"
    pair = Pair.of(loopback, Memories(memory), Memories(SharedMemory()))
    block = case("tp=2", "tp=2")
    pair.sender.offer(7, block.block, 0)
    arrives(pair.ends.pull(7, block), block)
    assert all(each.memory is None for each in pair.heard(Posted))  # type: ignore[union-attr]
    assert pair.receiver.channels() == (f"{SENDER.control} transfer engine",)
    pair.close()


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


def test_processes_that_are_killed_leave_no_memory_and_receivers_keep_what_they_have() -> None:
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
        job.end_it()
        arrives(pull, block)
        with pytest.raises(HandoffError):
            finished(world.pull("job", 1.0)).arrays()
        del pull
        world.channel.close()
        settled(lambda: collected() and regions() == 0)
    finally:
        world.close()
