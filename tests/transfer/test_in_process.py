"""The in-process channel: the shared suite, and what it promises beyond it: nothing through the host, nothing waits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.layout.axes import Layout
from jdisagg.transfer.boxes import plan_handoff, rank_placement
from jdisagg.transfer.channel import PullTarget, block_sharding
from jdisagg.transfer.in_process import InProcessChannel
from tests.transfer.conformance import (
    LONG_SECONDS,
    PAIRS,
    ChannelConformance,
    Ends,
    ManualClock,
    case,
    expected_shards,
    finished,
    mesh,
    received_shards,
)


@pytest.fixture
def ends() -> Ends:
    clock = ManualClock()
    channel = InProcessChannel(clock)
    return Ends(channel, channel, clock)


class TestInProcessChannel(ChannelConformance):
    pass


@pytest.mark.parametrize(("source", "destination", "kv_heads", "dtype"), PAIRS[::4])
def test_the_counted_bytes_are_the_plans(ends: Ends, source: str, destination: str, kv_heads: int, dtype: str) -> None:
    block = case(source, destination, kv_heads, dtype)
    channel = InProcessChannel(ends.clock)
    channel.offer(1, block.block, 0)
    finished(channel.pull(1, block.target(0), LONG_SECONDS)).arrays()
    whole = (block.destination.dp, *block.block.shape[1:])
    plan = plan_handoff(
        rank_placement(block.block.sharding, block.block.shape, 0),
        rank_placement(block.zeros.sharding, whole, 0),
        block.target(0).granule,
    )
    assert channel.bytes_per_pair() == plan.bytes_per_pair(jnp.dtype(dtype).itemsize) == channel.planned_bytes_per_pair()


def test_nothing_passes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer guard sees host reads on a GPU only, so on CPU the array's own host view is made to fail as well."""
    channel = InProcessChannel(ManualClock())
    blocks = [case("tp=2", "dp=2,tp=2"), case("tp=4", "tp=1"), case("tp=3", "tp=2", kv_heads=6)]
    puts: list[tuple[jax.Array, object]] = []
    device_put = jax.device_put

    def seen(array: jax.Array, device: object) -> jax.Array:
        puts.append((array, device))
        return device_put(array, device)

    def host_view(_: jax.Array) -> np.ndarray:
        raise AssertionError("an array was read on the host")

    with monkeypatch.context() as patched, jax.transfer_guard_device_to_host("disallow_explicit"):
        patched.setattr(jax, "device_put", seen)
        patched.setattr(type(blocks[0].block), "_value", property(host_view))
        patched.setattr(type(blocks[0].block), "__array__", host_view)
        pulls = []
        for number, block in enumerate(blocks):
            channel.offer(number, block.block, 0)
            pulls.append(finished(channel.pull(number, block.target(0), LONG_SECONDS)))
    for pull, block in zip(pulls, blocks, strict=True):
        for device, shard in expected_shards(block, 0, 0).items():
            np.testing.assert_array_equal(received_shards(pull, block, 0)[device], shard)
    assert puts
    assert all(isinstance(array, jax.Array) and len(array.devices()) == 1 and isinstance(device, jax.Device) for array, device in puts)


def test_a_whole_shard_for_its_own_device_is_shared_and_a_rank_that_receives_nothing_shares_the_zeros() -> None:
    channel = InProcessChannel(ManualClock())
    layout = Layout.parse("dp=2,tp=2")
    sharding = block_sharding(mesh(layout, 4, 0))
    block = jax.device_put(np.ones((2, 2, 4, 4, 2), np.float32), sharding)
    zeros = jax.device_put(np.zeros((2, 2, 4, 4, 2), np.float32), sharding)
    channel.offer(1, block, 1)
    (array,) = finished(channel.pull(1, PullTarget(zeros, 1), LONG_SECONDS)).arrays()
    for shard, mine, zero in zip(array.addressable_shards, block.addressable_shards, zeros.addressable_shards, strict=True):
        origin = mine if shard.index[0].start else zero
        assert shard.data.unsafe_buffer_pointer() == origin.data.unsafe_buffer_pointer()
    assert channel.bytes_per_pair() == {}


def test_pulls_of_one_shape_compile_nothing_after_the_first(ends: Ends) -> None:
    block = case("tp=1", "tp=2")
    ends.sender.offer(0, block.block, 0)
    finished(ends.receiver.pull(0, block.target(0), LONG_SECONDS))
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patched:
        compiled: list[str] = []
        patched.setattr("jax._src.compiler.compile_or_get_cached", lambda *args, **kwargs: compiled.append("compiled"))
        for number in range(1, 4):
            ends.sender.offer(number, block.block, 0)
            finished(ends.receiver.pull(number, block.target(0), LONG_SECONDS)).arrays()
    assert not compiled
