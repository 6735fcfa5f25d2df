"""What every `Channel` must do, as a suite: subclass `ChannelConformance` and give it an `ends`
fixture.

The two ends may be one object (in process) or a sender and a receiver in one process that talk over
a wire. The sender's meshes use devices 0-3, the receiver's 4-7. The oracle is numpy: what each
device must hold is cut out of the whole block."""

import dataclasses
import functools
import gc
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer

from jdisagg.errors import HandoffError, IncompatiblePeerError
from jdisagg.layout.axes import Layout
from jdisagg.layout.reshard_plan import HEAD_DIMENSION, head_granule
from jdisagg.messages.kv_plane import KvMemory, Posted, PostedPiece
from jdisagg.transfer.channel import (
    BlockStamp,
    Channel,
    Offered,
    Pull,
    PullTarget,
    block_sharding,
    resident_zeros,
)
from jdisagg.transfer.codec import codec, stamp_array
from jdisagg.transfer.pieces import OfferedBlock, PlannedPiece, RequestedPieces
from tests import time_scale
from tests.fakes.manual_clock import ManualClock

COMPONENTS, TOKENS, HEAD_SIZE = 2, 4, 2
LONG_SECONDS = 1000.0
PREFILL = ("tp=1", "tp=2", "tp=4", "dp=2,tp=2", "dp=4")
DECODE = ("tp=1", "dp=2", "dp=4", "dp=2,tp=2", "tp=4")
PAIRS = [
    *((source, destination, 4, "float32") for source in PREFILL for destination in DECODE),
    *((source, destination, 2, "bfloat16") for source in PREFILL for destination in DECODE),
    ("tp=3", "tp=2", 6, "float32"),
    ("tp=2", "tp=3", 6, "bfloat16"),
    ("tp=1", "dp=2,tp=2", 6, "float32"),
]


@dataclass(frozen=True)
class Ends:
    sender: Channel
    receiver: Channel
    clock: ManualClock

    def pull(
        self, offer_id: int, block: "Case", seconds: float = LONG_SECONDS, rank: int = 0
    ) -> Pull:
        return self.receiver.pull(offer_id, block.target(rank), seconds)


@dataclass(frozen=True)
class Case:
    """A block on the sender's mesh with its values, and zeros on the receiver's mesh, whose devices
    are given too."""

    block: jax.Array
    values: np.ndarray
    zeros: jax.Array
    source: Layout
    destination: Layout
    destination_devices: tuple[int, ...]

    def target(self, rank: int) -> PullTarget:
        return PullTarget(self.zeros, rank)


def mesh(layout: Layout, kv_heads: int, first_device: int) -> jax.sharding.Mesh:
    devices = jax.devices()[first_device : first_device + layout.devices]
    return jax.sharding.Mesh(
        np.array(devices).reshape(layout.mesh_shape(kv_heads)), ("dp", "kv", "rep")
    )


def case(
    source: str,
    destination: str,
    kv_heads: int = 4,
    dtype: str = "float32",
    components: int = COMPONENTS,
) -> Case:
    prefill, decode = Layout.parse(source), Layout.parse(destination)
    prefill_mesh, decode_mesh = mesh(prefill, kv_heads, 0), mesh(decode, kv_heads, 4)
    shape = (prefill.dp, components, kv_heads, TOKENS, HEAD_SIZE)
    # exact in bfloat16 too
    values = (np.arange(math.prod(shape)) % 251).reshape(shape).astype(jnp.dtype(dtype))
    granule = head_granule(kv_heads, prefill_mesh.shape["kv"], decode_mesh.shape["kv"])
    zeros = resident_zeros(decode_mesh, components, granule, TOKENS, HEAD_SIZE, jnp.dtype(dtype))
    return Case(
        jax.device_put(values, block_sharding(prefill_mesh)),
        values,
        zeros,
        prefill,
        decode,
        tuple(device.id for device in decode_mesh.devices.flat),
    )


def finished(pull: Pull) -> Pull:
    """Polls until the pull is over; the generous bound is a safety net, not an assertion about
    speed."""
    end = time.monotonic() + time_scale.seconds(60)
    while not pull.is_ready():
        assert time.monotonic() < end, "the pull hangs"
        time.sleep(0.001)
    return pull


