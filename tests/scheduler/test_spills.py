"""Who goes to host memory when its pages are taken, in which parts, and who comes back next."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.messages.ports import Offer
from jdisagg.request import Grammar, GrammarKind
from jdisagg.scheduler.host_blocks import HostPiece
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.sequences import Sequence, Stage
from jdisagg.scheduler.spills import SPILLS_AT_ONCE, Spill, Spills, batch_ranges
from tests.fakes.fake_executor import toy_limits
from tests.fakes.fake_states import with_state
from tests.scheduler.bench import Bench

LIMITS = toy_limits(page_size=4, pages_per_rank=400, slots_per_rank=8)
TOKEN_BYTES = LIMITS.kv_spec.bytes_per_token


def sequences(count: int) -> list[Sequence]:
    """Ready ones, the oldest first."""
    bench = Bench(LIMITS)
    return [bench.ready(number + 1).children[0] for number in range(count)]


def spills(room_tokens: int = 1000, prices: Prices | None = None) -> Spills:
    return Spills(LIMITS, room_tokens * TOKEN_BYTES, prices or Prices())


def spilled(book: Spills, child: Sequence, written: bool = True) -> Spill:
    offer = Offer(offer_id=child.key, group=0, start=0, valid_tokens=5, block_tokens=8, rank=0)
    batches = [(HostPiece(offer),)]
    size = book.bytes_of(batches)
    assert not book.refusal(child) and book.has_room(size)
    spill = Spill(child, 0, batches, 5, size, (), 0, until=9.0, written=written)
    child.stage = Stage.SPILLED
    book.add(spill)
    return spill


def test_what_lies_there_never_exceeds_its_room() -> None:
    book = spills(room_tokens=20)
    for child in sequences(2):
        spilled(book, child)
    assert book.bytes == 16 * TOKEN_BYTES
    assert book.has_room(4 * TOKEN_BYTES) and not book.has_room(4 * TOKEN_BYTES + 1)


def test_the_oldest_comes_back_first() -> None:
    book = spills()
    old, middle, young = sequences(3)
    ahead = [spilled(book, child) for child in (middle, young, old)]
    assert book.next() is ahead[2]
    old.stage = Stage.RETURNING
    assert book.next() is ahead[0] and book.returning() == 1
    book.forget(ahead[0])
    assert book.next() is ahead[1]


def test_what_ended_takes_no_room() -> None:
    book = spills()
    gone, stays = (spilled(book, child) for child in sequences(2))
    gone.child.stage = Stage.ENDED
    assert book.ended() == (gone,) and list(book) == [stays] and book.ended() == ()
    assert book.bytes == stays.bytes


def test_a_few_are_on_their_way_at_a_time_and_the_next_is_computed_anew() -> None:
    book = spills()
    children = sequences(SPILLS_AT_ONCE + 1)
    under_way = [spilled(book, child, written=False) for child in children[:-1]]
    assert book.refusal(children[-1]) == "busy"
    under_way[0].written = True
    assert book.refusal(children[-1]) == ""


def test_who_is_dearer_to_bring_back_than_to_compute_is_computed_anew() -> None:
    prices = Prices()
    prices.computed_in(10, 1.0)
    prices.moved_in(10, 2.0)
    (child,) = sequences(1)
    assert spills(prices=prices).refusal(child) == "price"
    assert spills(prices=Prices(always=True)).refusal(child) == ""


def test_only_who_has_all_its_kv_in_pages_goes() -> None:
    (child,) = sequences(1)
    for stage in Stage:
        child.stage = stage
        may = stage in (Stage.READY, Stage.RUNNING)
        assert spills().refusal(child) == ("" if may else "early")
        assert spills(room_tokens=0).refusal(child) == "off"


def test_steps_in_flight_count_where_layers_keep_more_than_pages() -> None:
    """Unless how many tokens they give is unknown."""
    (child,) = sequences(1)
    assert not spills().steps_count
    for limits in (replace(LIMITS, ring_pages=2), with_state(LIMITS)):
        kept = Spills(limits, 1 << 20, Prices())
        assert kept.steps_count and kept.refusal(child) == ""
        grammar = Grammar(GrammarKind.REGEX, "a+")
        sampling = replace(child.group.request.sampling, grammar=grammar)
        constrained = replace(child.group.request, sampling=sampling)
        child.group.request, plain = constrained, child.group.request
        assert kept.refusal(child) == "off"
        child.group.request = plain


@given(
    tokens=st.integers(1, 400),
    page_size=st.sampled_from((4, 8, 24)),
    blocks=st.one_of(st.none(), st.integers(0, 20)),
)
def test_parts_are_all_positions_once_and_end_where_pages_do(
    tokens: int, page_size: int, blocks: int | None
) -> None:
    """`blocks`: that have a name; None: nothing stays, and no block has one."""
    limits = toy_limits(page_size=page_size, chunk_buckets=(16, 32), granule_tokens=8)
    block_tokens = 0 if blocks is None else 48
    named = min((blocks or 0) * block_tokens, tokens // (block_tokens or 1) * block_tokens)
    batches = batch_ranges(limits, named, block_tokens, tokens)
    parts = [part for batch in reversed(batches) for part in batch]
    assert parts[0][0] == 0 and parts[-1][1] == tokens
    assert all(before[1] == after[0] for before, after in zip(parts, parts[1:], strict=False))
    for batch in batches:
        assert batch[0][0] % page_size == 0, "what lies before is in whole pages"
        assert batch[-1][1] - batch[0][0] <= 32 + 47
    for start, end in parts:
        assert start % limits.granule_tokens == 0
        if start < named:
            assert (start, end) == (start // 48 * 48, start // 48 * 48 + 48)
