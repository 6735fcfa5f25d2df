"""Slots of snapshots: which are kept, and for how long."""

import random

from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.scheduler.residency import BlockNames, Residency
from jdisagg.scheduler.snapshots import Snapshots, wanted_snapshots
from tests.fakes.cluster import toy_request

SLOTS, BLOCK = 4, 16


def kept_of(pages: int, slots: int = SLOTS) -> tuple[Residency, Snapshots]:
    snapshots = Snapshots(10, slots)
    names = BlockNames(b"secret", "toy", BLOCK)
    return Residency([PageLedger(pages)], BLOCK, names, [snapshots]), snapshots


def run(kept: Residency, owner: int, tokens: tuple[int, ...], *boundaries: int) -> int:
    """A sequence that makes snapshots there and ends. Returns how much of it was cached."""
    chain = kept.chain(toy_request(0), tokens)
    cached = kept.cached_tokens(0, chain, len(tokens) - 1, to_compute=True)
    assert kept.reserve(0, owner, chain, cached, -(-len(tokens) // BLOCK)) is not None
    if cached:
        kept.use_snapshot(0, chain, cached)
    for at in boundaries:
        if at > cached:
            kept.begin_snapshot(0, owner, at)
    kept.let_go(0, owner, chain)
    return cached


def test_free_pending_and_kept_slots_are_all_slots() -> None:
    kept, snapshots = kept_of(12)
    rng, live = random.Random(3), dict[int, tuple[int, ...]]()
    for owner in range(400):
        tokens = tuple([rng.randrange(2) for _ in range(4)]) * 12
        chain = kept.chain(toy_request(0), tokens)
        if kept.reserve(0, owner, chain, 0, len(tokens) // BLOCK) is not None:
            live[owner] = tokens
            for at in rng.sample((16, 32, 48), 2):
                slot = kept.begin_snapshot(0, owner, at, rolling=rng.random() < 0.5)
                assert slot is None or 10 <= slot < 10 + SLOTS
        while len(live) > 3 or (live and rng.random() < 0.3):
            ended = rng.choice(list(live))
            chain = kept.chain(toy_request(0), live.pop(ended))
            kept.let_go(0, ended, chain if rng.random() < 0.8 else ())
        assert snapshots.free + snapshots.pending + len(snapshots) == snapshots.total
        assert all(name in kept.trees[0] for name in snapshots)
        if rng.random() < 0.01:
            kept.clear()
            assert not len(snapshots)
    assert snapshots.made > 10 and snapshots.evicted > 10


def test_a_snapshot_never_outlives_its_block() -> None:
    kept, snapshots = kept_of(pages=4)
    first = tuple(range(40))
    assert run(kept, 1, first, 32) == 0
    assert run(kept, 2, first) == 32 and len(snapshots) == 1
    run(kept, 3, tuple(range(100, 164)))
    assert len(snapshots) == 0 and snapshots.free == SLOTS
    assert run(kept, 4, first) == 0


def test_blocks_without_a_snapshot_are_no_hit_for_a_mesh_that_computes() -> None:
    kept, _ = kept_of(pages=16)
    tokens = tuple(range(70))
    run(kept, 1, tokens, 32)
    chain = kept.chain(toy_request(0), tokens)
    assert kept.cached_tokens(0, chain, 69, to_compute=True) == 32
    assert kept.cached_tokens(0, chain, 69, to_compute=False) == 64
    assert kept.wanted_snapshots(0, chain, 70, 32) == (64,)
    assert kept.wanted_snapshots(0, chain, 48, 32) == ()


def test_what_saves_more_stays_longer() -> None:
    """A used prefix stays, however many others come once; an unused one goes, however long."""
    kept, snapshots = kept_of(pages=1000)
    often, long = tuple(range(33)), tuple(range(500, 900))
    run(kept, 1, often, 32)
    run(kept, 2, long, 384)
    for number in range(60):
        run(kept, 10 + number, (number, *range(1000, 1040)), 32)
        assert run(kept, 100 + number, often, 32) == 32
    assert run(kept, 3, long) == 0
    assert len(snapshots) == SLOTS


def test_a_rolling_snapshot_takes_one_slot() -> None:
    snapshots = Snapshots(0, 3)
    first = snapshots.begin(1, 16)
    rolling = snapshots.begin(1, 32, rolling=True)
    assert snapshots.begin(1, 48, rolling=True) == rolling != first
    assert snapshots.begin(2, 16) is not None
    assert snapshots.begin(2, 32) is None, "all are pending"
    snapshots.settle(2, {}.get)
    assert snapshots.free == 1
    snapshots.begin(3, 16)
    snapshots.settle(1, {16: b"a", 48: b"b"}.get)
    assert set(snapshots) == {b"a", b"b"}
    assert snapshots.begin(2, 16) == first, "that of fewer tokens goes"


def test_a_prompt_wants_a_snapshot_at_its_last_whole_block_and_where_it_branches_off() -> None:
    assert wanted_snapshots(100, 0, 0, 16) == (96,)
    assert wanted_snapshots(96, 0, 0, 16) == (80,), "one token at least is computed"
    assert wanted_snapshots(100, 16, 64, 16) == (64, 96)
    assert wanted_snapshots(100, 96, 96, 16) == ()
    assert wanted_snapshots(100, 0, 96, 16) == (96,)
    assert wanted_snapshots(100, 0, 48, 32) == (32, 96)
    assert wanted_snapshots(10, 0, 0, 16) == ()


def test_an_answer_takes_the_slot_of_its_prompt_where_half_of_the_slots_are_pending() -> None:
    snapshots = Snapshots(0, 4)
    first = snapshots.begin(1, 16)
    assert snapshots.begin(1, 32, rolling=True) != first
    second = snapshots.begin(2, 16)
    assert snapshots.begin(2, 32, rolling=True) == second
    assert snapshots.pending == 3
