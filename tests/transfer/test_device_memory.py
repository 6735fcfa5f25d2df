"""KV from device to device between processes of one host: the suite of backends, over a stand-in of
the CUDA driver that reads the other process's arrays, and that nothing stays open or kept."""

import dataclasses
import sys
from collections.abc import Callable, Iterator

import jax
import msgspec
import numpy as np
import pytest

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.messages.kv_plane import (
    KvBackend,
    KvMessage,
    LentAllocation,
    OnDevice,
    Posted,
    Pulled,
    PullRequest,
    Withdraw,
)
from jdisagg.transfer import device_memory
from jdisagg.transfer.backend import AnnouncedArrays
from jdisagg.transfer.backend_choice import Memories
from jdisagg.transfer.channel import PullTarget
from jdisagg.transfer.cuda_driver import HANDLE_BYTES, Allocation, CudaDriver
from jdisagg.transfer.device_memory import DeviceInlet, DeviceOutlet, LentMemory, this_host
from jdisagg.transfer.pieces import _blank, warm_blanks
from jdisagg.transfer.shared_memory import SharedMemory
from tests.transfer.conformance import (
    LONG_SECONDS,
    answer,
    arrives,
    case,
    finished,
    leaf_zeros,
    one_piece,
    settled,
)
from tests.transfer.cuda_stand_in import StandIn
from tests.transfer.loopback import SENDER, Loopback, Pair
from tests.transfer.process_conformance import MemoryConformance, fails_and_the_next_arrives

NOTHING = (0, 0, 0)  # of `LentMemory.kept`


@pytest.fixture
def memories() -> Iterator[tuple[Memories, Memories]]:
    """Both have shared memory, too, which must then not be used."""
    drivers = StandIn(), StandIn()
    memories = tuple(Memories(SharedMemory(), None, LentMemory(driver)) for driver in drivers)
    yield memories  # type: ignore[misc]
    for memory, driver in zip(memories, drivers, strict=True):
        assert memory.device is not None
        memory.device.close()
        assert memory.device.kept() == NOTHING
        assert not driver.opened


@dataclasses.dataclass(frozen=True)
class Side:
    memory: LentMemory
    driver: StandIn


def sides(pair: Pair) -> tuple[Side, Side]:
    """The sender's memory and driver, and the receiver's."""
    lent = [memories.device for memories in pair.memories]
    return tuple(Side(one, one.driver) for one in lent)  # type: ignore[return-value,union-attr,arg-type]


class TestDeviceMemoryChannel(MemoryConformance):
    title, memory, early = "CUDA memory", OnDevice, False

    def check_nothing_is_kept(self, pair: Pair) -> None:
        sender, receiver = sides(pair)
        settled(lambda: sender.memory.kept() == NOTHING and receiver.memory.kept()[2] == 0)


