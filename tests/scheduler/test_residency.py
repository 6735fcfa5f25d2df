"""KV that stays, against a plain model: what each page holds is written down, and a block that is
found must hold what its name says. One test per invariant of the module's header, one machine for
all."""

import math
from dataclasses import replace
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.errors import ConfigError
from jdisagg.prompt.images import PromptImage
from jdisagg.request import Adapter, Request
from jdisagg.scheduler.page_ledger import LedgerError, PageLedger, pages_for
from jdisagg.scheduler.residency import BlockNames, Chain, Residency, ResidencyTree
from tests.lanes import given_examples

PAGES = 24
PAGE_SIZE = 8
GRAIN = 16  # two pages a block
NAMES = BlockNames(b"secret", "model", GRAIN)


def request(tokens: tuple[int, ...] = (1,), tenant: str = "", scope: str = "") -> Request:
    return Request("r", tokens, tenant=tenant, cache_scope=scope)


class ResidencyMachine(RuleBasedStateMachine):
    """Sequences of few different tokens (so that beginnings are shared) come, grow, fork, end and
    are thrown away. `holds` says for each page which tokens were written there."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(PAGES)
        self.residency = Residency([self.ledger], PAGE_SIZE, NAMES)
        self.holds: dict[int, tuple[int, ...]] = {}
        self.sequences: dict[int, tuple[int, ...]] = {}
        self.known: dict[bytes, tuple[int, ...]] = {}
        self.left: list[tuple[int, ...]] = []  # by sequences that gave way
        self.next_owner = 0
        self.hits = 0

    def chain(self, tokens: tuple[int, ...]) -> Chain:
        chain = self.residency.chain(request(), tokens)
        for count, name in enumerate(chain, 1):
            self.known[name] = tokens[: count * GRAIN]
        return chain

    def write(self, owner: int, start: int) -> None:
        """Fills the owner's pages from position `start` on."""
        tokens, pages = self.sequences[owner], self.ledger.pages(owner)
        for index in range(start // PAGE_SIZE, len(pages)):
            assert self.ledger.references(pages[index]) == 1, "nobody writes into shared pages"
            self.holds[pages[index]] = tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]

    @rule(choices=st.lists(st.integers(0, 1), min_size=1, max_size=5), tail=st.integers(0, GRAIN))
    def begin(self, choices: list[int], tail: int) -> None:
        tokens = tuple(choice for choice in choices for _ in range(GRAIN)) + (7,) * tail
        chain, owner = self.chain(tokens), self.next_owner
        cached = self.residency.cached_tokens(0, chain, len(tokens), to_compute=False)
        free, held = self.ledger.free_pages, self.residency.held_pages(0, chain, cached)
        wanted = pages_for(len(tokens), PAGE_SIZE)
        got = self.residency.reserve(0, owner, chain, cached, wanted)
        assert (got is not None) == (wanted - held <= free)
        if got is None:
            assert self.ledger.free_pages == free
            return
        assert self.ledger.free_pages == free - (wanted - held)
        for index in range(cached // PAGE_SIZE):
            assert self.holds[got[index]] == tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
        self.hits += cached > 0
        self.sequences[owner] = tokens
        self.next_owner += 1
        self.write(owner, cached)

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.sequences)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.integers(1, 2 * GRAIN))
    def grow(self, data: st.DataObject, more: int) -> None:
        owner = self.some(data)
        tokens = self.sequences[owner]
        longer = tokens + (3,) * more
        pages, index = self.ledger.pages(owner), len(tokens) // PAGE_SIZE
        if len(tokens) % PAGE_SIZE and self.ledger.references(pages[index]) > 1:
            return
        if self.ledger.extend(owner, pages_for(len(longer), PAGE_SIZE) - len(pages)) is not None:
            self.sequences[owner] = longer
            self.write(owner, index * PAGE_SIZE)

    @precondition(lambda self: self.sequences and self.ledger.free_pages)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """As n > 1 does: full pages are shared, the last, partly filled one is copied."""
        owner, other = self.some(data), self.next_owner
        tokens = self.sequences[owner]
        pages = self.ledger.share(owner, other, pages_for(len(tokens), PAGE_SIZE))
        self.next_owner += 1
        self.sequences[other] = tokens
        if len(tokens) % PAGE_SIZE:
            copy = self.ledger.own(other, len(pages) - 1)
            assert copy is not None
            self.holds[copy[1]] = self.holds[copy[0]]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        owner = self.some(data)
        tokens = self.sequences.pop(owner)
        free = self.ledger.free_pages
        self.residency.let_go(0, owner, self.chain(tokens) if keep else ())
        assert self.ledger.free_pages >= free

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def give_way(self, data: st.DataObject) -> None:
        """All but the first token count as an answer."""
        owner = self.some(data)
        tokens = self.sequences.pop(owner)
        chain = self.chain(tokens)
        tail = self.residency.tail(request(tokens[:1]), chain, len(tokens), tokens[1:])
        assert (tail is None) == (len(tokens) % GRAIN == 0)
        self.residency.let_go(0, owner, chain, awaited=True, tail=tail)
        self.left.append(tokens)

    @precondition(lambda self: self.left)
    @rule(data=st.data(), lost=st.integers(0, 3))
    def go_on(self, data: st.DataObject, lost: int) -> None:
        """A tail is in the pages of its sequence alone, which writes behind it."""
        tokens = data.draw(st.sampled_from(self.left))
        tokens = tokens[: max(1, len(tokens) - lost)]
        chain, owner = self.chain(tokens), self.next_owner
        start = cached = self.residency.cached_tokens(0, chain, len(tokens), to_compute=False)
        tail = self.residency.find_tail(request(tokens[:1]), chain, len(tokens), tokens[1:])
        name = b""
        if tail is not None and cached == tail.start and self.residency.pages(0, tail.name):
            name, start = tail.name, len(tokens)
        wanted = pages_for(len(tokens) + 1, PAGE_SIZE)
        got = self.residency.reserve(0, owner, chain, cached, wanted, name)
        if got is None:
            return
        assert len(got) == wanted and not (name and self.residency.pages(0, name))
        for index in range(pages_for(start, PAGE_SIZE)):
            due = tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            assert self.holds[got[index]][: len(due)] == due
        self.sequences[owner] = tokens
        self.next_owner += 1
        self.write(owner, start)

    @rule()
    def clear(self) -> None:
        self.residency.clear()
        self.left.clear()
        assert len([*self.ledger.idle()]) == 0

    @invariant()
    def free_held_and_kept_pages_are_all_pages(self) -> None:
        held = {page for owner in self.ledger.owners() for page in self.ledger.pages(owner)}
        assert self.ledger.free_pages + len(held) == PAGES
        assert len([*self.ledger.idle()]) <= self.ledger.free_pages

    @invariant()
    def a_held_page_is_never_given_away(self) -> None:
        for owner, tokens in self.sequences.items():
            pages = self.ledger.pages(owner)
            for index in range(len(tokens) // PAGE_SIZE):
                due = tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
                assert self.holds[pages[index]] == due

    @invariant()
    def every_kept_page_has_one_name(self) -> None:
        tree = self.residency.trees[0]
        assert tree._names.keys() == self.ledger._kept
        tails = [block.pages for block in tree._blocks.values() if block.tail]
        blocks = (len(tree) - len(tails)) * GRAIN // PAGE_SIZE
        assert len(tree._names) == blocks + sum(map(len, tails))
        assert all(tree._names[page] == name for name in self.known for page in self.of(tree, name))

    @invariant()
    def a_block_holds_what_its_name_says(self) -> None:
        tree = self.residency.trees[0]
        for name, tokens in self.known.items():
            if name in tree:
                written = [token for page in tree.pages((name,)) for token in self.holds[page]]
                assert tuple(written) == tokens[-GRAIN:]

    def of(self, tree: ResidencyTree, name: bytes) -> tuple[int, ...]:
        return tree.pages((name,)) if name in tree else ()

    def teardown(self) -> None:
        for owner in list(self.sequences):
            self.residency.let_go(0, owner)
        assert self.ledger.free_pages == PAGES


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=40)


