"""Processes that copy KV from each other's devices, over the stand-in of the CUDA driver: deaths on
either side leave nothing open and nothing kept."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from jdisagg.errors import HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvMessage, OnDevice, Posted
from jdisagg.transfer.backend_choice import Memories
from jdisagg.transfer.device_memory import LentMemory
from tests.transfer.conformance import case, finished, settled
from tests.transfer.cuda_stand_in import StandIn
from tests.transfer.kv_processes import Block, MakePull
from tests.transfer.test_device_memory import NOTHING
from tests.transfer.world import PATIENCE_SECONDS, World


class LendingWorld(World):
    """Its processes lend, and this one does."""

    def __init__(self) -> None:
        self.driver = StandIn()
        self.memory = LentMemory(self.driver)
        super().__init__(Memories(device=self.memory))


@pytest.fixture
def world() -> Iterator[LendingWorld]:
    world = LendingWorld()
    yield world
    world.close()
    assert world.memory.kept() == NOTHING
    assert not world.driver.opened


def test_processes_copy_from_each_other_in_both_directions(world: LendingWorld) -> None:
    process = world.start("job")
    world.is_pulled_from("job")
    assert world.driver.copied_bytes == case("tp=4", "tp=2").values.nbytes
    assert world.channel.channels() == (f"{process.end.control} CUDA memory",)
    world.introduce(process)
    block = case("tp=4", "tp=2")
    world.channel.offer(2, block.block, 0)
    process.do(MakePull(2, "here", Block("dp=2,tp=2"), 1, 1, PATIENCE_SECONDS))
    answer = process.answer()
    assert answer.error == ""
    joined = np.concatenate([answer.shards[device] for device in (2, 3)], axis=2)
    np.testing.assert_array_equal(joined, block.values)
    world.channel.release(2)
    settled(lambda: world.channel.offered().bytes == 0 and world.channel.postings() == 0)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_a_sender_killed_while_it_is_copied_from_fails_the_pull_and_leaves_nothing(
    world: LendingWorld, death: signal.Signals
) -> None:
    process = world.start("job")
    world.is_pulled_from("job")  # its memory is open now
    world.driver.gate.clear()
    pull = world.pull("job")
    settled(lambda: world.memory.kept()[2] == 1)
    process.signal(death)
    process.end_it()
    world.driver.gate.set()
    with pytest.raises(HandoffError, match="could not be copied"):
        finished(pull).arrays()
    world.channel.disconnect("job")
    settled(lambda: world.memory.kept() == NOTHING and not world.driver.opened)
    # what is there goes on with another
    world.start("another")
    world.is_pulled_from("another")


def test_what_a_killed_receiver_was_copying_is_kept_until_its_deadline_and_then_freed(
    world: LendingWorld,
) -> None:
    process, seconds = world.start("job"), 3.0
    block = case("tp=4", "tp=2")
    world.introduce(process)
    killed: list[KvMessage] = []
    deliver = world.post.deliver

    def kill(sender: KvEnd, end: KvEnd, message: KvMessage) -> None:
        if isinstance(message, Posted) and end == process.end and not killed:
            killed.append(message)
            process.signal(signal.SIGKILL)
        deliver(sender, end, message)

    world.post.deliver = kill  # type: ignore[method-assign]
    world.channel.offer(2, block.block, 0)
    process.do(MakePull(2, "here", Block("tp=4"), 0, 1, seconds))
    settled(lambda: bool(killed))
    assert isinstance(killed[0], Posted) and isinstance(killed[0].memory, OnDevice)
    assert world.channel.postings() == 1
    world.channel.release(2)
    settled(lambda: world.channel.postings() == 0)  # by its deadline alone
    settled(lambda: world.memory.kept()[0] == 0)
