"""The prefix cache in the simulator: the live policy on simulated meshes against a dictionary of
all blocks ever seen, and the gain of a hit."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jdisagg.config import PrefixConfig
from jdisagg.errors import ConfigError
from jdisagg.request import Request
from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.faults import Cancels, Death, schedule
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.host_memory import HostLink, HostMemory
from jdisagg.simulator.prompt_names import PromptBook, PromptNames
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival
from tests.simulator.fleets import small_fleet

BLOCK = 512
REUSE = PrefixConfig(reuse=True)


def fleet_of(
    pages: int, prefix: PrefixConfig = REUSE, prefills: int = 1, decodes: int = 1
) -> Fleet:
    fleet = small_fleet(pages=pages)
    assert fleet.prefill is not None
    return replace(
        fleet,
        prefill=replace(fleet.prefill, count=prefills),
        decode=replace(fleet.decode, count=decodes),
        prefix=prefix,
    )


def conversations(count: int, every: float, seed: int = 0) -> list[Arrival]:
    """Returns prompts of one to four blocks, some with a prefix of earlier ones."""
    chance = random.Random(seed)
    seen: list[tuple[int, ...]] = [()]
    fresh = iter(range(1, 10**6))
    found = []
    for number in range(count):
        before = chance.choice(seen)[:3]
        blocks = (*before, *(next(fresh) for _ in range(chance.randint(1, 4 - len(before)))))
        seen.append(blocks)
        last = chance.choice([1, 200, BLOCK])
        tokens = BLOCK * (len(blocks) - 1) + last
        found.append(Arrival(every * number, tokens, chance.randint(2, 30), blocks))
    return found


def known_to_all(arrivals: Sequence[Arrival], grain: int) -> int:
    """Returns the tokens that an unbounded cache would hit, request by request: whole blocks in the
    same order as before, with at least one token left to compute."""
    seen: dict[tuple[int, ...], int] = {}
    total = 0
    for one in arrivals:
        known = 0
        for end in range(1, len(one.block_hashes) + 1):
            here = min(BLOCK, one.prompt_tokens - BLOCK * (end - 1))
            most = seen.get(one.block_hashes[:end], 0)
            known += min(here, most)
            if known < BLOCK * end:
                break
        total += min(known, one.prompt_tokens - 1) // grain * grain
        for end in range(1, len(one.block_hashes) + 1):
            here = min(BLOCK, one.prompt_tokens - BLOCK * (end - 1)) // grain * grain
            name = one.block_hashes[:end]
            seen[name] = max(seen.get(name, 0), here)
    return total


@pytest.mark.parametrize("grain", [128, 512])
def test_with_room_for_all_hits_are_those_of_a_dictionary_of_all_that_was_seen(grain: int) -> None:
    arrivals = conversations(60, every=5.0)
    result = simulate(fleet_of(4096, replace(REUSE, grain_tokens=grain)), arrivals)
    asked = sum(one.prompt_tokens for one in arrivals)
    assert result.counters["prefix_asked_tokens"] == asked
    assert result.counters["prefix_hit_tokens"] == known_to_all(arrivals, grain) > asked // 10
    assert result.counters["decode_prefix_hit_tokens"] >= result.counters["prefix_hit_tokens"]


def ledgers(cluster: SimulatedCluster) -> list[PageLedger]:
    found: list[PageLedger] = []
    for process in cluster.processes.values():
        found += process.worker._state.ledgers
    return found


def check_pages(ledger: PageLedger) -> None:
    held = {page for owner in ledger.owners() for page in ledger.pages(owner)}
    kept = set(ledger._idle)
    free = list(ledger._free)
    assert len(free) == len(set(free)), "no page is free twice"
    assert held.isdisjoint(kept) and held.isdisjoint(free) and kept.isdisjoint(free)
    assert len(held) + len(kept) + len(free) == ledger.total_pages


@pytest.mark.parametrize("host_gib", [0.0, 0.5])
def test_free_held_and_kept_pages_are_all_pages_at_any_time_and_whatever_fails(
    host_gib: float,
) -> None:
    looked = 0

    async def look(cluster: SimulatedCluster) -> None:
        nonlocal looked
        while True:
            await cluster.clock.sleep(0.37)
            for ledger in ledgers(cluster):
                check_pages(ledger)
                looked += 1

    faults = schedule(
        [Death("decode-1", 4.0, 3.0), Cancels(6.0, 0.5), Death("prefill-0", 9.0, 3.0)]
    )
    fleet = fleet_of(48, replace(REUSE, host_gib=host_gib), prefills=2, decodes=2)
    result = simulate(
        fleet, conversations(80, every=0.2, seed=3), hooks=[look, faults], mortal=True,
        settle_seconds=40.0,
    )  # fmt: skip
    assert looked > 100 and result.pages_lost == 0
    assert {one.end for one in result.outcomes} <= {"finished", "cancelled"}
    assert result.counters["prefix_blocks_evicted"] > 0, "pages were short"
    assert ("host_blocks_written" in result.counters) is (host_gib > 0)


def test_a_hit_is_never_slower_alone() -> None:
    """With one request at a time, first and last token come no later than without a prefix
    cache."""
    arrivals = conversations(40, every=6.0, seed=5)
    plain = simulate(fleet_of(512, PrefixConfig()), arrivals).outcomes
    for pages, decode_pages, prefix in (
        (512, 512, REUSE),
        (512, 24, REUSE),  # the decode worker soon forgets: what is known goes out of pages
        (24, 512, REUSE),
        (24, 24, replace(REUSE, host_gib=2.0)),
    ):
        fleet = fleet_of(pages, prefix)
        instance = replace(fleet.decode.instance, pages_per_rank=decode_pages)
        reused = simulate(replace(fleet, decode=replace(fleet.decode, instance=instance)), arrivals)
        assert reused.counters["prefix_hit_tokens"] > 0
        for one, other in zip(plain, reused.outcomes, strict=True):
            assert one.ttft is not None and other.ttft is not None
            # bringing back is tried before it is known what it takes
            slack = 1.05 if prefix.host_gib else 1.0
            assert other.ttft <= one.ttft * slack + 1e-9
            assert other.latency <= one.latency * slack + 1e-9


def test_copies_of_one_way_follow_one_another_at_the_links_speed() -> None:
    link = replace(small_fleet().decode.hardware.host, latency_seconds=0.5)
    host = HostMemory(HostLink(link, 2, 1000.0), ranks=2)
    seconds = 0.5 + 10 * 1000.0 / (2 * link.bytes_per_second * link.efficiency)
    assert host.copied_out(1, 0, 10, now=3.0) == pytest.approx(3.0 + seconds)
    assert host.copied_out(2, 0, 10, now=3.0) == pytest.approx(3.0 + 2 * seconds)
    assert host.copied_out(3, 1, 10, now=3.0) == pytest.approx(3.0 + seconds), "a rank of its own"
    assert host.copied_back(2, 0, now=9.0) == pytest.approx(9.0 + seconds)
    host.release((2,))
    assert host.copied_back(2, 0, now=9.0) is None and len(host) == 2


def names(grain: int, *arrivals: Arrival) -> tuple[PromptNames, list[Request]]:
    book = PromptBook(BLOCK)
    requests = []
    for number, arrival in enumerate(arrivals):
        book.add(str(number), arrival)
        requests.append(Request(str(number), (0,) * arrival.prompt_tokens, tenant=arrival.tenant))
    return PromptNames(b"secret", "model", grain, book=book), requests


@pytest.mark.parametrize("grain", [64, 512, 768, 1024])
def test_names_are_equal_as_far_as_the_workloads_are(grain: int) -> None:
    one = Arrival(0.0, 2048, 1, (1, 2, 3, 4))
    two = Arrival(0.0, 2048, 1, (1, 2, 5, 4))
    made, requests = names(grain, one, two)
    first, second = (made.chain(request, (0,) * 2048, grain) for request in requests)
    assert len(first) == len(second) == 2048 // grain
    alike = sum(a == b for a, b in zip(first, second, strict=True))
    assert alike == 1024 // grain, "behind the first that differs none is equal"
    assert len(set(first)) == len(first)


def test_answers_are_named_where_the_workload_names_them_and_tenants_never_meet() -> None:
    asked = Arrival(0.0, 600, 500, (1, 2))
    told = Arrival(0.0, 600, 500, (1, 2, 3))
    other = replace(told, tenant="b")
    made, requests = names(64, asked, told, other)
    tokens = (0,) * 1100
    first, second, third = (made.chain(request, tokens, 64) for request in requests)
    assert len(first) == len(second) == 1100 // 64
    assert first[: 600 // 64] == second[: 600 // 64]
    assert set(first[600 // 64 :]).isdisjoint(second), "an answer that the workload does not name"
    assert set(second).isdisjoint(third)
    whole = made.chain(requests[1], tokens, 64)
    assert made.chain(requests[1], tokens, 128) == whole[1::2]
    made.book.forget("1")
    assert made.chain(requests[1], tokens, 64, whole[:4]) == whole[:4]
    assert made.chain(Request("9", (0,)), tokens, 64) == ()


def test_a_simulated_disk_is_refused() -> None:
    prefix = PrefixConfig(reuse=True, host_gib=1.0, disk_dir="/nowhere", disk_gib=1.0)
    with pytest.raises(ConfigError, match="no disk"):
        fleet_of(64, prefix)


def test_preempted_sequences_find_their_blocks_again_by_the_live_workers_code() -> None:
    arrivals = [Arrival(0.001 * number, 300, 900) for number in range(12)]
    without, with_cache = (
        simulate(fleet_of(24, prefix), arrivals)
        for prefix in (PrefixConfig(), PrefixConfig(True, host_gib=2.0, append_tokens=256))
    )
    assert without.counters["preemptions"] > 0 and with_cache.counters["preemptions"] > 0
    assert with_cache.counters["answers_continued"] > 0
    assert with_cache.pages_lost == without.pages_lost == 0
    assert {one.end for one in with_cache.outcomes} == {"finished"}
    assert with_cache.seconds < without.seconds
