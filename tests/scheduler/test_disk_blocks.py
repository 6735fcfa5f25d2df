"""The blocks on disk against a plain list in order of use, and which of a chain can be restored."""

import random

import pytest

from jdisagg.messages.ports import Offer
from jdisagg.scheduler.disk_blocks import MOST_SAVING, MOST_WANTED, DiskBlocks, restorable
from jdisagg.scheduler.host_blocks import HostBlocks, HostPiece, TierBlock
from jdisagg.scheduler.prices import PROBE


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def chain(*numbers: int) -> tuple[bytes, ...]:
    return tuple(map(name, numbers))


def written(*numbers: int) -> dict[bytes, float]:
    """Blocks that lie there, all since instant 0."""
    return dict.fromkeys(chain(*numbers), 0.0)


def write_all(blocks: DiskBlocks) -> list[bytes]:
    """Everything that is wanted is written, at instant 0; what had to go for it."""
    gone: list[bytes] = []
    while True:
        block, went = blocks.take()
        gone += [one.name for one in went]
        if block is None:
            return gone
        assert blocks.written(block, now=0.0)


def expired(blocks: DiskBlocks, before: float) -> tuple[bytes, ...]:
    return tuple(block.name for block in blocks.expire(before))


def lie_there(blocks: DiskBlocks) -> list[bytes]:
    return [one for one in map(name, range(200)) if blocks.arrived(one)]


@pytest.mark.parametrize("seed", range(5))
def test_no_more_lie_there_than_there_is_room_for(seed: int) -> None:
    rng, blocks = random.Random(seed), DiskBlocks(10)
    writing: list[TierBlock] = []
    model: set[bytes] = set()  # that lie there
    for _ in range(2000):
        deed = rng.randrange(5)
        if deed == 0:
            start = rng.randrange(60)
            blocks.use(0, chain(*range(start, start + rng.randrange(5))))
        elif deed == 1:
            block, gone = blocks.take()
            names = {one.name for one in gone}
            assert names <= model
            model -= names
            if block is not None:
                assert block.name not in model
                writing.append(block)
        elif deed == 2 and writing:
            block = writing.pop(rng.randrange(len(writing)))
            if rng.random() < 0.2:
                assert blocks.not_written(block, failed=rng.random() < 0.5)
            else:
                assert blocks.written(block, now=0.0)
                model.add(block.name)
        elif deed == 3 and model:
            one = rng.choice(sorted(model))
            if rng.random() < 0.3:
                assert blocks.forget(*blocks.hold([one]))
                model.discard(one)
            else:
                blocks.let_go(blocks.hold([one]))
        assert len(blocks) == len(model) + len(writing) <= 10
        assert blocks.writing == len(writing) <= MOST_SAVING
        assert set(lie_there(blocks)) == model


def test_the_least_recently_used_goes_and_of_a_chain_its_end_first() -> None:
    blocks = DiskBlocks(6)
    blocks.use(0, chain(1, 2, 3))
    blocks.use(0, chain(4, 5, 6))
    assert write_all(blocks) == []
    blocks.use(0, chain(4, 5, 6))
    blocks.use(0, chain(1, 2, 3))
    blocks.use(0, chain(7, 8))
    assert write_all(blocks) == list(chain(6, 5))


def test_a_block_that_is_read_is_not_given_up() -> None:
    blocks = DiskBlocks(2)
    blocks.use(0, chain(1, 2))
    write_all(blocks)
    held = blocks.hold(chain(1, 2))
    blocks.use(0, chain(3))
    assert blocks.take() == (None, ())
    blocks.let_go(held)
    blocks.use(0, chain(3))
    assert write_all(blocks) == [name(2)]


def test_a_block_is_written_once() -> None:
    blocks = DiskBlocks(8)
    blocks.use(0, chain(1, 2))
    first, _ = blocks.take()
    blocks.use(0, chain(1, 2))
    assert first is not None and blocks.wanted == 1
    assert blocks.written(first, now=0.0)
    blocks.use(1, chain(1, 2))
    write_all(blocks)
    assert blocks.wanted == 0 and len(blocks) == 2


