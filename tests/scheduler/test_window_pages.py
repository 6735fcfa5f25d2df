"""Pages of sliding-window layers on a mesh that prefills, against a plain record of what each page
holds."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from jdisagg.layout.kv_spec import KVSpec, ring_pages
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import PageLedger, pages_for
from jdisagg.scheduler.residency import BlockNames, Residency
from jdisagg.scheduler.window_pages import WindowPages, WindowSnapshots
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import toy_limits
from tests.lanes import first_quick

PAGE, BLOCK, WINDOW, CHUNK, LONGEST = 4, 8, 10, 16, 120
SPEC = KVSpec.attention(2, 1, 8, "float32", (WINDOW, None))


def limits(pages: int, snapshots: bool = True) -> MeshLimits:
    return replace(
        toy_limits(page_size=PAGE, context_tokens=LONGEST, chunk_buckets=(CHUNK,)),
        kv_spec=SPEC,
        windows_apart=True,
        window_pages_per_rank=pages,
        snapshot_tokens=BLOCK if snapshots else 0,
    )


class Held:
    """What each page holds: prompt (of a prefix) and column, as computed chunk by chunk."""

    def __init__(self, pages: int) -> None:
        self.windows = WindowPages(limits(pages))
        self.snapshots = WindowSnapshots(self.windows)
        names = BlockNames(b"secret", "toy", BLOCK)
        self.kept = Residency([PageLedger(400)], PAGE, names, [self.snapshots])
        self.held: dict[int, tuple[int, ...]] = {}

    def begin(self, owner: int, tokens: tuple[int, ...]) -> int | None:
        """Gives a prompt its pages; None without room. Checks the window that it continues from."""
        kept, windows = self.kept, self.windows
        if windows.needed(len(tokens)) > windows.available:
            return None
        chain = kept.chain(toy_request(0), tokens)
        cached = kept.cached_tokens(0, chain, len(tokens) - 1, to_compute=True)
        assert kept.reserve(0, owner, chain, cached, pages_for(len(tokens), PAGE)) is not None
        wanted = kept.wanted_snapshots(0, chain, len(tokens), cached)
        window = kept.use_snapshot(0, chain, cached) if cached else ()
        before, needed = windows.available, windows.needed(len(tokens))
        windows.begin(owner, len(tokens), cached, window, wanted)
        assert windows.available >= min(before - needed, windows.total // 2)
        for at in wanted:
            kept.begin_snapshot(0, owner, at)
        kept.begin_all_snapshots(0, owner, cached, len(tokens))
        return cached

    def compute(self, owner: int, tokens: tuple[int, ...], start: int) -> int:
        """Writes a chunk's pages, then reads every page that its queries attend to."""
        end, table = min(len(tokens), start + CHUNK), self.windows.table(owner)
        for column in range(start // PAGE, pages_for(end, PAGE)):
            self.held[table[column]] = tokens[: (column + 1) * PAGE]
        for column in range(max(0, start - WINDOW + 1) // PAGE, pages_for(end, PAGE)):
            assert self.held[table[column]] == tokens[: (column + 1) * PAGE]
        return end

    def end(self, owner: int, tokens: tuple[int, ...], whole: bool = True) -> None:
        chain = self.kept.chain(toy_request(0), tokens) if whole else ()
        self.kept.let_go(0, owner, chain)

    def check(self) -> None:
        """The kept windows hold the tokens that their names say."""
        for name in self.snapshots:
            tokens, table = self.snapshots.tokens(name), self.snapshots.place(name)
            for column in range(max(0, tokens - WINDOW + 1) // PAGE, tokens // PAGE):
                prefix = self.held[table[column]]
                assert len(prefix) == (column + 1) * PAGE
            chain = self.kept.chain(toy_request(0), self.held[table[-1]])
            assert chain[-1] == name


def storm(pages: int, check: Callable[[Held], None]) -> Held:
    """Random prompts that share beginnings, computed a chunk at a time in random order."""
    run, rng = Held(pages), random.Random(pages)
    live: dict[int, tuple[tuple[int, ...], int]] = {}
    hits = repeats = 0
    for owner in range(1, 400):
        tokens = tuple([rng.randrange(2) for _ in range(3)])
        tokens = tuple(one for one in tokens for _ in range(rng.choice((9, 16, 33))))
        tokens += (owner,) * rng.randrange(1, LONGEST - len(tokens))
        cached = run.begin(owner, tokens)
        if cached is not None:
            live[owner] = tokens, cached
            hits, repeats = hits + (cached > 0), repeats + run.windows.repeats(owner)
        while live and (len(live) > 3 or cached is None or rng.random() < 0.6):
            one = rng.choice(list(live))
            tokens, at = live[one]
            if rng.random() < 0.05:
                run.end(one, tokens, whole=False)
                del live[one]
            elif at < len(tokens):
                live[one] = tokens, run.compute(one, tokens, at)
            else:
                run.end(one, tokens)
                del live[one]
                cached = 0
            check(run)
    for owner, (tokens, _) in live.items():
        run.end(owner, tokens, whole=False)
    assert hits > 50
    assert (repeats > 50) == (pages < 400)
    return run


STORMS = pytest.mark.parametrize(("pages",), first_quick([(40,), (90,), (400,)], ci=2))


@STORMS
def test_no_page_is_repeated_that_a_query_still_reads(pages: int) -> None:
    storm(pages, lambda _: None)  # each chunk reads what its queries attend to


@STORMS
def test_a_kept_window_is_never_overwritten(pages: int) -> None:
    storm(pages, Held.check)


@STORMS
def test_free_used_and_kept_pages_are_all_pages(pages: int) -> None:
    def check(run: Held) -> None:
        windows = run.windows
        used, kept = windows.total - windows.available, windows.kept_pages
        assert max(used, kept) <= windows.total - windows.free_pages <= used + kept

    run = storm(pages, check)
    assert run.windows.available == run.windows.total
    assert run.windows.free_pages + run.windows.kept_pages == run.windows.total
    run.kept.clear()
    assert run.windows.free_pages == run.windows.total and not run.windows.kept_pages


def test_with_room_a_prompt_continues_from_any_block_of_an_earlier_one() -> None:
    run, first = Held(400), tuple(range(64))
    run.begin(1, first)
    for start in range(0, 64, CHUNK):
        run.compute(1, first, start)
    run.end(1, first)
    for at in range(BLOCK, 64, BLOCK):
        assert run.begin(at, (*first[:at], 999)) == at
        run.end(at, (), whole=False)


def test_without_room_the_end_and_the_branch_of_prompts_stay() -> None:
    """The first prompt repeats pages, so that a second one that leaves it in its middle computes
    all. The second keeps the window at the branch, from which the third continues."""
    run = Held(24)
    common = tuple(range(64))
    first, second, third = (common + (mark,) * 40 for mark in (1, 2, 3))
    found = []
    for owner, tokens in enumerate((first, first, second, third), 1):
        cached = run.begin(owner, tokens)
        assert cached is not None
        found.append(cached)
        if cached == 0:
            assert run.windows.repeats(owner)
        for start in range(cached, len(tokens), CHUNK):
            run.compute(owner, tokens, start)
        run.end(owner, tokens)
        run.check()
    assert found == [0, 96, 0, 64]


def test_a_prompt_needs_pages_for_chunks_and_windows_however_long_it_is() -> None:
    few = ring_pages(WINDOW + CHUNK - 1, PAGE)
    assert WindowPages(limits(100, snapshots=False)).needed(LONGEST) == few
    assert WindowPages(limits(100)).needed(LONGEST) == few + 3 * ring_pages(WINDOW, PAGE)
    assert WindowPages(limits(100)).needed(9) == 3


def test_a_restored_window_takes_the_pages_of_its_window_alone() -> None:
    run = Held(12)
    place = run.snapshots.begin_restore(-1, 64)
    assert place is not None and len(place) == 16
    assert run.windows.total - run.windows.available == 16 - (64 - WINDOW + 1) // PAGE
    shorter = run.snapshots.begin_restore(-1, 8)
    assert shorter is not None and len(shorter) == 2 and run.windows.available == 10
    run.kept.settle_snapshots(0, -1)
    assert run.windows.available == 12 and not len(run.snapshots)