def test_every_byte_is_copied_once_from_device_to_device_and_by_nothing_else(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, (sender, receiver) = case("tp=2", "tp=4"), sides(pair)
    monkeypatch.setattr("jdisagg.transfer.pieces.RequestedPieces.in_host", None)
    pair.sender.offer(7, block.block, 0)
    arrives(pair.ends.pull(7, block), block)
    assert receiver.driver.copied_bytes == block.values.nbytes
    assert sender.driver.copied_bytes == 0


def test_an_allocation_is_exported_once_and_opened_once_for_each_device(pair: Pair) -> None:
    block = case("tp=2", "tp=4")
    for number in range(5):
        pair.sender.offer(number, block.block, 0)
        arrives(pair.ends.pull(number, block), block)
    allocations = {
        allocation
        for answer in pair.heard(Posted)
        for allocation in answer.memory.allocations  # type: ignore[union-attr]
    }
    assert sides(pair)[0].driver.exports <= 2 * len(allocations)  # by two devices
    assert sides(pair)[1].driver.openings <= 4 * len(allocations)
    assert len(sides(pair)[1].driver.opened) == sides(pair)[1].memory.kept()[1] > 0
    pair.receiver.disconnect("")
    settled(lambda: not sides(pair)[1].driver.opened)


def test_after_warm_up_a_pull_makes_room_by_programs_that_are_there(pair: Pair) -> None:
    block = case("tp=2", "dp=2,tp=2", dtype="bfloat16")
    for number, codec_name in enumerate(("none", "int8")):
        leaves = leaf_zeros(block.zeros, codec_name)
        target = PullTarget(block.zeros, 1, codec=codec_name, leaves=leaves)
        warm_blanks(target.resident)
        made = _blank.cache_info()
        pair.sender.offer(number, block.block, 0)
        finished(pair.receiver.pull(number, target, LONG_SECONDS)).arrays()
        assert _blank.cache_info().hits > made.hits
        assert _blank.cache_info().misses == made.misses


def test_the_sender_keeps_what_it_offered_until_its_receiver_has_copied_it(pair: Pair) -> None:
    block = case("tp=1", "tp=1")
    sides(pair)[1].driver.gate.clear()
    pair.sender.offer(1, block.block, 0)
    pull = pair.ends.pull(1, block)
    settled(lambda: sides(pair)[1].memory.kept()[2] == 1)
    assert not pull.is_ready()
    pair.sender.release(1)
    assert pair.sender.postings() == 1
    sides(pair)[1].driver.gate.set()
    arrives(pull, block)
    settled(lambda: pair.sender.postings() == 0 and bool(pair.heard(Pulled)))


def test_what_is_revoked_while_it_is_copied_stays_as_it_is_until_its_receiver_is_done(
    pair: Pair,
) -> None:
    block = case("tp=1", "tp=1")
    sides(pair)[1].driver.gate.clear()
    pair.sender.offer(1, block.block, 0)
    pull = pair.ends.pull(1, block)
    settled(lambda: sides(pair)[1].memory.kept()[2] == 1 and pair.sender.postings() == 1)
    pair.messages.clear()
    sides(pair)[0].memory.forget = (forgotten := []).append  # type: ignore[method-assign]
    pair.sender.revoke(1, "the client went away")
    settled(lambda: sides(pair)[0].memory.kept()[0] == 1)
    with pytest.raises(HandoffError, match="the client went away"):
        finished(pull).arrays()
    settled(lambda: bool(forgotten))  # it was told that nobody wants it
    del sides(pair)[0].memory.forget
    sides(pair)[0].memory.forget(forgotten[0])
    assert sides(pair)[0].memory.kept() == NOTHING
    sides(pair)[1].driver.gate.set()
    settled(lambda: sides(pair)[1].memory.kept()[2] == 0)


def test_what_nobody_fetches_is_kept_until_the_pulls_deadline_and_no_longer() -> None:
    memory = LentMemory(StandIn())
    outlet = DeviceOutlet(memory)
    pieces = one_piece(np.ones((1, 1, 1, 8, 8), np.float32))
    for pull_id, seconds in ((1, 1000.0), (2, 0.0)):
        assert outlet.reserve(pull_id, pieces, seconds).memory is None
        assert isinstance(outlet.write(pull_id), OnDevice)
        outlet.withdraw(pull_id, 1, "revoked")
    memory.sweep()
    assert memory.kept() == (1, 0, 0)
    outlet.pulled(1)
    assert memory.kept() == NOTHING


@pytest.mark.parametrize("late", ["before", "after"])
def test_what_comes_after_the_deadline_counts_for_nothing(late: str) -> None:
    """Before the copy begins, or while it is made."""
    driver = StandIn()
    lender, memory = LentMemory(StandIn()), LentMemory(driver)
    array = jax.block_until_ready(jax.device_put(np.ones(64, np.float32), jax.devices()[0]))
    lent, offset = lender.lend(array)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    aval = jax.ShapeDtypeStruct((64,), np.float32, sharding=place)
    asked: list[bool] = []

    def in_time() -> bool:
        asked.append(True)
        return late == "after" and len(asked) == 1

    sender = DeviceInlet(memory)
    (leaf,) = sender.pull(
        AnnouncedArrays(answer(OnDevice((lent,), (0,), (offset,))), [aval], in_time)
    )
    settled(leaf.is_ready)
    with pytest.raises(HandoffError, match="after the pull's deadline"):
        leaf.array()
    assert driver.copied_bytes == (256 if late == "after" else 0)
    sender.close(in_flight=False)
    assert memory.kept() == NOTHING


def spoilt(lies: OnDevice, **changes: object) -> OnDevice:
    return msgspec.structs.replace(lies, **changes)


def with_handle(lies: OnDevice, handle: bytes) -> OnDevice:
    return spoilt(
        lies,
        allocations=tuple(
            msgspec.structs.replace(each, handle=handle) for each in lies.allocations
        ),
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lies: with_handle(lies, b""),
        lambda lies: with_handle(lies, b"\xff" * HANDLE_BYTES),
        lambda lies: with_handle(lies, b"x" * 10_000),
        lambda lies: spoilt(lies, places=(99,) * len(lies.places)),
        lambda lies: spoilt(lies, places=(-1,) * len(lies.places)),
        lambda lies: spoilt(lies, offsets=(-8,) * len(lies.offsets)),
        lambda lies: spoilt(lies, offsets=(lies.allocations[0].size - 1,) * len(lies.offsets)),
        lambda lies: spoilt(lies, offsets=()),
        lambda lies: spoilt(lies, allocations=()),
        lambda lies: spoilt(lies, checksums=(bytes(16), *lies.checksums[1:])),
        lambda lies: spoilt(lies, checksums=lies.checksums[1:]),
    ],
)
def test_an_answer_of_memory_that_cannot_be_fails_the_pull_and_the_next_comes_another_way(
    pair: Pair, spoil: Callable[[OnDevice], OnDevice]
) -> None:
    fails_and_the_next_arrives(pair, spoil)
    (said,) = pair.receiver.channels()
    assert said.startswith(f"{SENDER.control} shared memory, no CUDA memory: ")