def settled(condition: Callable[[], bool]) -> None:
    """Waits until what the channel's own threads do is done; the bound is a safety net."""
    end = time.monotonic() + time_scale.seconds(30)
    while not condition():
        assert time.monotonic() < end, "the channel does not come to rest"
        time.sleep(0.005)


def received_shards(pull: Pull, case: Case, rank: int) -> dict[int, np.ndarray]:
    """Device id -> its heads, of the receiving rank, joined as an insert program would."""
    arrays = pull.arrays()
    shards: dict[int, list[np.ndarray]] = {}
    for array in arrays:
        assert (array.shape, array.dtype, array.sharding) == (
            case.zeros.shape,
            case.zeros.dtype,
            case.zeros.sharding,
        )
        for shard in array.addressable_shards:
            if shard.index[0] == slice(rank, rank + 1) or case.destination.dp == 1:
                shards.setdefault(shard.device.id, []).append(np.asarray(shard.data))
            else:
                assert not np.asarray(shard.data).astype(np.float32).any(), (
                    "a rank that receives nothing must keep its zeros"
                )
    return {device: np.concatenate(parts, axis=2) for device, parts in shards.items()}


def expected_shards(case: Case, source_rank: int, rank: int) -> dict[int, np.ndarray]:
    kv_heads = case.values.shape[2]
    part = case.values[source_rank : source_rank + 1]
    _, kv, replicas = case.destination.mesh_shape(kv_heads)
    first, size = rank * kv * replicas, kv_heads // kv
    return {
        case.destination_devices[first + shard * replicas + replica]: part[
            :, :, shard * size : (shard + 1) * size
        ]
        for shard in range(kv)
        for replica in range(replicas)
    }


def arrives(pull: Pull, case: Case, rank: int = 0, source_rank: int = 0) -> None:
    """The pull comes to its end, and each device of the receiving rank has its heads of the
    sender's rank, and no other device has any."""
    received = received_shards(finished(pull), case, rank)
    expected = expected_shards(case, source_rank, rank)
    assert received.keys() == expected.keys()
    for device, shard in expected.items():
        np.testing.assert_array_equal(received[device], shard)


def fails(pull: Pull, why: str | None = None) -> None:
    with pytest.raises(HandoffError, match=why):
        finished(pull).arrays()


def packed_target(block: Case, codec_name: str, rank: int) -> PullTarget:
    """With zeros of the packed form."""
    zeros = block.zeros
    ranks, _, heads, _, _ = zeros.shape
    piece = jax.ShapeDtypeStruct(zeros.sharding.shard_shape(zeros.shape), zeros.dtype)
    shards = heads // piece.shape[HEAD_DIMENSION]
    leaves = codec(codec_name).leaves(piece)
    shapes = [(ranks, leaf.shape[1], leaf.shape[2] * shards, *leaf.shape[3:]) for leaf in leaves]
    make = jax.jit(
        lambda: tuple(
            jnp.zeros(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)
        ),
        out_shardings=(zeros.sharding,) * len(leaves),
    )
    return PullTarget(zeros, rank, codec=codec_name, leaves=make())


def behind_work(block: jax.Array) -> jax.Array:
    """`block` as the output of a program that still runs for some tenths of a second when this
    returns, on one of its devices."""

    def work(local: jax.Array, rounds: jax.Array) -> jax.Array:
        weight = jnp.ones((400, 400))
        rounds = jnp.where(jax.lax.axis_index(("dp", "kv", "rep")) == 0, rounds, 0)
        busy = jax.lax.fori_loop(0, rounds, lambda _, x: (x @ weight) * 1e-3, weight)
        return local + 0 * busy[0, 0].astype(local.dtype)

    sharding = block.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    spec = sharding.spec
    program = jax.jit(
        jax.shard_map(
            work, mesh=sharding.mesh, in_specs=(spec, jax.P()), out_specs=spec, check_vma=False
        )
    )
    jax.block_until_ready(program(block, jnp.int32(1)))
    return program(block, jnp.int32(200))


def packed_bytes(array: jax.Array) -> int:
    """Of all devices, replicas counted."""
    return sum(shard.data.nbytes for shard in array.addressable_shards)


