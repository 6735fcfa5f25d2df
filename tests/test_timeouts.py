"""Waits that depend on each other are checked where they are made; back-offs have a bound."""

import dataclasses

import pytest

from jdisagg.config import LimitsConfig
from jdisagg.errors import ConfigError
from jdisagg.settings.timeouts import (
    DEFAULT_TIMEOUTS,
    Backoff,
    HandoffTimeouts,
    MembershipTimeouts,
    RequestTimeouts,
    Timeouts,
)
from tests.set_settings import set_by


def test_a_backoff_doubles_up_to_its_bound_however_often_it_failed() -> None:
    waits = [Backoff(0.02, 1.0).seconds(failures) for failures in (1, 2, 3, 7, 100_000)]
    assert waits == pytest.approx([0.02, 0.04, 0.08, 1.0, 1.0])


CONTRADICTIONS = {
    "first_seconds=2 must not exceed most_seconds=1": lambda: Backoff(2.0, 1.0),
    "MembershipTimeouts.heartbeat_seconds=2 must not exceed suspect_seconds=1.5": (
        lambda: MembershipTimeouts(heartbeat_seconds=2.0)
    ),
    "suspect_seconds=1.5 must not exceed gone_seconds=1": (
        lambda: MembershipTimeouts(gone_seconds=1.0)
    ),
    "HandoffTimeouts.pull_tries must be positive, got 0": lambda: HandoffTimeouts(pull_tries=0),
    "handoff_lease_seconds=7.0 must be at least 15.*heartbeat_seconds=10": (
        lambda: LimitsConfig(timeouts=Timeouts(handoff=HandoffTimeouts(heartbeat_seconds=10.0)))
    ),
}


def test_waits_that_contradict_each_other_are_refused_by_both_names() -> None:
    for message, make in CONTRADICTIONS.items():
        with pytest.raises(ConfigError, match=message):
            make()


def test_scaled_timeouts_keep_their_relations_and_their_counts() -> None:
    scaled = DEFAULT_TIMEOUTS.scaled(4.0)
    assert scaled.handoff.receiver_silence_seconds == 4 * 7.0
    assert scaled.handoff.pull_tries == DEFAULT_TIMEOUTS.handoff.pull_tries
    assert scaled.request.retry == Backoff(0.08, 4.0)
    assert scaled.request.source_retry == Backoff(0.8, 3.2)
    assert scaled.transfer.outlet_idle_seconds == 4 * 300.0
    assert DEFAULT_TIMEOUTS.scaled(1.0) == DEFAULT_TIMEOUTS


def test_every_wait_can_be_set_by_its_path() -> None:
    limits = set_by(
        LimitsConfig(),
        ["timeouts.request.retry.first_seconds=0.5", "timeouts.handoff.pull_tries=5"],
    )
    assert limits.timeouts == Timeouts(
        request=RequestTimeouts(retry=Backoff(0.5, 1.0)),
        handoff=dataclasses.replace(HandoffTimeouts(), pull_tries=5),
    )