def test_the_first_blocks_are_checked_and_the_others_need_no_checksum(pair: Pair) -> None:
    """As where a driver reports success, and reads other memory."""
    block = case("tp=2", "tp=2")
    pair.sender.offer(1, block.block, 0)
    for _ in range(3):
        arrives(pair.ends.pull(1, block), block)
        settled(lambda: pair.sender.postings() == 0)
    first, *later = [each.memory for each in pair.heard(Posted) if isinstance(each, Posted)]
    assert isinstance(first, OnDevice) and isinstance(later[-1], OnDevice)
    assert len(first.checksums) == len(first.places)
    assert later[-1].checksums == ()


def test_an_answer_that_comes_after_its_connection_was_dropped_fails_the_pull_and_opens_nothing(
    pair: Pair, loopback: Loopback
) -> None:
    block, held, spoiled = case("tp=2", "tp=2"), [], []

    def tamper(message: KvMessage) -> list[KvMessage]:
        if not (isinstance(message, Posted) and isinstance(message.memory, OnDevice)):
            return [message]
        if not held:
            held.append(message)
            return []
        spoiled.append(message)
        return [msgspec.structs.replace(message, memory=with_handle(message.memory, b""))]

    loopback.tamper = tamper
    pair.sender.offer(1, block.block, 0)
    waiting = pair.ends.pull(1, block)
    settled(lambda: bool(held))
    with pytest.raises(HandoffError, match="no handle"):
        finished(pair.ends.pull(1, block)).arrays()
    assert len(spoiled) == 1
    settled(lambda: not pair.receiver.channels())  # it is dropped
    pair.receiver.handle(pair.sender_end, held[0])
    with pytest.raises(HandoffError, match="was dropped before the pieces came; pull again"):
        finished(waiting).arrays()
    assert not sides(pair)[1].driver.openings
    arrives(pair.ends.pull(1, block), block)


def test_an_answer_that_was_not_asked_for_fails_the_pull(pair: Pair, loopback: Loopback) -> None:
    asked: list[KvMessage] = []

    def tamper(message: KvMessage) -> list[KvMessage]:
        if isinstance(message, PullRequest) and not asked:
            asked.append(message)
            return [msgspec.structs.replace(message, backend=KvBackend.SHARED)]
        return [message]

    loopback.tamper = tamper
    block = case("tp=2", "tp=2")
    pair.sender.offer(1, block.block, 0)
    with pytest.raises(HandoffError, match="other memory than requested"):
        finished(pair.ends.pull(1, block)).arrays()
    assert asked