def keep(residency: Residency, owner: int, tokens: tuple[int, ...]) -> None:
    chain = residency.chain(request(), tokens)
    assert residency.reserve(0, owner, chain, 0, pages_for(len(tokens), PAGE_SIZE)) is not None
    residency.let_go(0, owner, chain)


def cached(residency: Residency, tokens: tuple[int, ...]) -> int:
    return residency.cached_tokens(0, residency.chain(request(), tokens), len(tokens), False)


def test_what_was_used_longest_ago_goes_first_and_of_a_chain_its_end() -> None:
    residency = Residency([PageLedger(8)], PAGE_SIZE, NAMES)
    first, second = (1,) * 2 * GRAIN, (2,) * 2 * GRAIN
    keep(residency, 1, first)
    keep(residency, 2, second)
    chain = residency.chain(request(), first)
    assert residency.reserve(0, 3, chain, len(first), 4) is not None
    residency.let_go(0, 3, chain)  # used last
    assert residency.reserve(0, 4, (), 0, 1) is not None
    assert (cached(residency, first), cached(residency, second)) == (2 * GRAIN, GRAIN)
    assert residency.reserve(0, 5, (), 0, 3) is not None
    assert (cached(residency, first), cached(residency, second)) == (2 * GRAIN, 0)
    assert residency.evicted_blocks == 2


