"""What is computed, what is sent and what lies in pages at the end sum to the same, for all
layouts; what is damaged does not."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.errors import HandoffError
from jdisagg.executor.mesh_executor import MeshRole
from jdisagg.messages.step_commands import (
    ConnectPeer,
    DisconnectPeer,
    ExtractBlock,
    ExtractResult,
    PrefillResult,
    PullBlock,
)
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import codec
from tests.executor.meshes import INTO, PEER, Damage, Pair, executor
from tests.lanes import first_ci
from tests.ops.twin_checksum import twin
from tests.shapes import DECODE, DECODE_PAGE

KEY = 0xC0FFEE_0123456789
# (rank, offset in the chunk, tokens, first offer id): blocks of 16, and of 32 and 16 tokens in two
# groups of layers each
ROWS = [(0, 0, 16, 100), (0, 16, 37, 200)]


@asynccontextmanager
async def pair(*layouts: str, **options: object) -> AsyncIterator[Pair]:
    made = Pair(*layouts, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def sums_of(result: PrefillResult) -> dict[int, int]:
    return {one.offer_id: one.checksum for one in result.checksums}


def twin_of(values: np.ndarray, stamp: BlockStamp) -> int:
    """In plain integers, from the whole block."""
    return twin(values, KEY, stamp.component, 0, stamp.start, stamp.valid_tokens)


async def extracted(two: Pair, *block: int, groups: int = 1) -> int:
    """Extracts a block of (rank, group, start, tokens, block tokens) from `INTO` as offer 77.
    Returns its checksum."""
    command = ExtractBlock(5, 77, *block, INTO[:8], KEY, groups)
    out = await two.decode.run(command)
    assert isinstance(out, ExtractResult)
    return out.checksum.checksum


def changed(index: int, change: Callable[[np.ndarray], object], only: int | None = None) -> Damage:
    """`change` is made to the values of array `index`, on all devices or on one."""

    def damage(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        array = arrays[index]
        shards = []
        for number, shard in enumerate(array.addressable_shards):
            values = np.array(shard.data)
            if only in (None, number):
                change(values)
            shards.append(jax.device_put(values, shard.device))
        spoilt = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
        return (*arrays[:index], spoilt, *arrays[index + 1 :])

    return damage


def flip(index: int, device: int = 0) -> Damage:
    """Flips the lowest bit of one value of array `index`: its third token's, on one device."""

    def flip_bit(values: np.ndarray) -> None:
        values.view(np.uint8)[0, 0, 0, min(2, values.shape[3] - 1), 0] ^= np.uint8(1)

    return changed(index, flip_bit, device)


def swap(values: np.ndarray) -> None:
    values[:, :2] = values[:, 1::-1]


def poison(values: np.ndarray) -> None:
    values[:, :, :, 3], values[:, :, :, 5] = np.nan, np.inf


async def check_pages(two: Pair, rows: list[tuple[int, int, int, int]]) -> None:
    sums = sums_of(await two.compute(rows, KEY))
    assert sums.keys() == two.channel.offers.keys()
    assert len(set(sums.values())) == len(sums)
    for offer_id, (block, rank, stamp) in two.channel.offers.items():
        moved = await two.move(offer_id, two.decode.limits.ranks - 1, KEY)
        assert moved.intact
        assert moved.checksum == sums[offer_id] == twin_of(np.asarray(block[rank]), stamp)
        assert stamp.key == KEY ^ offer_id


async def test_pages_sum_to_what_was_computed(two: Pair) -> None:
    await check_pages(two, ROWS)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("prefill", "decode", "dtype", "pages"),
    first_ci(
        [
            ("dp=2,tp=2", "tp=4", "bfloat16", (8, 16)),
            ("tp=4", "dp=4", "bfloat16", (32, 8)),
            ("tp=1", "tp=1", "float32", (16, 8)),
        ]
    ),
)
async def test_pages_sum_to_what_was_computed_in_other_layouts(prefill, decode, dtype, pages):
    async with pair(prefill, decode, dtype=dtype, pages=pages) as two:
        await check_pages(two, ROWS if prefill[:2] != "dp" else [*ROWS, (1, 0, 50, 300)])