def test_what_was_cleared_is_not_known_again() -> None:
    blocks = DiskBlocks(8)
    blocks.use(0, chain(1, 2, 3))
    under_way, _ = blocks.take()
    assert under_way is not None
    assert under_way in blocks.clear()
    assert not blocks.written(under_way, now=0.0) and not blocks.not_written(under_way, failed=True)
    assert len(blocks) == blocks.writing == blocks.wanted == 0
    blocks.use(0, chain(1))
    again, _ = blocks.take()
    assert again is not None and again is not under_way


def test_what_lay_there_is_known_and_of_too_much_the_oldest_goes() -> None:
    blocks = DiskBlocks(3)
    blocks.use(0, chain(5))  # wanted before anybody had looked
    assert blocks.found(written(1, 2, 3, 4)) == (chain(2, 3, 4), chain(1))
    assert write_all(blocks) == [name(2)]
    assert lie_there(blocks) == list(chain(3, 4, 5))


def test_few_are_on_their_way_and_what_is_wanted_meanwhile_waits_in_a_bounded_queue() -> None:
    blocks = DiskBlocks(10 * MOST_WANTED)
    assert blocks.use(0, chain(*range(MOST_WANTED + 7))) == 7
    taken = [blocks.take()[0] for _ in range(MOST_SAVING + 1)]
    assert taken[-1] is None and all(taken[:-1])
    assert [one.name for one in taken if one] == list(chain(*range(MOST_SAVING)))


def test_after_a_write_that_failed_one_block_in_so_many_is_tried_until_one_is_written() -> None:
    blocks = DiskBlocks(1000)
    blocks.use(0, chain(*range(1 + 2 * PROBE + 5)))
    first, _ = blocks.take()
    assert first is not None and blocks.not_written(first, failed=True)
    second, _ = blocks.take()
    assert second is not None and second.name == name(PROBE)
    assert blocks.not_written(second, failed=True)
    third, _ = blocks.take()
    assert third is not None and third.name == name(2 * PROBE)
    assert blocks.written(third, now=0.0)
    assert write_all(blocks) == [] and blocks.arrived(name(2 * PROBE + 5))


def host_with(*numbers: int) -> HostBlocks:
    host = HostBlocks(100)
    for number in numbers:
        piece = HostPiece(Offer(number, 0, 0, 1, 1, 0))
        block, _ = host.begin(name(number), (piece,))
        assert block is not None and host.written(block, (piece,))
    return host


def test_a_chain_comes_back_from_wherever_its_blocks_lie_up_to_the_first_gap() -> None:
    host, disk = host_with(1, 4), DiskBlocks(100)
    disk.found(written(1, 2, 3, 6))
    assert restorable(chain(1, 2, 3, 4, 5, 6), host, disk) == (False, True, True, False)
    host.hold(chain(4))  # another prompt's
    assert restorable(chain(1, 2, 3, 4), host, disk) == (False, True, True)
    assert restorable(chain(9), host, disk) == ()


def test_what_was_written_too_long_ago_is_not_known_any_more() -> None:
    """Used lately or not, being read or not; what is only on its way is not old."""
    blocks = DiskBlocks(100)
    assert blocks.found({name(1): 5.0, name(2): 3.0, name(3): 4.0}) == (chain(1, 2, 3), ())
    blocks.use(0, chain(4, 5))
    late, under_way = blocks.take()[0], blocks.take()[0]
    assert late is not None and under_way is not None
    assert blocks.written(late, now=6.0)
    blocks.use(0, chain(2))
    held = blocks.hold(chain(3))
    assert expired(blocks, 4.0) == chain(2)
    assert expired(blocks, 6.0) == chain(3, 1)
    assert expired(blocks, 6.0) == () and lie_there(blocks) == list(chain(4))
    assert not blocks.knows(held[0])
    blocks.let_go(held)
    assert expired(blocks, 7.0) == chain(4)
    assert blocks.knows(under_way) and len(blocks) == 1
    assert blocks.written(under_way, now=8.0) and expired(blocks, 9.0) == chain(5)
    assert len(blocks) == 0


def test_what_has_gone_for_another_reason_does_not_expire_too() -> None:
    blocks = DiskBlocks(2)
    blocks.found({name(1): 1.0, name(2): 2.0})
    blocks.use(0, chain(3))
    assert write_all(blocks) == [name(1)]  # for want of room
    assert blocks.forget(*blocks.hold(chain(2)))
    assert expired(blocks, 9.0) == chain(3)  # which was written at 0