def test_a_hit_leaves_one_token_to_compute_and_begins_on_the_grid() -> None:
    names = BlockNames(b"", "m", GRAIN, grid_tokens=3 * GRAIN)
    residency = Residency([PageLedger(64)], PAGE_SIZE, names)
    tokens = tuple(range(7 * GRAIN))
    keep(residency, 1, tokens)
    chain = residency.chain(request(), tokens)
    assert residency.cached_tokens(0, chain, len(tokens), to_compute=False) == 7 * GRAIN
    assert residency.cached_tokens(0, chain, len(tokens) - 1, to_compute=False) == 6 * GRAIN
    assert residency.cached_tokens(0, chain, len(tokens) - 1, to_compute=True) == 6 * GRAIN
    assert residency.cached_tokens(0, chain, 6 * GRAIN - 1, to_compute=True) == 3 * GRAIN


def test_a_hold_keeps_blocks_until_it_is_released_or_their_pages_are_needed() -> None:
    residency = Residency([PageLedger(PAGES)], PAGE_SIZE, NAMES)
    ledger = residency._ledgers[0]
    for owner, token in ((1, 1), (2, 2)):
        keep(residency, owner, (token,) * GRAIN)
    chains = [residency.chain(request(), (token,) * GRAIN) for token in (1, 2)]
    (first, _), (second, pages) = (residency.hold(0, chain) for chain in chains)
    assert ledger.free_pages == PAGES - 4
    assert residency.release_newest(0) == second and ledger.free_pages == PAGES - 2
    assert ledger.pages(first) and residency.pages(0, chains[1][0]) == pages
    residency.release(first)
    residency.release(first)  # which changes nothing
    assert residency.release_newest(0) is None and ledger.free_pages == PAGES


def test_blocks_of_a_preempted_sequence_are_awaited_until_they_are_used_or_gone() -> None:
    residency = Residency([PageLedger(PAGES)], PAGE_SIZE, NAMES)
    chain = residency.chain(request(), tuple(range(3 * GRAIN)))
    residency.reserve(0, 1, (), 0, 6)
    residency.let_go(0, 1, chain, awaited=True)
    residency.reserve(0, 2, chain, GRAIN, PAGES - 2)  # uses one block and evicts another
    assert [(one.name, one.awaited) for one in residency.take_evicted()] == [(chain[2], True)]
    assert not residency.take_evicted()
    residency.let_go(0, 2, chain[:1])
    residency.reserve(0, 3, (), 0, PAGES)
    evicted = {one.name: one.awaited for one in residency.take_evicted()}
    assert evicted == {chain[1]: True, chain[0]: False}


