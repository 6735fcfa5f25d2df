"""What a router knows of the blocks that workers keep, against the trees themselves: whatever is
lost, doubled or late on the way, the next exchange makes it good."""

import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from jdisagg.errors import InvalidRequestError
from jdisagg.messages.kept_blocks import TOLD_BYTES, KeptMark, KeptNews, KeptScheme
from jdisagg.request import Adapter, Request
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.scheduler.kept_log import KeptLog
from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.scheduler.residency import BlockNames, Residency
from tests.lanes import given_examples

SECRET = b"secret"
GRAIN = 8


class Holder:
    """A worker's trees: two ranks of few pages, so that blocks are given away."""

    def __init__(self, name: str, page_size: int, events_on_record: int = 6) -> None:
        self.name = name
        self.ledgers = [PageLedger(48 // page_size) for _ in range(2)]
        names = BlockNames(SECRET, "model", GRAIN)
        self.residency = Residency(self.ledgers, page_size, names)
        self.residency.log = KeptLog(events_on_record)
        self._page_size = page_size
        self._owner = 0
        self.mark = KeptMark()

    def use(self, rank: int, tokens: tuple[int, ...]) -> None:
        chain = self.residency.chain(Request("r", tokens), tokens)
        self._owner += 1
        pages = -(-len(tokens) // self._page_size)
        if self.residency.reserve(rank, self._owner, (), 0, pages) is not None:
            self.residency.let_go(rank, self._owner, chain)

    def holds(self, tokens: tuple[int, ...]) -> int:
        chain = self.residency.chain(Request("r", tokens), tokens)
        return max(
            self.residency.cached_tokens(rank, chain, len(tokens), False) for rank in range(2)
        )

    def tell(self, known: KnownBlocks) -> None:
        """Until there is nothing left to say."""
        for _ in range(9):
            news = self.residency.log.news(self.name, self.mark)
            if news is None:
                return
            self.mark = known.told(news)
        raise AssertionError("the exchange does not come to an end")


def joined(*holders: Holder, most_blocks: int = 1 << 20) -> KnownBlocks:
    known = KnownBlocks(SECRET, most_blocks)
    for holder in holders:
        known.joined(holder.name, holder.residency.scheme)
    return known


PROMPTS = st.sampled_from(
    [tuple(letter for letter in letters for _ in range(GRAIN)) for letters in
     ((1,), (1, 2), (1, 2, 3), (1, 4, 5, 6), (7, 8), (9,))]
)  # fmt: skip
USES = st.tuples(st.just("use"), st.integers(0, 2), st.integers(0, 1), PROMPTS)
FAULTS = st.tuples(
    st.sampled_from(("tell", "lose", "double", "late", "reset", "broken", "gone", "restarted")),
    st.integers(0, 2),
    st.integers(0, 1),
    st.just(()),
)


@given_examples(60, 150, st.lists(st.one_of(USES, FAULTS), max_size=40), PROMPTS)
def test_whatever_news_are_lost_doubled_or_late_the_next_exchange_makes_it_good(
    steps: list[tuple[str, int, int, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    holders = [Holder("p0", 8), Holder("p1", 8), Holder("d0", 16)]
    known = joined(*holders)
    late: list[KeptNews] = []
    for what, which, rank, tokens in steps:
        holder = holders[which]
        news = holder.residency.log.news(holder.name, holder.mark)
        if what == "use":
            holder.use(rank, tokens)
        elif what == "tell":
            holder.tell(known)
        elif what == "reset":
            holder.residency.clear()
        elif what == "broken":
            holder.residency.clear(rank)
        elif what == "gone":
            known.forget(holder.name)
            known.joined(holder.name, holder.residency.scheme)
            holder.mark = KeptMark()
        elif what == "restarted":
            late = [one for one in late if one.worker != holder.name]  # another boot: not taken
            holders[which] = Holder(holder.name, holder._page_size)
            known.joined(holder.name, holder.residency.scheme)
        elif news is not None:
            if what == "lose":  # arrived, its answer did not
                known.told(news)
            elif what == "double":
                holder.mark = known.told(news)
                holder.mark = known.told(news)
            else:
                late.append(news)
    for news in late:
        known.told(news)
    for holder in holders:
        holder.mark = known.told(KeptNews(holder.name, 1, 0, b""))  # how far it is known
        holder.tell(known)
        assert known.blocks(holder.name) == len(holder.residency.log)
    expected = {holder.name: holder.holds(asked) for holder in holders}
    found = known.known(Request("r", asked))()
    assert dict(found) == {name: tokens for name, tokens in expected.items() if tokens}


def test_a_tenant_is_told_nothing_of_anothers_blocks_and_another_secret_finds_none() -> None:
    holder, tokens = Holder("p0", 8), (1,) * GRAIN
    known = joined(holder)
    holder.use(0, tokens)
    holder.tell(known)
    assert known.known(Request("r", tokens))() == {"p0": GRAIN}
    assert known.known(Request("r", tokens, tenant="other"))() == {}
    stranger = KnownBlocks(b"another")
    stranger.joined("p0", holder.residency.scheme)
    holder.mark = KeptMark()
    holder.tell(stranger)
    assert stranger.blocks("p0") == 1 and stranger.known(Request("r", tokens))() == {}


def test_a_worker_that_is_gone_or_reset_leaves_nothing_behind() -> None:
    one, other, tokens = Holder("p0", 8), Holder("p1", 8), (1,) * GRAIN
    known = joined(one, other)
    for holder in (one, other):
        holder.use(0, tokens)
        holder.tell(known)
    known.forget("p0")
    known.forget("p0")
    assert known.known(Request("r", tokens))() == {"p1": GRAIN} and known.blocks("p0") == 0
    other.residency.clear()
    other.tell(known)
    assert len(known) == 0 and known.known(Request("r", tokens))() == {}
    known.forget("p1")
    assert not known._indices, "an index that nobody feeds is given up"


def test_who_missed_more_than_is_on_record_gets_all_that_is_kept_in_one_message() -> None:
    log, known = KeptLog(events_on_record=4), KnownBlocks(SECRET)
    known.joined("w", KeptScheme("model", GRAIN, GRAIN))
    mark = KeptMark()
    for number in range(20):
        log.gained(number.to_bytes(TOLD_BYTES, "big"))
    news = log.news("w", mark)
    assert news is not None and news.whole and len(news.names) == 20 * TOLD_BYTES
    mark = known.told(news)
    log.lost((3).to_bytes(TOLD_BYTES, "big"))
    news = log.news("w", mark)
    assert news is not None and not news.whole and news.added == b"\0"
    assert known.told(news) == KeptMark(1, 21) and known.blocks("w") == 19
    assert log.news("w", KeptMark(1, 21)) is None


def test_the_index_is_bounded_whatever_workers_tell() -> None:
    rng, known, log = random.Random(1), KnownBlocks(SECRET, most_blocks=50), KeptLog()
    mark = KeptMark()
    known.joined("w", KeptScheme("model", GRAIN, GRAIN))
    for _ in range(200):
        log.gained(rng.randbytes(TOLD_BYTES))
        news = log.news("w", mark)
        assert news is not None
        mark = known.told(news)
    assert len(known) == 50 and mark == KeptMark(1, 200)


@pytest.mark.parametrize(
    "news",
    [
        KeptNews("w", 1, 0, b"short", b"\1"),
        KeptNews("w", 1, 0, bytes(TOLD_BYTES), b"\1\0"),
        KeptNews("w", 0, 0, b""),
        KeptNews("w", 1, -1, b""),
    ],
)
def test_what_are_no_news_is_refused_and_changes_nothing(news: KeptNews) -> None:
    known = KnownBlocks(SECRET)
    known.joined("w", KeptScheme("model", GRAIN, GRAIN))
    with pytest.raises(InvalidRequestError, match="worker 'w' reports"):
        known.told(news)
    with pytest.raises(InvalidRequestError, match="are no multiple"):
        known.joined("x", KeptScheme("model", GRAIN, GRAIN + 1))
    assert known.told(KeptNews("w", 1, 0, b"")) == KeptMark(1, 0) and len(known) == 0


def test_a_prompt_of_another_adapter_or_of_new_weights_is_no_hit() -> None:
    holder, tokens = Holder("w", GRAIN), tuple(range(2 * GRAIN))
    known = joined(holder)
    holder.use(0, tokens)
    holder.tell(known)
    plain = Request("r", tokens)
    assert known.known(plain)() == {"w": 2 * GRAIN}
    for digest in ("d1", "d2"):
        assert not known.known(replace(plain, adapter=Adapter("mine", "/a", digest)))().get("w")
    scheme = holder.residency.scheme
    assert scheme is not None
    known.joined("w", scheme.with_weights("new@f00"))
    assert len(known) == known.blocks("w") == 0
    assert not known.known(plain)().get("w")
