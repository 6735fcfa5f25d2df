"""Conversations as workloads: each turn's prompt starts with all earlier turns."""

from dataclasses import replace

import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.errors import ConfigError, WorkloadError
from jdisagg.simulator.conversations import ConversationTurns, conversations
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival, Fixed, LogNormal, mean_rate
from tests.simulator.fleets import small_fleet

LENGTHS = LogNormal(200, 0.7, 100, 0.7, longest=1000)


def by_conversation(arrivals: list[Arrival]) -> list[list[Arrival]]:
    """Groups arrivals by the name of their first block, since nothing is shared here."""
    found: dict[int, list[Arrival]] = {}
    for item in arrivals:
        found.setdefault(item.block_hashes[0], []).append(item)
    return list(found.values())


def test_a_turn_begins_with_the_one_before_and_its_answer() -> None:
    arrivals = conversations(
        2.0, 300, LENGTHS, ConversationTurns(mean=4.0, block_tokens=64), seed=1
    )
    assert arrivals == conversations(
        2.0, 300, LENGTHS, ConversationTurns(mean=4.0, block_tokens=64), seed=1
    )
    assert [item.at_seconds for item in arrivals] == sorted(item.at_seconds for item in arrivals)
    followed = 0
    for turns in by_conversation(arrivals):
        for one, other in zip(turns[:-1], turns[1:], strict=True):
            end = one.prompt_tokens + one.output_tokens
            assert other.prompt_tokens > end
            assert other.block_hashes[: len(one.block_hashes)] == one.block_hashes
            assert len(one.block_hashes) == -(-end // 64)
            followed += 1
    assert followed > 150


def test_all_begin_with_the_system_prompt_and_go_apart_behind_it() -> None:
    turns = ConversationTurns(mean=1.0, system_tokens=200, block_tokens=64)
    first, second = conversations(1.0, 2, Fixed(300, 10), turns)
    alike = [a == b for a, b in zip(first.block_hashes, second.block_hashes, strict=True)]
    assert alike == [True] * 3 + [False] * (len(alike) - 3), "three whole blocks of 64"
    assert first.prompt_tokens == 500


def test_requests_come_at_the_rate_and_conversations_end_with_the_context() -> None:
    turns = ConversationTurns(mean=4.0, think_seconds=5.0, context_tokens=3000)
    arrivals = conversations(10.0, 4000, Fixed(100, 50), turns, seed=3)
    assert mean_rate(arrivals[1000:]) == pytest.approx(10.0, rel=0.15)
    assert max(item.prompt_tokens + item.output_tokens for item in arrivals) <= 3000


def test_what_cannot_be_is_refused() -> None:
    for make in (
        lambda: ConversationTurns(mean=0.5),
        lambda: ConversationTurns(think_seconds=-1.0),
        lambda: ConversationTurns(system_tokens=-1),
    ):
        with pytest.raises(WorkloadError):
            make()


def test_a_turn_finds_the_answer_before_it_where_it_is_decoded() -> None:
    """A prefill worker has cached what it computed, a decode worker also the answer."""
    fleet = small_fleet(pages=512)
    assert fleet.prefill is not None
    fleet = replace(
        fleet,
        prefill=replace(fleet.prefill, count=1),
        decode=replace(fleet.decode, count=1),
        prefix=PrefixConfig(reuse=True, grain_tokens=128),
    )
    turns = [Arrival(0.0, 512, 300, (1, 2)), Arrival(60.0, 1024, 4, (1, 2))]
    result = simulate(fleet, turns)
    assert [one.cached_tokens for one in result.outcomes] == [0, 512]
    assert result.counters["prefix_hit_tokens"] == 512
    assert result.counters["decode_prefix_hit_tokens"] == 768  # of 512 + 299, whole blocks of 128


def test_appending_is_refused_where_no_prefill_worker_is_beside() -> None:
    fleet = small_fleet(Mode.CHUNKED)
    with pytest.raises(ConfigError, match="append_tokens=64 needs prefill and decode workers"):
        replace(fleet, prefix=PrefixConfig(reuse=True, append_tokens=64))
