"""The page ledger against a plain model: sets of pages per owner. One test per invariant of its
header, one machine for all."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdisagg.scheduler.page_ledger import LedgerError, PageLedger, pages_for

PAGES = 12


class LedgerMachine(RuleBasedStateMachine):
    """Random reserve, extend, share, own and free, beside a model that keeps lists alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(PAGES)
        self.held: dict[int, list[int]] = {}
        self.next_owner = 0

    def free_in_model(self) -> int:
        return PAGES - len({page for pages in self.held.values() for page in pages})

    def owner(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    @rule(count=st.integers(0, 6))
    def reserve(self, count: int) -> None:
        free = self.free_in_model()
        got = self.ledger.reserve(self.next_owner, count)
        assert (got is not None) == (count <= free)
        if got is not None:
            self.held[self.next_owner] = list(got)
            self.next_owner += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, 6))
    def extend(self, data: st.DataObject, count: int) -> None:
        owner, free = self.owner(data), self.free_in_model()
        got = self.ledger.extend(owner, count)
        assert (got is not None) == (count <= free)
        if got is not None:
            assert list(got[: len(self.held[owner])]) == self.held[owner]
            assert len(got) == len(self.held[owner]) + count
            self.held[owner] = list(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owner = self.owner(data)
        count = data.draw(st.integers(0, len(self.held[owner])))
        free = self.ledger.free_pages
        self.held[self.next_owner] = list(self.ledger.share(owner, self.next_owner, count))
        assert self.held[self.next_owner] == self.held[owner][:count]
        assert self.ledger.free_pages == free
        self.next_owner += 1

    @precondition(lambda self: any(self.held.values()) and self.ledger.free_pages)
    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        owner = data.draw(
            st.sampled_from([owner for owner, pages in sorted(self.held.items()) if pages])
        )
        index = data.draw(st.integers(0, len(self.held[owner]) - 1))
        page = self.held[owner][index]
        shared = sum(page in pages for pages in self.held.values()) > 1
        copy = self.ledger.own(owner, index)
        assert (copy is not None) == shared
        if copy is not None:
            assert copy[0] == page
            assert all(copy[1] not in pages for pages in self.held.values())
            self.held[owner][index] = copy[1]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = self.owner(data)
        before = self.free_in_model()
        del self.held[owner]
        assert self.ledger.free(owner) == self.free_in_model() - before

    @invariant()
    def model_and_ledger_agree(self) -> None:
        assert self.ledger.free_pages == self.free_in_model()
        assert {
            owner: list(self.ledger.pages(owner)) for owner in self.ledger.owners()
        } == self.held
        for page in range(PAGES):
            assert self.ledger.references(page) == sum(
                page in pages for pages in self.held.values()
            )
        assert all(len(set(pages)) == len(pages) for pages in self.held.values())


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_every_page_is_free_or_held() -> None:
    ledger = PageLedger(5)
    held = ledger.reserve(1, 2) or ()
    rest = ledger.reserve(2, 3) or ()
    assert sorted(held + rest) == [0, 1, 2, 3, 4] and ledger.free_pages == 0


def test_a_page_has_as_many_references_as_owners() -> None:
    ledger = PageLedger(5)
    ledger.reserve(1, 3)
    ledger.share(1, 2, 2)
    ledger.share(1, 3, 1)
    assert [ledger.references(page) for page in ledger.pages(1)] == [3, 2, 1]
    assert ledger.free(1) == 1
    assert ledger.free(2) == 1
    assert ledger.free(3) == 1


def test_an_owner_holds_no_page_twice() -> None:
    ledger = PageLedger(5)
    ledger.reserve(1, 2)
    ledger.share(1, 2, 2)
    copy = ledger.own(2, 1)
    assert copy is not None
    assert len({*ledger.pages(1), *ledger.pages(2)}) == 3
    assert ledger.own(2, 1) is None, "its own by now"


def test_nothing_is_freed_twice() -> None:
    ledger = PageLedger(5)
    ledger.reserve(1, 2)
    ledger.free(1)
    with pytest.raises(LedgerError, match="owner 1"):
        ledger.free(1)
    with pytest.raises(LedgerError):
        ledger.extend(1, 1)


def test_a_refused_request_changes_nothing() -> None:
    ledger = PageLedger(3)
    ledger.reserve(1, 2)
    assert ledger.reserve(2, 2) is None and ledger.extend(1, 2) is None
    assert ledger.free_pages == 1 and list(ledger.owners()) == [1]
    with pytest.raises(LedgerError):
        ledger.reserve(1, 1)
    with pytest.raises(LedgerError):
        ledger.share(1, 3, 3)


def test_pages_for_rounds_up() -> None:
    assert [pages_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