@pytest.mark.parametrize("call", ["open", "copy", "read"])
def test_where_the_driver_refuses_to_read_the_next_pull_comes_another_way_and_it_is_said(
    pair: Pair, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As between devices that do not reach each other."""
    sides(pair)[1].driver.refuses.add(call)
    block = case("tp=2", "tp=2")
    pair.sender.offer(1, block.block, 0)
    with pytest.raises(HandoffError, match=f"{call} says: refused"):
        finished(pair.ends.pull(1, block)).arrays()
    settled(lambda: pair.receiver.under_way() == 0)
    arrives(pair.ends.pull(1, block), block)
    (said,) = pair.receiver.channels()
    assert said.startswith(f"{SENDER.control} shared memory, no CUDA memory: ")
    assert f"{call} says: refused" in said
    assert "cannot be read by CUDA memory" in caplog.text
    settled(lambda: not sides(pair)[1].driver.opened)


def test_a_copy_that_fails_later_is_tried_again_the_same_way(pair: Pair) -> None:
    block = case("tp=2", "tp=2")
    pair.sender.offer(1, block.block, 0)
    arrives(pair.ends.pull(1, block), block)
    settled(lambda: pair.receiver.under_way() == 0)
    sides(pair)[1].driver.refuses.add("read")
    with pytest.raises(HandoffError, match="read says: refused"):
        finished(pair.ends.pull(1, block)).arrays()
    sides(pair)[1].driver.refuses.clear()
    settled(lambda: pair.receiver.under_way() == 0)
    arrives(pair.ends.pull(1, block), block)
    assert pair.receiver.channels() == (f"{SENDER.control} CUDA memory",)


def test_a_sender_that_can_lend_no_more_refuses_the_pull(pair: Pair) -> None:
    sides(pair)[0].driver.refuses.add("allocation")
    block = case("tp=2", "tp=2")
    pair.sender.offer(1, block.block, 0)
    with pytest.raises(HandoffError, match="allocation says: refused"):
        finished(pair.ends.pull(1, block)).arrays()
    assert pair.sender.postings() == 0


@pytest.mark.parametrize(
    ("sender", "receiver", "way"),
    [
        ("lends", "another host", "shared memory"),
        ("lends", "none", "shared memory"),
        ("lends", "refused", "shared memory, no CUDA memory: legacy IPC is refused"),
        ("none", "lends", "shared memory, no CUDA memory: the sender lends none"),
        ("lends", "lends", "CUDA memory"),
    ],
)
def test_it_is_chosen_where_both_lend_on_one_host_and_else_it_is_said_why_not(
    loopback: Loopback, sender: str, receiver: str, way: str
) -> None:
    block, sides = case("tp=2", "tp=2"), []
    for has in (sender, receiver):
        host = "another" if has == "another host" else None
        device = LentMemory(StandIn(), host) if has in ("lends", "another host") else None
        why = "legacy IPC is refused" if has == "refused" else ""
        sides.append(Memories(SharedMemory(), None, device, why))
    pair = Pair.of(loopback, *sides)
    pair.sender.offer(7, block.block, 0)
    arrives(pair.ends.pull(7, block), block)
    assert pair.receiver.channels() == (f"{SENDER.control} {way}",)
    pair.close()


def test_another_process_of_the_same_host_has_the_same_name_for_it() -> None:
    assert len(this_host()) > 16
    assert this_host() == this_host()


def test_arrays_that_have_allocations_of_their_own_are_not_lent() -> None:
    class Unpooled(StandIn):
        def allocation(self, device: int, pointer: int) -> Allocation:
            return Allocation(pointer, 1024, pointer)

    with pytest.raises(ConfigError, match="XLA_PYTHON_CLIENT_ALLOCATOR"):
        LentMemory(Unpooled()).check(jax.devices()[:1])
    LentMemory(StandIn()).check(jax.devices())


def test_a_handle_is_made_anew_where_another_allocation_begins_at_the_same_place() -> None:
    class Changing(StandIn):
        number = 1

        def allocation(self, device: int, pointer: int) -> Allocation:
            return dataclasses.replace(super().allocation(device, pointer), number=self.number)

    driver = Changing()
    memory = LentMemory(driver)
    array = jax.block_until_ready(jax.device_put(np.ones(8, np.float32), jax.devices()[0]))
    first, second = memory.lend(array), memory.lend(array)
    driver.number = 2
    third = memory.lend(array)
    assert first == second != third
    assert driver.exports == 2


class _Gpu:
    platform, process_index = "gpu", 0


def test_without_a_cuda_driver_a_gpu_worker_says_why_and_uses_another_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match="cuda-bindings cannot be imported"):
        CudaDriver()
    memory, why = device_memory.lent_memory("cuda", [_Gpu()])  # type: ignore[list-item]
    assert memory is None
    assert why
    assert why in caplog.text
    assert device_memory.lent_memory("auto", [_Gpu()])[1] == why  # type: ignore[list-item]
    for channel in ("engine", "nixl"):
        assert device_memory.lent_memory(channel, [_Gpu()]) == (None, "")  # type: ignore[list-item]
    assert device_memory.lent_memory("cuda", jax.devices()) == (None, "its devices are no GPUs")
    assert device_memory.lent_memory("auto", jax.devices()) == (None, "")


def test_a_withdrawn_pull_is_told_to_the_sender(pair: Pair) -> None:
    block = case("tp=1", "tp=1")
    sides(pair)[1].driver.gate.clear()
    pair.sender.offer(1, block.block, 0)
    pull = pair.ends.pull(1, block)
    settled(lambda: sides(pair)[1].memory.kept()[2] == 1)
    pull.cancel()
    settled(lambda: bool(pair.heard(Withdraw)) and pair.sender.postings() == 0)
    assert sides(pair)[0].memory.kept() == NOTHING
    sides(pair)[1].driver.gate.set()
    settled(lambda: sides(pair)[1].memory.kept()[2] == 0)


def test_an_allocation_that_two_connections_use_is_closed_with_the_last() -> None:
    driver = StandIn()
    memory = LentMemory(driver)
    lent = LentAllocation(LentMemory(StandIn()).driver.export(0, 0), 1, 1 << 40)
    first, second = memory.hold(0, lent), memory.hold(0, lent)
    assert first is second
    assert driver.openings == 1
    memory.let_go(first)
    assert driver.opened
    memory.let_go(second)
    assert not driver.opened
