"""The order of eviction against a plain list that is searched for the least worth, and what floods
of other prompts leave of retained blocks in pages, host memory and disk."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.messages.ports import Offer
from jdisagg.prompt.hints import Hints, Retention
from jdisagg.request import Request
from jdisagg.scheduler.disk_blocks import DiskBlocks
from jdisagg.scheduler.host_blocks import HostBlocks, HostPiece
from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.scheduler.residency import BlockNames, Residency
from jdisagg.scheduler.retention import EvictionOrder, Retained, worth

PAGE = 4


def at_first(retention: Retention) -> float:
    return retention.weight * retention.seconds


LONG, SHORT = Retention(4.0, 1000.0), Retention(1.0, 60.0)
RETENTIONS: dict[str | None, Retention | None] = {None: None, "long": LONG, "short": SHORT}


def request(tokens: tuple[int, ...], retention: Retention | None, retained: int = 0) -> Request:
    hints = retention and Hints(retention=retention, retained_tokens=retained)
    return Request("r", tokens, hints=hints)


def test_a_retention_decays_and_no_use_is_worth_less_than_an_earlier_one() -> None:
    assert worth(5.0, None, 1.0) == 5.0
    at_once, later = worth(5.0, SHORT, 0.0), worth(5.0, SHORT, 30.0)
    assert at_once == 65.0 and later == 35.0
    assert worth(5.0, SHORT, 60.0) == worth(5.0, SHORT, 1e6) == 5.0


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([*RETENTIONS]), st.sampled_from([0, 7, 400])),
        min_size=1,
    ),
    st.sampled_from([3, 100]),
)
def test_the_block_of_least_worth_goes_first(
    uses: list[tuple[int, str | None, int]], most_retained: int
) -> None:
    """Blocks are used at some times, and then all are evicted. `last` has the time and the
    retention of each block, and the order of their uses."""
    retained = Retained()
    order = EvictionOrder[bytes](retained, bytes, most_retained)
    last: dict[bytes, tuple[float, int, Retention | None]] = {}
    now, of_block = 0.0, dict[bytes, Retention]()
    for at, (number, kind, seconds) in enumerate(uses):
        now += seconds
        retained.advance(now)
        name, retention = bytes([number]), RETENTIONS[kind]
        retained.asked(request((1,), retention), (name,), PAGE)
        if retention is not None:
            known = of_block.get(name, retention)
            longest = max(known, retention, key=at_first)
            of_block[name] = longest
        order.add(name)
        last[name] = now, at, of_block.get(name)
    listed = list(order)
    while last:
        assert len(order) == len(last)
        live = [one for one in last.values() if one[2] and now - one[0] < one[2].seconds]
        counts = len(live) <= most_retained
        worths = {
            name: worth(use, retention if counts else None, now - use)
            for name, (use, _, retention) in last.items()
        }
        gone = order.pop()
        assert gone not in order and worths[gone] == min(worths.values())
        if len(last) == len(listed):
            assert worths[listed[0]] == min(worths.values())
        same = [name for name in last if last[name][2] == last[gone][2]]
        assert gone == min(same, key=lambda name: last[name][1])
        del last[gone]
    with pytest.raises(KeyError):
        order.pop()


@given(st.lists(st.integers(0, 9), min_size=1))
def test_without_retention_the_least_recently_used_goes_first(uses: list[int]) -> None:
    order, expected = EvictionOrder[int](), list[int]()
    for key in uses:
        order.add(key)
        expected = [one for one in expected if one != key] + [key]
    assert list(order) == expected == [order.pop() for _ in range(len(order))]


class Pages:
    """Prompts of two blocks in 12 pages of a mesh."""

    def __init__(self) -> None:
        self.kept = Residency([PageLedger(12)], PAGE, BlockNames(b"s", "m", PAGE))

    def use(self, number: int, retention: Retention | None) -> None:
        tokens = tuple(range(8 * number, 8 * number + 8))
        chain = self.kept.chain(request(tokens, retention), tokens)
        cached = self.kept.cached_tokens(0, chain, 8, to_compute=False)
        assert self.kept.reserve(0, number, chain, cached, 2) is not None
        self.kept.let_go(0, number, chain)

    def chain(self, number: int) -> tuple[bytes, ...]:
        tokens = tuple(range(8 * number, 8 * number + 8))
        return self.kept.chain(request(tokens, None), tokens)

    def has(self, number: int) -> bool:
        return self.kept.match(0, self.chain(number)) == 2

    @property
    def retained(self) -> Retained:
        return self.kept.retained


class Host:
    """Prompts of two blocks in 12 blocks of host memory."""

    def __init__(self) -> None:
        self.retained = Retained()
        self.blocks = HostBlocks(12, retained=self.retained)

    def names(self, number: int) -> tuple[bytes, ...]:
        return bytes([number, 0]), bytes([number, 1])

    def use(self, number: int, retention: Retention | None) -> None:
        self.retained.asked(request((1,), retention), self.names(number), PAGE)
        for name in reversed(self.names(number)):
            block, _ = self.blocks.begin(name, (HostPiece(Offer(1, 0, 0, 16, 16, rank=0)),))
            if block is not None:
                self.blocks.written(block, block.pieces)

    def has(self, number: int) -> bool:
        return self.blocks.match(self.names(number), 0) == 2


class Disk(Host):
    """Prompts of two blocks in 12 blocks on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = DiskBlocks(12, self.retained)

    def use(self, number: int, retention: Retention | None) -> None:
        self.retained.asked(request((1,), retention), self.names(number), PAGE)
        self.blocks.use(0, self.names(number))
        while (block := self.blocks.take()[0]) is not None:
            self.blocks.written(block)

    def has(self, number: int) -> bool:
        return all(map(self.blocks.arrived, self.names(number)))


