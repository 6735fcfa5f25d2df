"""Packing of prompts into chunks, and the cut of rows into blocks."""

import itertools
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.messages.step_commands import PrefillChunk
from jdisagg.scheduler.blocks import merged_block, padded, split_blocks
from jdisagg.scheduler.prefill_batches import PrefillBatches, gathers
from tests.fakes.fake_executor import toy_limits
from tests.scheduler.prompts import LIMITS, batches, job


def all_chunks(packer: PrefillBatches) -> list[PrefillChunk]:
    return list(iter(lambda: packer.next_chunk(0), None))


@given(st.integers(1, 3000), st.sampled_from([1, 4, 8, 64]))
def test_blocks_are_of_few_lengths_and_tile_the_row(tokens: int, granule: int) -> None:
    blocks = list(split_blocks(tokens, granule))
    assert [offset for offset, _, _ in blocks] == list(
        itertools.accumulate((size for _, size, _ in blocks[:-1]), initial=0)
    )
    assert sum(size for _, size, _ in blocks) == padded(tokens, granule)
    assert sum(valid for _, _, valid in blocks) == tokens
    assert all(valid == size for _, size, valid in blocks[:-1]), "only the last block is padded"
    sizes = [size // granule for _, size, _ in blocks]
    assert set(sizes) <= {1, 8, 64} and sizes == sorted(sizes, reverse=True)
    assert max(Counter(sizes)[1], Counter(sizes)[8]) < 8


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(0, 1), st.integers(0, 5), st.integers(1, 4)),
        min_size=1,
        max_size=12,
    )
)
def test_every_prompt_is_prefilled_whole_in_order_within_the_limits(
    shapes: list[tuple[int, int, int, int]],
) -> None:
    limits = toy_limits(
        ranks=2, chunk_buckets=(16, 64), granule_tokens=8, rows_per_chunk=3, samples_per_chunk=4
    )
    packer = batches(limits)
    for sequence, (tokens, rank, arrival, samples) in enumerate(shapes):
        packer.add(job(sequence, tokens, rank, float(arrival), samples))
    done: dict[int, int] = {}
    finished: list[int] = []
    for chunk in all_chunks(packer):
        for rank in range(2):
            rows = [row for row in chunk.rows if row.rank == rank]
            assert len(rows) <= 3 and sum(len(row.samples) for row in rows) <= 4
            assert all(row.start == 0 for row in rows[1:])
            assert all(row.offset % 8 == 0 for row in rows)
            ends = [row.offset + len(row.tokens) for row in rows]
            assert all(end <= row.offset for end, row in zip(ends, rows[1:], strict=False))
            assert not ends or ends[-1] <= chunk.chunk_tokens
        for row in chunk.rows:
            assert row.start == done.get(row.sequence, 0) and row.tokens[0] == row.start
            done[row.sequence] = row.start + len(row.tokens)
            if row.samples:
                finished.append(row.sequence)
    assert done == {sequence: shape[0] for sequence, shape in enumerate(shapes)}
    assert sorted(finished) == list(range(len(shapes)))
    for rank in range(2):
        order = [sequence for sequence in finished if shapes[sequence][1] == rank]
        assert order == sorted(order, key=lambda sequence: (shapes[sequence][2], sequence)), (
            "first come, first served"
        )


def test_small_prompts_share_a_chunk_of_the_smallest_bucket_that_holds_them() -> None:
    packer = batches()
    for sequence in range(3):
        packer.add(job(sequence, 5))
    chunk = packer.next_chunk(1)
    assert chunk is not None and chunk.chunk_tokens == 32
    assert [(row.sequence, row.offset) for row in chunk.rows] == [(0, 0), (1, 8), (2, 16)]


def test_a_long_prompt_goes_in_chunks_of_the_largest_bucket_and_fills_up_with_the_next() -> None:
    packer = batches()
    packer.add(job(0, 150))
    packer.add(job(1, 10))
    chunks = all_chunks(packer)
    assert [chunk.chunk_tokens for chunk in chunks] == [64, 64, 64]
    assert [
        [(row.sequence, row.start, len(row.tokens)) for row in chunk.rows] for chunk in chunks
    ] == [[(0, 0, 64)], [(0, 64, 64)], [(0, 128, 22), (1, 0, 10)]]
    assert [row.pages for row in chunks[1].rows] == [tuple(range(16))], (
        "the pages of all positions so far"
    )