def test_what_a_reset_drops_is_not_copied_though_it_was_evicted_just_before() -> None:
    residency = Residency([PageLedger(PAGES)], PAGE_SIZE, NAMES)
    keep(residency, 1, (1,) * GRAIN)
    residency.reserve(0, 2, (), 0, PAGES)
    residency.clear()
    assert not residency.take_evicted()


def test_reset_forgets_all_and_takes_nothing_from_those_who_run() -> None:
    residency = Residency([PageLedger(8)], PAGE_SIZE, NAMES)
    tokens = (1,) * 2 * GRAIN
    keep(residency, 1, tokens)
    chain = residency.chain(request(), tokens)
    pages = residency.reserve(0, 2, chain, len(tokens), 4)
    assert residency.clear() == 2
    assert residency._ledgers[0].pages(2) == pages
    assert cached(residency, tokens) == 0
    residency.let_go(0, 2)
    assert residency._ledgers[0].free_pages == 8


def test_a_page_size_that_does_not_divide_the_grain_makes_larger_blocks() -> None:
    residency = Residency([PageLedger(8)], 24, NAMES)
    assert residency.block_tokens == math.lcm(24, GRAIN) == 48
    tokens = tuple(range(100))
    whole = NAMES.chain(request(), tokens, GRAIN)
    assert residency.chain(request(), tokens) == (whole[2], whole[5])


tokens_of = st.lists(st.integers(0, 2**32 - 1), min_size=2 * GRAIN, max_size=3 * GRAIN).map(tuple)
texts = st.text("ab", max_size=2)  # few, so that many are alike and many joined are


@given_examples(25, 100, tokens_of, texts, texts, texts, texts)
def test_namespaces_never_meet(
    tokens: tuple[int, ...], tenant: str, scope: str, other_tenant: str, other_scope: str
) -> None:
    ours = set(NAMES.chain(request(tenant=tenant, scope=scope), tokens, GRAIN))
    theirs = NAMES.chain(request(tenant=other_tenant, scope=other_scope), tokens, GRAIN)
    same = (tenant, scope) == (other_tenant, other_scope)
    assert ours == set(theirs) if same else ours.isdisjoint(theirs)
    assert all(len(name) == 32 for name in ours)
    for other in (BlockNames(b"other", "model", GRAIN), BlockNames(b"secret", "model2", GRAIN)):
        again = other.chain(request(tenant=tenant, scope=scope), tokens, GRAIN)
        assert ours.isdisjoint(again)


def test_names_differ_by_the_content_of_an_adapter_and_by_the_weights_and_not_by_their_names() -> (
    None
):
    plain, tokens = request(), tuple(range(2 * GRAIN))
    first = replace(plain, adapter=Adapter("mine", "/one", "d1"))
    second = replace(plain, adapter=Adapter("mine", "/one", "d2"))
    same = replace(plain, adapter=Adapter("other", "/two", "d1"))
    found = [set(NAMES.chain(one, tokens, GRAIN)) for one in (plain, first, second)]
    found.append(set(replace(NAMES, weights="1@f00").chain(plain, tokens, GRAIN)))
    found.append(set(replace(NAMES, weights="2@f00").chain(plain, tokens, GRAIN)))
    assert len(set().union(*found)) == sum(map(len, found)) == 10
    assert set(NAMES.chain(same, tokens, GRAIN)) == found[1]


def test_a_name_is_the_keyed_hash_of_all_that_lies_before() -> None:
    """Worked out here by hand, so that a change of the names is seen."""
    tokens = tuple(range(2 * GRAIN))
    root = blake2b(key=b"secret", digest_size=32, person=b"jdisagg kv")
    for part in (b"model", b"16", b"acme", b"team"):
        root.update(len(part).to_bytes(8, "little") + part)
    link, due = root.digest(), []
    for block in (tokens[:GRAIN], tokens[GRAIN:]):
        data = b"".join(token.to_bytes(4, "little") for token in block)
        link = blake2b(data, key=link, digest_size=32).digest()
        due.append(link)
    assert NAMES.chain(request(tenant="acme", scope="team"), tokens, GRAIN) == tuple(due)