TIERS = pytest.mark.parametrize("tier", [Pages, Host, Disk])


@TIERS
def test_a_flood_evicts_blocks_without_retention_first(tier: Callable[[], Pages]) -> None:
    cache = tier()
    cache.use(0, LONG)
    cache.use(1, None)
    for number in range(2, 30):
        cache.retained.advance(float(number))
        cache.use(number, None)
    assert cache.has(0) and not cache.has(1)


@TIERS
def test_retained_blocks_go_after_their_decay(tier: Callable[[], Pages]) -> None:
    cache = tier()
    cache.use(0, LONG)
    cache.retained.advance(990.0)
    for number in range(1, 30):
        cache.use(number, None)
    assert not cache.has(0)


@TIERS
def test_a_tier_of_retained_blocks_gives_room(tier: Callable[[], Pages]) -> None:
    """With more than half of it retained, the least recently used go, and new ones come in."""
    cache = tier()
    for number in range(20):
        cache.retained.advance(float(number))
        cache.use(number, LONG)
        assert cache.has(number)
    assert not cache.has(0)
    cache.retained.advance(20.0)
    cache.use(20, None)
    assert cache.has(20)


def test_only_the_blocks_before_a_breakpoint_are_retained_and_a_use_renews_them() -> None:
    retained = Retained()
    retained.asked(request(tuple(range(12)), LONG, retained=9), (b"a", b"b", b"c"), PAGE)
    assert [retained.of(name) for name in (b"a", b"b", b"c")] == [LONG, LONG, None]
    order = EvictionOrder[bytes](retained, bytes, 5)
    order.add(b"a")
    retained.advance(990.0)
    order.add(b"a")
    retained.advance(1100.0)
    order.add(b"new")
    assert list(order) == [b"new", b"a"]


def test_a_worker_remembers_no_more_retained_blocks_than_it_may() -> None:
    retained = Retained(most=2)
    retained.asked(request((1,), LONG), (b"a", b"b", b"c"), PAGE)
    assert [retained.of(name) for name in (b"a", b"b", b"c")] == [None, LONG, LONG]


@pytest.mark.parametrize("retention", [None, LONG])
def test_a_demoted_block_goes_first_until_it_is_promoted_or_used(
    retention: Retention | None,
) -> None:
    pages = Pages()  # of six prompts
    for number in range(6):
        pages.use(number, retention)
    for name in (name for number in (3, 4, 5) for name in pages.chain(number)):
        pages.kept.demote(0, name)
    pages.use(3, retention)
    for name in pages.chain(4):
        pages.kept.promote(name)
    pages.use(6, retention)
    assert [pages.has(number) for number in range(7)] == [True] * 5 + [False, True]
    for number in (7, 8, 9):
        pages.use(number, retention)
    assert [pages.has(number) for number in range(7)] == [False] * 3 + [True, True, False, True]