def test_an_older_prompt_goes_before_a_younger_one_but_not_before_a_begun_one() -> None:
    packer = batches()
    packer.add(job(0, 100, arrival=5.0))
    packer.next_chunk(0)
    packer.add(job(1, 40, arrival=3.0))
    packer.add(job(2, 40, arrival=1.0))
    rows = [row.sequence for chunk in all_chunks(packer) for row in chunk.rows if row.start == 0]
    assert rows == [2, 1]


def test_each_layer_group_offers_each_row_under_ids_of_its_own() -> None:
    packer = batches()
    packer.add(job(0, 21))
    chunk = packer.next_chunk(0)
    assert chunk is not None
    offers = chunk.rows[0].offers
    assert [(offer.group, offer.offset, offer.block_tokens) for offer in offers] == [
        (group, at, 8) for group in (0, 1) for at in (0, 8, 16)
    ]
    assert len({offer.offer_id for offer in offers}) == 6


def test_a_removed_prompt_leaves_the_queue() -> None:
    packer = batches()
    removed = job(0, 100)
    packer.add(removed)
    packer.next_chunk(0)
    packer.remove(removed)
    packer.remove(removed)
    assert packer.next_chunk(0) is None and not list(packer)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 5)), min_size=1, max_size=8),
    st.lists(st.sets(st.integers(0, 7)), max_size=12),
)
def test_prompts_that_are_held_back_go_on_later_and_a_chunk_goes_on_with_one_prompt_at_most(
    shapes: list[tuple[int, int]], holds: list[set[int]]
) -> None:
    packer = batches()
    for sequence, (tokens, arrival) in enumerate(shapes):
        packer.add(job(sequence, tokens, arrival=float(arrival)))
    done = dict.fromkeys(range(len(shapes)), 0)
    for held in [*holds, *[set[int]()] * sum(tokens for tokens, _ in shapes)]:
        chunk = packer.next_chunk(0, held)
        assert chunk is not None or all(
            done[sequence] == shapes[sequence][0] for sequence in done if sequence not in held
        )
        rows = chunk.rows if chunk else ()
        assert all(row.start == 0 for row in rows[1:])
        for row in rows:
            assert row.sequence not in held and row.start == done[row.sequence]
            done[row.sequence] += len(row.tokens)
            assert bool(row.samples) == (done[row.sequence] == shapes[row.sequence][0])
    assert done == {sequence: tokens for sequence, (tokens, _) in enumerate(shapes)}
    assert not list(packer)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from([0.0, 2.0, 8.0, 64.0]),
    st.sampled_from([0, 8, 16]),
)
def test_a_rows_blocks_cover_it_once_in_every_layer_group_and_padding_is_taken_where_it_costs_less_than_blocks(  # noqa: E501
    shapes: list[tuple[int, int]], cost: float, few_tokens: int
) -> None:
    toy = toy_limits(chunk_buckets=(16, 32, 64), granule_tokens=8, rows_per_chunk=3, layer_groups=2)
    limits = replace(
        toy, block_cost_tokens=cost, block_bytes=few_tokens * toy.kv_spec.bytes_per_token
    )
    packer = batches(limits)
    for sequence, (tokens, skipped) in enumerate(shapes):
        packer.add(job(sequence, tokens, offers_from=min(8 * skipped, (tokens - 1) // 8 * 8)))
    for chunk in all_chunks(packer):
        for row, later in itertools.zip_longest(chunk.rows, chunk.rows[1:]):
            room = chunk.chunk_tokens if later is None else later.offset
            skipped = min(8 * shapes[row.sequence][1], (shapes[row.sequence][0] - 1) // 8 * 8)
            start = max(row.offset, row.offset + skipped - row.start)
            end = row.offset + len(row.tokens)
            assert bool(row.offers) == (start < end)
            for group in range(2 if row.offers else 0):
                offers = [
                    offer
                    for offer in row.offers
                    if offer.group <= group < offer.group + offer.groups
                ]
                sizes = [offer.block_tokens for offer in offers]
                assert set(sizes) <= {8, 64}
                assert all(
                    offer.groups == (2 if offer.block_tokens < 2 * few_tokens else 1)
                    for offer in offers
                )
                assert [offer.offset for offer in offers] == list(
                    itertools.accumulate(sizes[:-1], initial=start)
                )
                assert end <= offers[-1].offset + sizes[-1] <= room
            if later is None and row.offers:
                whole = merged_block(end - start, 8)
                apart = sum(len(limits.bands(size)) for _, size, _ in split_blocks(end - start, 8))
                assert whole is not None
                saved = cost * (apart - len(limits.bands(whole)))
                merged = (
                    start + whole <= room
                    and whole - padded(end - start, 8) <= saved
                    and apart > len(limits.bands(whole))
                )
                assert len(row.offers) == (len(limits.bands(whole)) if merged else apart)


def test_blocks_are_offered_in_the_order_in_which_they_are_computed() -> None:
    toy = toy_limits(chunk_buckets=(128,), granule_tokens=8, layer_groups=2)
    packer = batches(replace(toy, block_bytes=16 * toy.kv_spec.bytes_per_token))
    packer.add(job(0, 76))
    chunk = packer.next_chunk(0)
    assert chunk is not None
    # Both groups of the last few tokens leave when the second group has been computed.
    found = [(offer.group, offer.groups, offer.block_tokens) for offer in chunk.rows[0].offers]
    assert found == [(0, 1, 64), (1, 1, 64), (0, 2, 8), (0, 2, 8)]


def test_a_chunk_beside_a_step_keeps_to_its_sizes() -> None:
    packer = batches()
    packer.add(job(1, 100))
    chunk = packer.next_chunk(0, beside=(16, 32))
    assert chunk and (chunk.chunk_tokens, len(chunk.rows[0].tokens)) == (32, 32)
    chunk = packer.next_chunk(0, beside=(16,))
    assert chunk and chunk.chunk_tokens == 16 and chunk.rows[0].start == 32
    chunk = packer.next_chunk(0)
    assert chunk and chunk.chunk_tokens == 64 and len(chunk.rows[0].tokens) == 52


def test_a_short_prompt_beside_a_step_is_not_padded_to_twice_its_chunk() -> None:
    packer = batches()
    packer.add(job(1, 10))
    chunk = packer.next_chunk(0, beside=(64,))
    assert chunk and chunk.chunk_tokens == 16
    packer.add(job(2, 20))
    finer = replace(LIMITS, chunk_buckets=(16, 24, 32, 64))
    packer = batches(finer)
    packer.add(job(2, 20))
    chunk = packer.next_chunk(0, beside=(32, 64))
    assert chunk and chunk.chunk_tokens == 32, "a size of both, not 24"


def test_prompts_wait_for_other_ranks_only_while_none_is_partly_issued() -> None:
    packer = batches(toy_limits(ranks=2, chunk_buckets=(16, 64), granule_tokens=8, page_size=8))
    packer.add(job(1, 100, rank=0))
    assert gathers(packer.queues), "rank 1 has no prompt"
    packer.add(job(2, 10, rank=1))
    assert not gathers(packer.queues), "each rank has a prompt"
    packer.next_chunk(0)
    packer.add(job(3, 10, arrival=-1.0, priority=1))
    assert [packer.queued_tokens(rank) for rank in (0, 1)] == [46, 0]
    assert not gathers(packer.queues), "prompt 1 is partly issued, behind one of higher priority"


def test_prompts_are_split_beside_a_step_only_where_they_may_be() -> None:
    packer = PrefillBatches(LIMITS, itertools.count(1).__next__, cut_tokens=32)
    assert packer.beside((16, 32, 64)) == (32, 64)
    packer.add(job(1, 100))
    chunk = packer.next_chunk(0, beside=(32,))
    assert chunk and len(chunk.rows[0].tokens) == 32
    assert batches().beside((16, 32, 64)) == (16, 32, 64)
