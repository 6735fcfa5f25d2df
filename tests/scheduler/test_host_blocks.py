"""The blocks in host memory against a plain model."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdisagg.messages.ports import Offer
from jdisagg.scheduler.host_blocks import (
    LOW_WATERMARK,
    AskedAgain,
    HostBlocks,
    HostPiece,
    TierBlock,
)

CAPACITY = 8
NAMES = st.sampled_from([bytes([number]) for number in range(12)])


def pieces(number: int) -> tuple[HostPiece, ...]:
    return tuple(HostPiece(Offer(2 * number + at, at, 0, 16, 16, rank=0)) for at in range(2))


class HostBlocksMachine(RuleBasedStateMachine):
    """Blocks come, arrive, go back, are found broken and are cleared. `order` has those that are
    here, least recently used first, as a list that is searched."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = HostBlocks(CAPACITY)
        self.order: list[TierBlock] = []
        self.written: set[TierBlock] = set()
        self.held: list[TierBlock] = []
        self.count = 0

    def known(self, name: bytes) -> TierBlock | None:
        return next((block for block in self.order if block.name == name), None)

    @rule(name=NAMES)
    def begin(self, name: bytes) -> None:
        self.count += 1
        block, gone = self.blocks.begin(name, pieces(self.count))
        known = self.known(name)
        if known is not None:
            assert block is None and gone == ()
            self.order.remove(known)
            self.order.append(known)
            return
        movable = [one for one in self.order if one in self.written and one not in self.held]
        if len(self.order) < CAPACITY:
            assert gone == ()
        else:
            low = min(CAPACITY - 1, int(CAPACITY * LOW_WATERMARK))
            assert list(gone) == movable[: len(self.order) - low]
        for one in gone:
            self.order.remove(one)
        if block is None:
            assert len(self.order) == CAPACITY
        else:
            self.order.append(block)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def arrives(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.order))
        assert self.blocks.written(block, block.pieces)
        self.written.add(block)

    @rule(chain=st.lists(NAMES, unique=True), first=st.integers(0, 12), back=st.booleans())
    def match_and_hold(self, chain: list[bytes], first: int, back: bool) -> None:
        found = 0
        for name in chain[first:]:
            block = self.known(name)
            if block is None or block not in self.written or block in self.held:
                break
            found += 1
        assert self.blocks.match(tuple(chain), first) == found
        if back and found:
            self.held += self.blocks.hold(tuple(chain[first : first + found]))

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        self.blocks.let_go(self.held)
        for block in reversed(self.held):
            if block in self.order:
                self.order.remove(block)
                self.order.append(block)
        self.held.clear()

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.order))
        assert self.blocks.forget(block)
        assert not self.blocks.forget(block)
        assert not self.blocks.written(block, block.pieces), "it was given up meanwhile"
        self.order.remove(block)

    @rule()
    def clear(self) -> None:
        assert list(self.blocks.clear()) == self.order
        self.order.clear()

    @invariant()
    def never_more_than_there_is_room_for(self) -> None:
        assert len(self.blocks) == len(self.order) <= CAPACITY
        assert self.blocks.free == CAPACITY - len(self.order)
        assert self.blocks.writing == sum(one not in self.written for one in self.order)
        assert all(block.name in self.blocks for block in self.order)


HostBlocksMachine.TestCase.settings = settings(max_examples=60)
TestHostBlocks = HostBlocksMachine.TestCase


def test_with_no_capacity_nothing_is_kept() -> None:
    blocks = HostBlocks(0)
    assert blocks.begin(b"a", pieces(0)) == (None, ())
    assert len(blocks) == 0


def named(first: int, count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "big") for number in range(first, first + count))


def evict(asked: AskedAgain, names: tuple[bytes, ...]) -> list[bool]:
    """Returns, for each evicted block, whether it would be copied."""
    found = []
    for name in names:
        asked.evicted(name)
        found.append(asked.worth_copying)
    return found


def test_copies_end_while_no_prompt_asks_for_evicted_blocks_and_begin_again_when_some_do() -> None:
    asked = AskedAgain(4096)
    useless = evict(asked, named(0, 1000))
    assert all(useless[:250]) and not any(useless[350:])
    for name in named(900, 20):  # conversations go on, though their blocks were not copied
        asked.asked(name)
    assert all(evict(asked, named(1000, 50)))


def test_copies_go_on_where_one_evicted_block_in_five_is_asked_for() -> None:
    asked = AskedAgain(4096)
    for first in range(0, 5000, 50):
        assert all(evict(asked, named(first, 50)))
        for name in named(first, 10):
            asked.asked(name)


def test_a_block_counts_once_an_eviction_and_only_the_latest_are_remembered() -> None:
    asked = AskedAgain(100)
    evict(asked, named(0, 1000))
    for name in (*named(0, 900), *100 * named(950, 5)):
        asked.asked(name)
    assert not asked.worth_copying
    assert [name in asked for name in named(899, 3)] == [False, True, True]
