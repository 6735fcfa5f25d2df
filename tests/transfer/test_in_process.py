"""The in-process channel: the shared suite, and what it promises beyond it: nothing through the
host, nothing waits."""

import queue
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler as jax_compiler

from jdisagg.errors import LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.layout.reshard_plan import head_granule, plan_handoff
from jdisagg.transfer.channel import Offered, Pull, PullTarget, block_sharding, rank_placement
from jdisagg.transfer.in_process import InProcessChannel
from tests import time_scale
from tests.layout.plans import bytes_per_pair
from tests.transfer.conformance import (
    LONG_SECONDS,
    PAIRS,
    ChannelConformance,
    Ends,
    ManualClock,
    arrives,
    behind_work,
    case,
    fails,
    finished,
    mesh,
)


@pytest.fixture
def ends() -> Ends:
    clock = ManualClock()
    channel = InProcessChannel(clock)
    return Ends(channel, channel, clock)


class TestInProcessChannel(ChannelConformance):
    pairs = PAIRS[::3]


@pytest.mark.parametrize(("source", "destination", "kv_heads", "dtype"), PAIRS[::12])
def test_the_counted_bytes_are_the_plans(
    ends: Ends, source: str, destination: str, kv_heads: int, dtype: str
) -> None:
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
    assert (
        channel.bytes_per_pair()
        == bytes_per_pair(plan, jnp.dtype(dtype).itemsize)
        == channel.planned_bytes_per_pair()
    )


def test_nothing_passes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer guard sees host reads on a GPU only; on CPU the array's own host view is made to
    fail (a global resharding `device_put` trips over it), and what is put must be a single-device
    array."""
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
        arrives(pull, block)
    assert puts
    for array, device in puts:
        assert isinstance(array, jax.Array) and len(array.devices()) == 1
        assert isinstance(device, jax.Device)


def test_a_whole_shard_for_its_own_device_is_shared_and_a_rank_that_receives_nothing_shares_the_zeros() -> (  # noqa: E501
    None
):
    channel = InProcessChannel(ManualClock())
    layout = Layout.parse("dp=2,tp=2")
    sharding = block_sharding(mesh(layout, 4, 0))
    block = jax.device_put(np.ones((2, 2, 4, 4, 2), np.float32), sharding)
    zeros = jax.device_put(np.zeros((2, 2, 4, 4, 2), np.float32), sharding)
    channel.offer(1, block, 1)
    (array,) = finished(channel.pull(1, PullTarget(zeros, 1), LONG_SECONDS)).arrays()
    for shard, mine, zero in zip(
        array.addressable_shards, block.addressable_shards, zeros.addressable_shards, strict=True
    ):
        origin = mine if shard.index[0].start else zero
        assert shard.data.unsafe_buffer_pointer() == origin.data.unsafe_buffer_pointer()
    assert channel.bytes_per_pair() == {}


@pytest.mark.parametrize("layouts", [("dp=2,tp=2", "tp=4"), ("tp=4", "tp=1")])
def test_after_the_warm_up_no_pull_compiles_anything(layouts: tuple[str, str]) -> None:
    channel, block = InProcessChannel(ManualClock()), case(*layouts, components=5)
    channel.warm_up(mesh(block.source, 4, 0), block.target(0), kv_heads=4)
    compiled: list[str] = []
    compiler: Callable[..., object] = jax_compiler.compile_or_get_cached

    def seen(*args: object, **options: object) -> object:
        compiled.append("a program")
        return compiler(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax_compiler, "compile_or_get_cached", seen)
        for number in range(4):
            channel.offer(number, block.block, number % block.source.dp)
            finished(channel.pull(number, block.target(0), LONG_SECONDS)).arrays()
        assert compiled == []
        jax.jit(lambda x: x * 3)(block.zeros)
        assert compiled, "the trap must see a compilation"


def test_offering_and_pulling_do_not_wait_for_the_block_and_work_on_the_destination_goes_on(
    ends: Ends,
) -> None:
    """The work is a single-device program: XLA:CPU runs the multi-device programs of a process one
    after another, pull or no pull."""
    block = case("tp=2", "tp=4")
    ends.sender.offer(0, block.block, 0)
    finished(ends.pull(0, block))  # the cuts are compiled
    step = jax.jit(lambda x: x + 1)
    resident = [shard.data for shard in block.zeros.addressable_shards]
    jax.block_until_ready([step(shard) for shard in resident])
    computing = behind_work(block.block)
    ends.sender.offer(1, computing, 0)
    pull = ends.pull(1, block)
    jax.block_until_ready([step(shard) for shard in resident])
    assert not pull.is_ready(), "the block should still be computing"
    arrives(pull, block)


def test_a_pull_under_way_ends_by_deadline_by_revocation_and_by_cancellation_but_not_by_release(
    ends: Ends,
) -> None:
    block = case("tp=2", "tp=2")
    computing = behind_work(block.block)
    for number in range(4):
        ends.sender.offer(number, computing, 0)
    late, revoked, cancelled, released = (
        ends.pull(number, block, 5.0 + 90 * (number > 0)) for number in range(4)
    )
    assert not any(pull.is_ready() for pull in (late, revoked, cancelled, released))
    ends.sender.revoke(1, "prefill was aborted")
    cancelled.cancel()
    ends.sender.release(3)
    ends.clock.seconds = 5.0
    for pull, why in (
        (late, r"has not arrived within the deadline of 5\.0 s"),
        (revoked, "prefill was aborted"),
        (cancelled, "cancelled"),
    ):
        assert pull.is_ready()
        fails(pull, why)
    arrives(released, block)
    jax.block_until_ready(computing)
    assert late.failed() is not None, (
        "a pull that ended stays ended, also when its bytes arrive later"
    )


def test_three_threads_may_offer_pull_and_poll_at_once(ends: Ends) -> None:
    block, count = case("tp=4", "dp=2", kv_heads=2), 60
    pulls: queue.Queue[tuple[int, Pull]] = queue.Queue()

    def offer() -> None:
        for number in range(count):
            ends.sender.offer(number, block.block, 0)

    def pull() -> None:
        for number in range(count):
            pulls.put((number, ends.pull(number, block, rank=number % 2)))

    threads = [threading.Thread(target=offer), threading.Thread(target=pull)]
    for thread in threads:
        thread.start()
    for _ in range(count):
        number, arrived = pulls.get(timeout=time_scale.seconds(60))
        arrives(arrived, block, rank=number % 2)
        ends.sender.release(number)
    for thread in threads:
        thread.join()
    assert ends.sender.offered() == Offered(0, 0)
    moved = ends.receiver.bytes_per_pair().values()
    assert sum(moved) == count * block.block.nbytes and max(moved) == min(moved)


def test_what_does_not_fit_is_refused_with_its_numbers() -> None:
    block = case("dp=2,tp=2", "tp=4")
    with pytest.raises(LayoutError, match="rank 2 is not one of the block's 2 dp ranks"):
        InProcessChannel(ManualClock()).offer(1, block.block, 2)
    with pytest.raises(LayoutError, match=r"rank 1 must be in \[0, 1\)"):
        block.target(1)
    replicated = jax.sharding.NamedSharding(mesh(Layout.parse("dp=2"), 4, 0), jax.P())
    with pytest.raises(LayoutError, match=r"holds dp ranks \[0, 2\)"):
        rank_placement(replicated, block.block.shape, 0)
    with pytest.raises(
        LayoutError, match="6 kv heads cannot be sharded over 4 devices on the destination side"
    ):
        head_granule(6, 2, 4)