@functools.cache
def unpacking(name: str, dtype: Any) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """One program each: operation by operation they take ten times as long."""
    how = codec(name)
    return jax.jit(functools.partial(how.decode, dtype=dtype)), jax.jit(how.verify)


def unpacked_shards(
    pull: Pull, target: PullTarget, stamp: BlockStamp
) -> dict[int, tuple[np.ndarray, bool]]:
    """Device id -> its heads, of the receiving rank, and whether all of its pieces are what was
    packed under this stamp."""
    arrays, count = pull.arrays(), len(target.leaves)
    decode, verify = unpacking(target.codec, target.zeros.dtype)
    parts = [arrays[at : at + count] for at in range(0, len(arrays), count)]
    found: dict[int, tuple[list[np.ndarray], bool]] = {}
    for number, leaves in enumerate(parts):
        by_device = [
            {shard.device.id: shard for shard in leaf.addressable_shards} for leaf in leaves
        ]
        for device, shard in by_device[0].items():
            (rank, _, _), (start, _, _) = (
                shard.index[axis].indices(leaves[0].shape[axis]) for axis in (0, 2)
            )
            if rank == target.rank:
                local = [jnp.asarray(np.asarray(leaf[device].data)) for leaf in by_device]
                head = start * len(parts) + number * target.granule
                values = np.asarray(decode(local))
                intact = bool(verify(local, stamp_array(stamp), np.int32(head)))
                so_far, all_intact = found.get(device, ([], True))
                found[device] = ([*so_far, values], all_intact and intact)
    return {
        device: (np.concatenate(values, axis=2), intact)
        for device, (values, intact) in found.items()
    }


def one_piece(values: np.ndarray) -> RequestedPieces:
    """A block [1, C, K, T, H] on the first device, wanted by one device in one piece."""
    offer = OfferedBlock.of(jax.device_put(values, jax.devices()[0]), 0, BlockStamp())
    (device,) = offer.shards
    return RequestedPieces(offer, (PlannedPiece(device, 0, 0, 0, 0),), values.shape[2], "none")


def answer(memory: KvMemory | None) -> Posted:
    return Posted(1, 1, "", 1, (PostedPiece(0, 0, 0),), memory)