@given(st.integers(0, 40), st.integers(1, 30), st.integers(0, 100), st.integers(0, 3))
def test_a_block_is_named_by_the_images_in_it(
    start: int, length: int, cut: int, known: int
) -> None:
    """Of prompts with equal tokens, names are equal up to the first block with another image."""
    tokens = (1,) * 80

    def chain(pixels: bytes | None, at: int = start) -> Chain:
        images = () if pixels is None else (PromptImage.of(at, length, (1, 2, 2), pixels),)
        return NAMES.chain(replace(request(tokens), images=images), tokens, GRAIN)

    one = chain(b"a")
    same = chain(b"a")
    other = chain(b"b")
    text = chain(None)
    later = chain(b"a", start + 1)
    assert one == same
    before = start // GRAIN
    for different in (other, text, later):
        assert one[:before] == different[:before]
        assert not set(one[before:]) & set(different[before:])
    images = (PromptImage.of(start, length, (1, 2, 2), b"a"),)
    of_part = NAMES.chain(replace(request(tokens), images=images), tokens[:cut], GRAIN, one[:known])
    assert of_part == one[: min(cut, 80) // GRAIN]


def test_a_grain_that_a_hand_off_cannot_begin_at_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefix\.grain_tokens must be a multiple of 16"):
        PrefixConfig(grain_tokens=24)
    with pytest.raises(ConfigError, match=r"multiple of prefix\.grain_tokens=32, got 48"):
        PrefixConfig(grain_tokens=32, grid_tokens=48)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"reuse": False, "host_gib": 1.0, "disk_dir": "/kv", "disk_gib": 1.0},
            "prefix.disk_gib=1.0 needs reuse .*, got False",
        ),
        ({"reuse": True, "host_gib": -1.0}, "prefix.host_gib must not be negative, got -1"),
        ({"reuse": True, "host_gib": math.nan}, "prefix.host_gib must be a finite number, got nan"),
        ({"reuse": True, "restores": "never"}, "must be one of priced, always, got 'never'"),
    ],
)
def test_host_memory_that_makes_no_sense_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefixConfig(**fields)  # type: ignore[arg-type]


def test_a_server_without_prefill_workers_keeps_nothing_on_disk() -> None:
    kept = PrefixConfig(True, host_gib=1.0, disk_dir="/kv", disk_gib=1.0)
    with pytest.raises(ConfigError, match="mode=chunked has none"):
        EngineConfig(mode=Mode.CHUNKED, prefix=kept)


def test_a_page_that_nobody_holds_is_not_kept() -> None:
    ledger = PageLedger(2)
    with pytest.raises(LedgerError, match="has no owner"):
        ledger.keep(0)
    with pytest.raises(LedgerError, match="are not kept"):
        ledger.adopt(1, (0,))


def test_without_names_nothing_stays() -> None:
    residency = Residency([PageLedger(4)], PAGE_SIZE)
    assert not residency.on and residency.chain(request(), (1,) * 64) == ()
    assert residency.reserve(0, 1, (), 0, 4) is not None
    residency.let_go(0, 1)
    assert residency.clear() == 0


def test_awaited_blocks_are_passed_over_once_when_others_could_be_evicted() -> None:
    residency = Residency([PageLedger(6)], PAGE_SIZE, NAMES)
    chains = [residency.chain(request(), (token,) * GRAIN) for token in (1, 2, 3)]
    for owner, chain in enumerate(chains, 1):
        residency.reserve(0, owner, (), 0, 2)
        residency.let_go(0, owner, chain, awaited=owner == 1)
    order = []
    for owner in (7, 8, 9):
        residency.reserve(0, owner, (), 0, 2)
        order += [one.name for one in residency.take_evicted()]
    assert order == [chains[1][0], chains[2][0], chains[0][0]], "the awaited one is the oldest"
