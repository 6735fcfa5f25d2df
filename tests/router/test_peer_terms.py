"""What a prefill worker fetches instead of computing it, against the definition worked out worker
by worker."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from jdisagg.costs.speeds import speed_of
from jdisagg.router.accounts import Work
from jdisagg.router.cost_terms import CHUNKS_ISSUED
from jdisagg.router.decision import PlacementPolicy, PlacementQuery
from tests.router.decisions import closeness, decision
from tests.router.fleets import H100, M, decode_status, prefill_status, random_fleet, state_of

FETCH = PlacementPolicy(hold_seconds=1e9, peer_fetch=True)
ALONE = replace(FETCH, peer_fetch=False)
RETURN = replace(FETCH, fetch_from_decode=True)
ASK = PlacementQuery(Work(8000, expected_tokens=100))


def test_an_idle_worker_fetches_what_a_busy_one_knows() -> None:
    state = state_of(prefill_status("p0", 60_000), prefill_status("p1"), decode_status("d0"))
    query = replace(ASK, cached={"p0": 7680})
    chosen = decision(state, query, FETCH)
    assert (chosen.prefill, chosen.peer, chosen.peer_tokens) == ("p1", "p0", 7680)
    assert chosen.cached_tokens == 0 and chosen.kind == "prefix"
    assert "fetches 7680 tokens from p0" in chosen.reason
    without = decision(state, query, ALONE)
    assert without.peer == "" and chosen.ttft_seconds is not None
    assert without.ttft_seconds is not None and chosen.ttft_seconds < without.ttft_seconds


def test_who_knows_it_itself_fetches_nothing() -> None:
    state = state_of(prefill_status("p0"), prefill_status("p1"), decode_status("d0"))
    chosen = decision(state, replace(ASK, cached={"p0": 7680}), FETCH)
    assert (chosen.prefill, chosen.cached_tokens, chosen.peer) == ("p0", 7680, "")


def test_over_a_slow_link_it_is_computed() -> None:
    fast = replace(FETCH, far=replace(FETCH.far, bytes_per_second=1e11))
    slow = replace(FETCH, far=replace(FETCH.far, bytes_per_second=1e6))
    state = state_of(
        prefill_status("p0", 60_000), prefill_status("p1"), decode_status("d0"), place=""
    )
    query = replace(ASK, cached={"p0": 7680})
    assert decision(state, query, fast).peer == "p0"
    assert decision(state, query, slow).peer == ""


def test_a_worker_that_failed_the_attempt_is_not_asked() -> None:
    state = state_of(
        prefill_status("p0", 60_000), prefill_status("p1"), prefill_status("p2", 50_000),
        decode_status("d0"),
    )  # fmt: skip
    query = replace(ASK, cached={"p0": 7680, "p2": 7424}, avoid=frozenset({"p0"}))
    chosen = decision(state, query, FETCH)
    assert (chosen.prefill, chosen.peer, chosen.peer_tokens) == ("p1", "p2", 7424)


def test_the_one_prefill_worker_fetches_what_a_decode_worker_knows_of_the_last_turn() -> None:
    state = state_of(prefill_status("p0"), decode_status("d0"), decode_status("d1"))
    query = replace(ASK, cached={"p0": 2048, "d1": 7680})
    chosen = decision(state, query, RETURN)
    assert (chosen.prefill, chosen.peer, chosen.peer_tokens) == ("p0", "d1", 7680)
    assert chosen.decode == "d1", "to which the least is sent"
    assert chosen.cached_tokens == 2048 and "fetches 5632 tokens from d1" in chosen.reason
    without = decision(state, query, FETCH)
    assert without.peer == "" and chosen.ttft_seconds is not None
    assert without.ttft_seconds is not None and chosen.ttft_seconds < without.ttft_seconds
    assert decision(state, replace(query, cached={"p0": 7680, "d1": 7680}), RETURN).peer == ""


def test_a_mixed_worker_fetches_what_a_busier_one_knows() -> None:
    busy = decode_status("m0", (200,), (60_000,), free=(0,), waiting=99, role=M)
    state = state_of(busy, decode_status("m1", role=M))
    query = replace(ASK, cached={"m0": 1024})
    chosen = decision(state, query, RETURN)
    assert (chosen.prefill, chosen.decode) == (None, "m1")
    assert (chosen.peer, chosen.peer_tokens) == ("m0", 1024)
    assert decision(state, query, FETCH).peer == "", "only prefill workers may be asked"


def test_of_decode_workers_that_know_as_much_the_one_with_the_shorter_steps_is_asked() -> None:
    state = state_of(
        prefill_status("p0"), decode_status("d0", (40,), (200_000,), free=(4096,)),
        decode_status("d1", (4,), (2_000,)), decode_status("d2", (9,), (50_000,), free=(4096,)),
    )  # fmt: skip
    known = {"d0": 7680, "d1": 7680, "d2": 7680}
    assert decision(state, replace(ASK, cached=known), RETURN).peer == "d1"
    assert decision(state, replace(ASK, cached={**known, "d2": 7808}), RETURN).peer == "d2"
    failed = replace(ASK, cached=known, avoid=frozenset({"d1"}))
    assert decision(state, failed, RETURN).peer == "d2"


def test_what_a_prefill_worker_knows_as_well_is_fetched_from_the_cheaper() -> None:
    busy, idle = prefill_status("p0", 60_000), prefill_status("p1")
    decodes = decode_status("d0"), decode_status("d1", (60,), (400_000,), free=(4096,))
    query = replace(ASK, cached={"p0": 7680, "d0": 7680})
    assert decision(state_of(busy, idle, *decodes), query, RETURN).peer == "d0"
    query = replace(ASK, cached={"p0": 7680, "d1": 2048})
    assert decision(state_of(busy, idle, *decodes), query, RETURN).peer == "p0"


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_least_of_computing_and_fetching_is_weighed_for_each_worker(
    seed: int, returns: bool
) -> None:
    accounts = random_fleet(seed, prefills=6, decodes=3)
    state = accounts.state
    for status in state.statuses():
        more = status.name[0] == "p"
        status = msgspec.structs.replace(status, can_prefill=more)
        if not more:  # nothing runs there
            nothing = (0,) * len(status.rank_sequences)
            status = msgspec.structs.replace(
                status, running=0, waiting=0, free_pages=status.total_pages,
                rank_sequences=nothing, rank_contexts=nothing,
            )  # fmt: skip
        accounts.heard(status, 0.0)
    statuses = {status.name: status for status in state.statuses()}
    names = [name for name in statuses if name[0] == "p"]
    draw = np.random.default_rng(seed)
    cached = {name: int(draw.integers(0, 60)) * 128 for name in names[:4]}
    if returns:
        cached["d1"] = int(draw.integers(20, 61)) * 128
    work = Work(7900, expected_tokens=10)
    query = PlacementQuery(work, cached)
    policy = replace(RETURN if returns else FETCH, decode_first=False)

    def queue(name: str) -> float:
        speed, said = speed_of(state.description(name).kind or H100), statuses[name]
        assert speed is not None
        per_token, per_pair = speed.backlog_rates(said.chunk_tokens)
        return said.queued_tokens * per_token + said.queued_pairs * per_pair

    def issued(name: str) -> float:
        """Of a mesh at work, until what it has issued is done."""
        speed, chunk = speed_of(state.description(name).kind or H100), statuses[name].chunk_tokens
        assert speed is not None
        return min(queue(name), CHUNKS_ISSUED * speed.backlog_rates(chunk)[0] * chunk)

    def price(name: str, source: str) -> tuple[float, str]:
        """Seconds to its first token where it fetches from there, or from nobody."""
        description = state.description(name)
        said = statuses[name]
        theirs = state.description(source)
        assert description.kind is not None and theirs.kind is not None
        speed, sending = speed_of(description.kind), speed_of(theirs.kind)
        assert speed is not None and sending is not None
        own, most = cached.get(name, 0), min(cached[source], work.tokens - 1)
        computing = speed.prefill_seconds(work.tokens - own, own, said.chunk_tokens)
        hardware = theirs.kind.hardware
        assert hardware is not None
        links = (policy.far, hardware.scale_out, hardware.host, *[hardware.scale_up] * 2)
        link = links[closeness(theirs.place, description.place)]
        lanes = min(description.kind.layout.tp, theirs.kind.layout.tp)
        moving = (
            (issued(source) if source[0] == "p" else 0.0)
            + issued(name)
            + link.seconds((most - own) * sending.wire_bytes_per_token / lanes)
        )
        rest = speed.prefill_seconds(work.tokens - most, most, said.chunk_tokens)
        fetching = rest + max(0.0, moving - queue(name))
        if own >= most or computing <= fetching:
            return queue(name) + computing, ""
        return queue(name) + fetching, source

    most = max(tokens for name, tokens in cached.items() if name[0] == "p")
    holder = min([name for name in names if cached.get(name) == most], key=queue)
    sources = (holder, "d1") if returns else (holder,)
    firsts = {name: min(price(name, source) for source in sources) for name in names}
    chosen = decision(state, query, policy)
    assert chosen.prefill is not None and chosen.ttft_seconds is not None
    seconds, source = firsts[chosen.prefill]
    assert chosen.ttft_seconds == pytest.approx(seconds, rel=0.06)  # chunks are read from a grid
    # or both cost as much, as far as that grid tells
    asked = {
        said: price(chosen.prefill, said)[0] for said in sources if price(chosen.prefill, said)[1]
    }
    assert chosen.peer == source or asked[chosen.peer] == pytest.approx(seconds, rel=0.06)