class ChannelConformance:
    """Subclasses give the fixture `ends`. `pairs`: those of `PAIRS` that are moved."""

    pairs = PAIRS[::8]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "source" in metafunc.fixturenames:
            names = ("source", "destination", "kv_heads", "dtype")
            metafunc.parametrize(names, self.pairs)

    def test_each_destination_shard_gets_its_own_slice_and_its_bytes_once(
        self, ends: Ends, source: str, destination: str, kv_heads: int, dtype: str
    ) -> None:
        block = case(source, destination, kv_heads, dtype)
        for number, (source_rank, rank) in enumerate(
            {(0, block.destination.dp - 1), (block.source.dp - 1, 0)}
        ):
            before = Counter(ends.receiver.bytes_per_pair())
            ends.sender.offer(number, block.block, source_rank)
            pull = ends.pull(number, block, rank=rank)
            arrives(pull, block, rank, source_rank)
            moved = Counter(ends.receiver.bytes_per_pair()) - before
            arrived = Counter[int]()
            for (_, device), count in moved.items():
                arrived[device] += count
            expected = expected_shards(block, source_rank, rank)
            assert arrived == {device: shard.nbytes for device, shard in expected.items()}
            senders = {
                shard.device.id
                for shard in block.block.addressable_shards
                if shard.index[0].indices(99)[0] == source_rank
            }
            assert {device for device, _ in moved} <= senders
            assert pull.bytes_moved == arrived.total()
            ends.sender.release(number)
        assert ends.sender.offered() == Offered(0, 0)

    def test_replicas_of_the_source_take_turns(self, ends: Ends) -> None:
        block = case("tp=4", "tp=1", kv_heads=2)
        for number in range(4):
            ends.sender.offer(number, block.block, 0)
            finished(ends.pull(number, block)).arrays()
        assert len(set(ends.receiver.bytes_per_pair().values())) == 1
        assert len(ends.receiver.bytes_per_pair()) == 4

    def test_an_offer_can_be_pulled_again(self, ends: Ends) -> None:
        block = case("tp=2", "dp=2,tp=2")
        ends.sender.offer(7, block.block, 0)
        for rank in (0, 1, 0):
            arrives(ends.pull(7, block, rank=rank), block, rank)

    def test_a_pull_may_come_before_its_offer(self, ends: Ends) -> None:
        block = case("tp=2", "tp=4")
        pull = ends.pull(7, block)
        assert not pull.is_ready()
        assert pull.failed() is None
        ends.sender.offer(7, block.block, 0)
        arrives(pull, block)

    def test_a_pull_whose_offer_never_comes_fails_at_its_deadline(self, ends: Ends) -> None:
        pull = ends.pull(0xABC, case("tp=1", "tp=1"), 5.0)
        ends.clock.seconds = 4.9
        assert not pull.is_ready()
        ends.clock.seconds = 5.0
        assert pull.is_ready()
        with pytest.raises(HandoffError, match=r"0xabc was not made.*5\.0 s"):
            pull.arrays()

    def test_an_id_is_offered_once_and_released_for_good(self, ends: Ends) -> None:
        block = case("tp=1", "tp=1")
        ends.sender.release(0xABC)  # unknown
        ends.sender.offer(0xABC, block.block, 0)
        with pytest.raises(HandoffError, match="0xabc is live already"):
            ends.sender.offer(0xABC, block.block, 0)
        assert ends.sender.offered().offers == 1
        for _ in range(2):
            ends.sender.release(0xABC)
        assert ends.sender.offered() == Offered(0, 0)
        with pytest.raises(HandoffError, match="0xabc was released"):
            ends.sender.offer(0xABC, block.block, 0)
        fails(ends.pull(0xABC, block), "released")

    def test_a_revoked_offer_fails_later_pulls_with_its_first_reason(self, ends: Ends) -> None:
        block = case("tp=1", "tp=1")
        ends.sender.offer(7, block.block, 0)
        ends.sender.revoke(7, "the client went away")
        ends.sender.revoke(7, "a second reason")
        fails(ends.pull(7, block), "the client went away")
        assert ends.sender.offered() == Offered(0, 0)

    def test_a_revocation_reaches_a_pull_that_waits_for_its_offer(self, ends: Ends) -> None:
        block = case("tp=1", "tp=1")
        pull = ends.pull(7, block)
        ends.sender.revoke(7, "prefill failed")
        fails(pull, "prefill failed")
        ends.sender.offer(7, block.block, 0)
        assert ends.sender.offered() == Offered(0, 0)

    def test_an_arrived_pull_survives_release_and_revocation(self, ends: Ends) -> None:
        block = case("tp=2", "tp=2")
        for number, end in enumerate(
            (ends.sender.release, lambda offer_id: ends.sender.revoke(offer_id, "late"))
        ):
            ends.sender.offer(number, block.block, 0)
            pull = finished(ends.pull(number, block))
            end(number)
            assert pull.failed() is None
            arrives(pull, block)

    def test_a_cancelled_pull_gives_nothing(self, ends: Ends) -> None:
        block = case("tp=2", "tp=2")
        ends.sender.offer(7, block.block, 0)
        for pull in (ends.pull(7, block), ends.pull(8, block)):
            pull.cancel()
            pull.cancel()
            assert pull.is_ready()
            with pytest.raises(HandoffError, match="cancelled"):
                pull.arrays()

    def test_offered_counts_only_the_bytes_of_the_offered_rank(self, ends: Ends) -> None:
        block = case("dp=2,tp=2", "tp=1")
        ends.sender.offer(7, block.block, 1)
        assert ends.sender.offered() == Offered(1, block.block.nbytes // 2)

    def test_a_receiver_of_another_geometry_is_refused_by_field(self, ends: Ends) -> None:
        ours = case("tp=2", "tp=2")
        ends.sender.offer(7, ours.block, 0)
        for field, receiver in (
            ("dtype is 'float32'.*'bfloat16'", case("tp=2", "tp=2", dtype="bfloat16").target(0)),
            ("size of dimension 1 is 2.*3", case("tp=2", "tp=2", components=3).target(0)),
            ("pieces of 3 heads", case("tp=2", "tp=2", kv_heads=6).target(0)),
            ("codec 'int8' packs a piece into", PullTarget(ours.zeros, 0, codec="int8")),
        ):
            with pytest.raises(IncompatiblePeerError, match=field):
                finished(ends.receiver.pull(7, receiver, LONG_SECONDS)).arrays()

    @pytest.mark.parametrize(
        ("layouts", "name", "largest"),
        [(("tp=4", "dp=2,tp=2"), "int8", 127), (("tp=1", "tp=4"), "int4", 7)],
    )
    def test_a_lossy_codec_brings_each_shard_within_its_bound_and_intact(
        self, ends: Ends, layouts: tuple[str, str], name: str, largest: int
    ) -> None:
        block, stamp = case(*layouts), BlockStamp(0x1234_5678_9ABC, 3, 32, TOKENS)
        before = sum(ends.receiver.bytes_per_pair().values())
        ends.sender.offer(7, block.block, 0, stamp)
        ranks = block.destination.dp
        target = packed_target(block, name, ranks - 1)
        pull = finished(ends.receiver.pull(7, target, LONG_SECONDS))
        unpacked = unpacked_shards(pull, target, stamp)
        expected = expected_shards(block, 0, target.rank)
        assert unpacked.keys() == expected.keys()
        for device, (values, intact) in unpacked.items():
            bound = np.abs(expected[device]).max(axis=-1, keepdims=True) / largest * 0.51
            assert (np.abs(values - expected[device]) <= bound).all()
            assert intact
        moved = sum(ends.receiver.bytes_per_pair().values()) - before
        assert moved == pull.bytes_moved == sum(map(packed_bytes, pull.arrays())) // ranks

    def test_a_codec_notices_leaves_that_were_packed_under_another_stamp(self, ends: Ends) -> None:
        block = case("tp=2", "tp=2")
        target, stamp = packed_target(block, "int8", 0), BlockStamp(5, 0, 16, TOKENS)
        ends.sender.offer(7, block.block, 0, stamp)
        pull = finished(ends.receiver.pull(7, target, LONG_SECONDS))
        for other in ({"key": 6}, {"component": 1}, {"start": 32}):
            wrong = dataclasses.replace(stamp, **other)
            assert not any(intact for _, intact in unpacked_shards(pull, target, wrong).values())
        assert all(intact for _, intact in unpacked_shards(pull, target, stamp).values())

    def test_a_block_whose_computation_failed_fails_its_pull_and_no_other(self, ends: Ends) -> None:
        block = case("tp=1", "tp=1")
        aval = jax.ShapeDtypeStruct(
            block.block.shape, block.block.dtype, sharding=block.block.sharding
        )
        ends.sender.offer(7, transfer.make_error_array(aval, "prefill broke"), 0)
        ends.sender.offer(8, block.block, 0)
        broken, whole = ends.pull(7, block), ends.pull(8, block)
        # A receiver that maps shared memory may find that the sender has closed it already.
        fails(broken, "prefill broke|pull again")
        arrives(whole, block)

    def test_no_array_is_kept_of_pulls_that_have_ended(self, ends: Ends) -> None:
        block = case("dp=2,tp=2", "tp=4")

        def pulls(numbers: range) -> None:
            for number in numbers:
                ends.sender.offer(number, block.block + 0, 0)
                pull = ends.pull(number, block)
                match number % 4:
                    case 0:
                        finished(pull)
                        ends.sender.release(number)
                    case 1:
                        pull.cancel()
                        ends.sender.release(number)
                    case 2:
                        ends.sender.revoke(number, "enough")
                        finished(pull)
                    case _:
                        ends.pull(number + 100, block).cancel()
                        finished(pull)
                        pull.cancel()
                        ends.sender.release(number)

        pulls(range(2))  # connections and programs
        settled(lambda: gc.collect() >= 0 and ends.sender.offered() == Offered(0, 0))
        time.sleep(0.1)
        before = len(jax.live_arrays())
        pulls(range(2, 10))
        settled(lambda: gc.collect() >= 0 and len(jax.live_arrays()) <= before)