async def test_a_block_that_goes_in_whole_as_on_a_gpu_lies_as_one_that_goes_in_by_runs(two: Pair):
    sums, by_runs = sums_of(await two.compute(ROWS, KEY)), two.decode
    whole = executor("d", DECODE, MeshRole(False, True), two.channel, 4, page=DECODE_PAGE)
    whole.programs.platform = "gpu"
    whole.issue_and_wait(ConnectPeer(0, PEER, two.prefill.card))
    two.channel.disconnect(PEER)
    try:
        found = []
        for decode in (whole, by_runs):
            two.decode = decode
            moved = [await two.move(offer_id, 1, KEY) for offer_id in sums]
            assert {one.offer_id: one.checksum for one in moved} == sums
            # pages that nothing was moved into are another test's
            rows = decode._pool.rank_rows + np.array(INTO[:4])
            found.append([np.asarray(part)[rows] for kv in decode._pool.layers for part in kv])
        for pages, others in zip(*found, strict=True):
            np.testing.assert_array_equal(pages, others)
    finally:
        two.decode = by_runs
        whole.close()


@pytest.mark.ci
async def test_a_chunk_that_samples_nothing_and_goes_on_is_summed_at_its_own_positions(two: Pair):
    result = await two.compute([(0, 0, 64, 100)], KEY, past=32)
    assert not result.samples
    assert {stamp.start for _, _, stamp in two.channel.offers.values()} == {32}
    for offer_id, checksum in sums_of(result).items():
        assert (await two.move(offer_id, 0, KEY)).checksum == checksum


async def test_damage_on_the_way_a_wrong_place_and_a_wrong_key_all_show(two: Pair):
    sums = sums_of(await two.compute(ROWS, KEY))
    assert (await two.move(100, 1, KEY)).checksum == sums[100]
    assert (await two.move(100, 1, KEY, start=16)).checksum != sums[100]
    assert (await two.move(100, 1, KEY + 1)).checksum != sums[100]
    two.channel.damage = flip(0, device=1)
    assert (await two.move(100, 1, KEY)).checksum != sums[100]
    two.channel.damage = changed(0, swap)  # keys for values
    assert (await two.move(100, 1, KEY)).checksum != sums[100]


@pytest.mark.ci
async def test_a_replica_that_differs_is_broken():
    async with pair("tp=1", "tp=8", first_device=0) as two:
        assert two.decode.card.shape == (1, 4, 2)
        for offer_id, checksum in sums_of(await two.compute(ROWS, KEY)).items():
            assert (await two.move(offer_id, 0, KEY)).checksum == checksum
        for device in (0, 1):
            two.channel.damage = flip(0, device)
            assert not (await two.move(100, 0, KEY)).intact


@pytest.mark.ci
@pytest.mark.parametrize(("name",), first_ci([("int8",), ("int4",), ("fp8",)]))
async def test_a_lossy_codec_says_whether_what_came_is_what_was_packed_and_asked_for(name):
    async with pair(codec=name) as two:
        await two.compute(ROWS, KEY)
        assert (await two.move(200, 1, KEY)).intact
        block, _, stamp = two.channel.offers[200]
        how = codec(name)
        packed = how.encode(jnp.asarray(np.asarray(block)), jnp.zeros(5, jnp.uint32), jnp.int32(0))
        decoded = np.asarray(how.decode(packed, block.dtype)[0])
        assert await extracted(two, 1, 0, 0, stamp.valid_tokens, 32) == twin(decoded, KEY)
        for leaf in range(3):
            two.channel.damage = flip(leaf, device=1)
            assert not (await two.move(200, 1, KEY)).intact
        two.channel.damage = None
        assert not (await two.move(200, 1, KEY + 1)).intact
        assert not (await two.move(200, 1, KEY, start=32)).intact
        await check_other_sequence(two)
        await check_poison(two, leaf=1)  # the scales


async def test_what_is_another_sequences_or_not_finite_is_not_taken_for_what_was_asked(two: Pair):
    await check_other_sequence(two)
    await check_poison(two, leaf=0)


