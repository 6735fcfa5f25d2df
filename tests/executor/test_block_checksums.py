"""What is computed, what is sent and what lies in pages at the end sum to the same, for all
layouts; what is damaged does not."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.errors import HandoffError
from jdisagg.messages.step_commands import DisconnectPeer, ExtractBlock, ExtractResult, PullBlock
from jdisagg.transfer.codec import codec
from tests.executor.meshes import PEER, Pair
from tests.lanes import first_ci, first_quick
from tests.ops.test_checksum import twin

KEY = 0xC0FFEE_0123456789
# (rank, offset in the chunk, tokens, first offer id); offers of group 0 have even ids
ROWS = [(0, 0, 37, 100), (0, 48, 64, 200)]


@asynccontextmanager
async def pair(*layouts: str, **options: object) -> AsyncIterator[Pair]:
    made = Pair(*layouts, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def flip(
    index: int, device: int | None = None
) -> Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]:
    """Flips the lowest bit of one value of array `index`: its third token's, on one device or on
    the one that holds the first heads."""

    def damage(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        array = arrays[index]
        shards = []
        for number, shard in enumerate(array.addressable_shards):
            values = np.array(shard.data)
            if number == (device or 0):
                values.view(np.uint8)[0, 0, 0, min(2, values.shape[3] - 1), 0] ^= np.uint8(1)
            shards.append(jax.device_put(values, shard.device))
        return (
            *arrays[:index],
            jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards),
            *arrays[index + 1 :],
        )

    return damage


@pytest.mark.parametrize(
    ("prefill", "decode", "dtype", "pages"),
    first_quick(
        [
            ("tp=2", "dp=2,tp=2", "bfloat16", (8, 16)),
            ("tp=1", "tp=1", "float32", (16, 8)),
            ("dp=2,tp=2", "tp=4", "float32", (16, 16)),
            ("tp=4", "dp=4", "bfloat16", (32, 8)),
        ]
    ),
)
async def test_pages_sum_to_what_was_computed(prefill, decode, dtype, pages):
    async with pair(prefill, decode, dtype=dtype, pages=pages) as two:
        rows = ROWS if prefill[:2] != "dp" else [*ROWS, (1, 16, 50, 300)]
        result = await two.compute(rows, KEY)
        sums = {one.offer_id: one.checksum for one in result.checksums}
        assert sums.keys() == two.channel.offers.keys()
        assert len(set(sums.values())) == len(sums)
        for offer_id, (_, _, stamp) in two.channel.offers.items():
            moved = await two.move(offer_id, two.decode.limits.ranks - 1, KEY)
            assert moved.intact
            assert moved.checksum == sums[offer_id]
            assert stamp.key == KEY ^ offer_id
        for offer_id in (100, 103, 201):  # in plain integers, from the whole block
            block, rank, stamp = two.channel.offers[offer_id]
            assert sums[offer_id] == twin(
                np.asarray(block[rank]), KEY, stamp.component, 0, stamp.start, stamp.valid_tokens
            )


@pytest.mark.parametrize("codec_name", ["none", pytest.param("int8", marks=pytest.mark.ci)])
async def test_a_block_that_goes_in_whole_as_on_a_gpu_lies_as_one_that_goes_in_by_runs(codec_name):
    found = []
    for platform in ("cpu", "gpu"):
        async with pair("tp=2", "dp=2,tp=2", codec=codec_name) as two:
            two.decode.programs.platform = platform
            await two.compute(ROWS, KEY)
            moved = [await two.move(offer_id, 1, KEY) for offer_id in two.channel.offers]
            assert all(one.intact for one in moved)
            pages = [np.asarray(part) for layer in two.decode._pool.layers for part in layer]
            found.append(([one.checksum for one in moved], pages))
    assert found[0][0] == found[1][0]
    for by_runs, whole in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(by_runs, whole)


@pytest.mark.ci
async def test_a_chunk_that_samples_nothing_and_goes_on_is_summed_at_its_own_positions():
    async with pair("tp=1", "tp=1") as two:
        result = await two.compute([(0, 0, 64, 100)], KEY, chunk=64, past=32)
        assert not result.samples
        assert {stamp.start for _, _, stamp in two.channel.offers.values()} == {32}
        assert [(await two.move(one.offer_id, 0, KEY)).checksum for one in result.checksums] == [
            one.checksum for one in result.checksums
        ]


async def test_damage_on_the_way_a_wrong_place_and_a_wrong_key_all_show():
    async with pair("tp=2", "dp=2,tp=2") as two:
        result = await two.compute(ROWS, KEY)
        sums = {one.offer_id: one.checksum for one in result.checksums}
        assert (await two.move(100, 1, KEY)).checksum == sums[100]
        assert (await two.move(100, 1, KEY, start=16)).checksum != sums[100]
        assert (await two.move(100, 1, KEY + 1)).checksum != sums[100]
        two.channel.damage = flip(0, device=2)
        assert (await two.move(100, 1, KEY)).checksum != sums[100]
        # keys and values are another's
        two.channel.damage = lambda arrays: (arrays[0].at[:, 0].set(arrays[0][:, 1]),)
        assert (await two.move(100, 1, KEY)).checksum != sums[100]


@pytest.mark.ci
async def test_a_replica_that_differs_is_broken():
    async with pair("tp=1", "tp=8", first_device=0) as two:
        assert two.decode.card.shape == (1, 4, 2)
        result = await two.compute(ROWS, KEY)
        assert [(await two.move(one.offer_id, 0, KEY)).checksum for one in result.checksums] == [
            one.checksum for one in result.checksums
        ]
        for device in (0, 1):
            two.channel.damage = flip(0, device)
            assert not (await two.move(100, 0, KEY)).intact


@pytest.mark.ci
@pytest.mark.parametrize(("name",), first_ci([("int8",), ("int4",), ("fp8",)]))
async def test_a_lossy_codec_says_whether_what_came_is_what_was_packed(name):
    async with pair("tp=2", "dp=2", codec=name, pages=(16, 8)) as two:
        await two.compute(ROWS, KEY)
        assert (await two.move(200, 1, KEY)).intact
        block, _, stamp = two.channel.offers[200]
        how = codec(name)
        whole = jnp.asarray(np.asarray(block))
        decoded = how.decode(
            how.encode(whole, jnp.zeros(5, jnp.uint32), jnp.int32(0)), block.dtype
        )[0]
        inserted = await two.decode.run(
            ExtractBlock(4, 9, 1, 0, 0, stamp.valid_tokens, 64, tuple(range(3, 24))[::-1][:8], KEY)
        )
        assert isinstance(inserted, ExtractResult)
        assert inserted.checksum.checksum == twin(np.asarray(decoded), KEY)
        for leaf in range(3):
            two.channel.damage = flip(leaf, device=1)
            assert not (await two.move(200, 1, KEY)).intact
        two.channel.damage = None
        assert not (await two.move(200, 1, KEY + 1)).intact
        assert not (await two.move(200, 1, KEY, start=32)).intact


@pytest.mark.ci
async def test_extracted_pages_sum_to_what_was_inserted_and_hold_nothing_else():
    async with pair("tp=2", "dp=2,tp=2", pages=(16, 8)) as two:
        result = await two.compute(ROWS, KEY)
        sums = {one.offer_id: one.checksum for one in result.checksums}
        for offer_id in sums:
            await two.move(offer_id, 1, KEY)
        pages = tuple(range(3, 24))[::-1]
        block, _, stamp = two.channel.offers[201]
        out = await two.decode.run(ExtractBlock(5, 77, 1, 1, 0, 40, 64, pages[:5], KEY + 1))
        assert isinstance(out, ExtractResult)
        extracted, rank, made = two.channel.offers[77]
        assert (rank, made.start, made.valid_tokens, made.component, made.key) == (
            1,
            0,
            40,
            stamp.component,
            (KEY + 1) ^ 77,
        )
        original = np.asarray(block)[0, :, :, :40]
        np.testing.assert_array_equal(np.asarray(extracted)[1, :, :, :40], original)
        assert not np.any(np.asarray(extracted)[1, :, :, 40:])
        assert not np.any(np.asarray(extracted)[0])
        assert out.checksum.checksum == twin(original, KEY + 1, stamp.component)


async def test_pulls_from_peers_that_are_not_connected_are_refused():
    async with pair("tp=2", "tp=1") as two:
        await two.compute(ROWS, KEY)
        assert two.channel.connected == [PEER]
        with pytest.raises(HandoffError, match="'stranger'"):
            await two.decode.run(PullBlock(1, 100, 0, 0, 32, 1.0, "stranger"))
        await two.decode.run(DisconnectPeer(2, PEER))
        assert two.channel.connected == []
        with pytest.raises(HandoffError, match="not connected"):
            await two.decode.run(PullBlock(3, 100, 0, 0, 32, 1.0, PEER))


@pytest.mark.ci
@pytest.mark.parametrize("name", ["int8", "none"])
async def test_another_sequences_block_of_the_same_place_is_not_taken_for_what_was_asked(name):
    async with pair("tp=2", "tp=1", codec=name) as two:
        result = await two.compute([(0, 0, 32, 100), (0, 48, 32, 200)], KEY)
        sums = {one.offer_id: one.checksum for one in result.checksums}
        (_, _, asked), (_, _, other) = two.channel.offers[100], two.channel.offers[200]
        assert (asked.component, asked.start, asked.valid_tokens) == (
            other.component,
            other.start,
            other.valid_tokens,
        )
        two.channel.damage = lambda arrays: two.pulled(200)
        moved = await two.move(100, 0, KEY)
        if name == "none":
            assert moved.checksum == sums[200] != sums[100]
        else:
            assert not moved.intact
        two.channel.damage = None
        assert (await two.move(200, 0, KEY)).intact


@pytest.mark.ci
@pytest.mark.parametrize("name", ["none", "int8"])
async def test_damage_that_is_not_finite_does_not_stay_in_pages(name):
    """Pages are given back and given out again: attention multiplies what a sequence does not see
    by zero, and that must give zero."""

    def poison(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values = 1 if name == "int8" else 0  # the scales, or the values themselves
        bad = arrays[values].at[:, :, :, 3].set(jnp.nan).at[:, :, :, 5].set(jnp.inf)
        return (
            *arrays[:values],
            jax.device_put(bad, arrays[values].sharding),
            *arrays[values + 1 :],
        )

    async with pair("tp=2", "tp=1", codec=name) as two:
        result = await two.compute(ROWS, KEY)
        two.channel.damage = poison
        moved = await two.move(100, 0, KEY)
        assert (
            moved.checksum != result.checksums[0].checksum if name == "none" else not moved.intact
        )
        for layer in two.decode._pool.layers:
            for pages in layer:
                assert np.isfinite(np.asarray(pages)).all()
        two.channel.damage = None
        assert (await two.move(100, 0, KEY)).intact


@pytest.mark.ci
@pytest.mark.parametrize(
    ("prefill", "decode", "dtype", "codec_name"),
    first_ci(
        [
            ("tp=2", "dp=2", "float32", "int8"),
            ("tp=1", "tp=4", "bfloat16", "none"),
            ("dp=2,tp=2", "tp=2", "float32", "none"),
        ]
    ),
)
async def test_a_block_of_several_layer_groups_sums_to_what_they_sum_to_apart(
    prefill, decode, dtype, codec_name
):
    async with pair(prefill, decode, dtype=dtype, codec=codec_name, few_tokens=32) as two:
        result = await two.compute(ROWS, KEY)
        assert sorted(
            (spec.block_tokens, spec.group, spec.groups) for spec in two.specs.values()
        ) == [
            *((16, 0, 2), (32, 0, 2)),  # few bytes: all layers in one block
            *((64, 0, 1), (64, 1, 1)),
        ]
        layers = len(two.decode.limits.kv_spec.layers)
        sums = {one.offer_id: one.checksum for one in result.checksums}
        for offer_id, spec in two.specs.items():
            block, rank, stamp = two.channel.offers[offer_id]
            whole = np.asarray(block[rank])
            assert whole.shape[0] == 2 * layers * spec.groups // 2
            assert sums[offer_id] == twin(
                whole, KEY, stamp.component, 0, stamp.start, stamp.valid_tokens
            )
            moved = await two.move(offer_id, 0, KEY)
            assert moved.intact
            assert codec_name != "none" or moved.checksum == sums[offer_id]


@pytest.mark.ci
async def test_a_block_of_several_layer_groups_is_extracted_as_it_was_inserted():
    async with pair("tp=2", "dp=2,tp=2", pages=(16, 8), few_tokens=32) as two:
        result = await two.compute([(0, 0, 30, 100)], KEY)
        assert [spec.groups for spec in two.specs.values()] == [2]
        assert (await two.move(100, 1, KEY)).checksum == result.checksums[0].checksum
        out = await two.decode.run(
            ExtractBlock(5, 77, 1, 0, 0, 30, 32, tuple(range(3, 24))[::-1][:4], KEY, 2)
        )
        assert isinstance(out, ExtractResult)
        assert out.checksum.checksum == result.checksums[0].checksum
        original, extracted = two.channel.offers[100][0], two.channel.offers[77][0]
        np.testing.assert_array_equal(
            np.asarray(extracted)[1, :, :, :30], np.asarray(original)[0, :, :, :30]
        )