async def check_other_sequence(two: Pair) -> None:
    """Its block is of the same place."""
    sums = sums_of(await two.compute([(0, 0, 15, 300), (0, 16, 15, 400)], KEY))
    (_, _, asked), (_, _, other) = two.channel.offers[300], two.channel.offers[400]
    for field in ("component", "start", "valid_tokens"):
        assert getattr(asked, field) == getattr(other, field)
    two.channel.damage = lambda arrays: two.pulled(400)
    moved = await two.move(300, 0, KEY)
    two.channel.damage = None
    if two.codec == "none":
        assert moved.checksum == sums[400] != sums[300]
    else:
        assert not moved.intact
    assert (await two.move(400, 0, KEY)).intact


async def check_poison(two: Pair, leaf: int) -> None:
    """What is not finite does not stay in pages: pages are given back and given out again, and
    attention multiplies what a sequence does not see by zero, and that must give zero."""
    sums = sums_of(await two.compute([(0, 0, 16, 500), (0, 16, 37, 600)], KEY))
    two.channel.damage = changed(leaf, poison)
    moved = await two.move(600, 0, KEY)
    two.channel.damage = None
    assert moved.checksum != sums[600] if two.codec == "none" else not moved.intact
    for layer in two.decode._pool.layers:
        for pages in layer:
            assert np.isfinite(np.asarray(pages)).all()
    assert (await two.move(600, 0, KEY)).intact


@pytest.mark.ci
async def test_extracted_pages_sum_to_what_was_inserted_and_hold_nothing_else(two: Pair):
    for offer_id in sums_of(await two.compute(ROWS, KEY)):
        await two.move(offer_id, 1, KEY)
    block, _, stamp = two.channel.offers[201]
    checksum = await extracted(two, 1, 1, 0, 30, 64)
    found, rank, made = two.channel.offers[77]
    assert (rank, made) == (1, BlockStamp(KEY ^ 77, stamp.component, 0, 30))
    original = np.asarray(block)[0, :, :, :30]
    np.testing.assert_array_equal(np.asarray(found)[1, :, :, :30], original)
    assert not np.any(np.asarray(found)[1, :, :, 30:])
    assert not np.any(np.asarray(found)[0])
    assert checksum == twin(original, KEY, stamp.component)


async def test_pulls_from_peers_that_are_not_connected_are_refused(two: Pair):
    await two.compute(ROWS, KEY)
    assert two.channel.connected == [PEER]
    with pytest.raises(HandoffError, match="'stranger'"):
        await two.decode.run(PullBlock(1, 100, 0, 0, 32, 1.0, "stranger"))
    await two.decode.run(DisconnectPeer(2, PEER))
    assert two.channel.connected == []
    with pytest.raises(HandoffError, match="not connected"):
        await two.decode.run(PullBlock(3, 100, 0, 0, 32, 1.0, PEER))
    await two.decode.run(ConnectPeer(4, PEER, two.prefill.card))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("prefill", "decode", "codec_name"),
    first_ci([("tp=2", "dp=2", "none"), ("dp=2,tp=2", "tp=2", "int8")]),
)
async def test_a_block_of_several_layer_groups_sums_to_what_they_sum_to_apart(
    prefill, decode, codec_name
):
    async with pair(prefill, decode, codec=codec_name, few_tokens=16) as two:
        sums = sums_of(await two.compute(ROWS, KEY))
        shapes = [(spec.block_tokens, spec.group, spec.groups) for spec in two.specs.values()]
        # few bytes: all layers in one block
        assert sorted(shapes) == [(16, 0, 2), (16, 0, 2), (32, 0, 1), (32, 1, 1)]
        layers = len(two.decode.limits.kv_spec.layers)
        for offer_id, spec in two.specs.items():
            block, rank, stamp = two.channel.offers[offer_id]
            whole = np.asarray(block[rank])
            assert whole.shape[0] == 2 * layers * spec.groups // 2
            assert sums[offer_id] == twin_of(whole, stamp)
            moved = await two.move(offer_id, 0, KEY)
            assert moved.intact
            assert codec_name != "none" or moved.checksum == sums[offer_id]
        if codec_name == "none":
            assert (await two.move(100, 0, KEY)).checksum == sums[100]
            assert await extracted(two, 0, 0, 0, 16, 16, groups=2) == sums[100] != sums[201]
            original, found = two.channel.offers[100][0], two.channel.offers[77][0]
            np.testing.assert_array_equal(np.asarray(found)[0], np.asarray(original)[0])
