"""What every backend of the channel between processes must do, as a suite: subclass
`ProcessConformance` and give the module a fixture `memories`."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import pytest

from jdisagg.messages.kv_plane import KvMemory, KvMessage, Posted, PullRequest, Refused
from jdisagg.transfer.channel_thread import ComputeWait
from tests.transfer.conformance import (
    ChannelConformance,
    arrives,
    behind_work,
    case,
    fails,
    finished,
    settled,
)
from tests.transfer.loopback import SENDER, Loopback, Pair


class ProcessConformance(ChannelConformance):
    """`title`: the backend's name in `channels()`. `early`: whether a block's memory is announced
    before its values are computed."""

    title, early = "transfer engine", False

    def check_nothing_is_kept(self, pair: Pair) -> None:
        """Waits until the backend keeps nothing, after the pulls have ended."""

    def check_nothing_is_open(self, pair: Pair) -> None:
        """Waits until the backend has nothing open, after both channels were closed."""

    @pytest.mark.parametrize("lost", [PullRequest, Posted, Refused])
    def test_what_is_lost_is_requested_again(
        self, pair: Pair, loopback: Loopback, lost: type[KvMessage]
    ) -> None:
        block, dropped = case("tp=2", "tp=2"), []

        def lose_first(message: KvMessage) -> list[KvMessage]:
            if isinstance(message, lost) and not dropped:
                dropped.append(message)
                return []
            return [message]

        loopback.tamper = lose_first
        pair.sender.offer(7, block.block, 0)
        if lost is Refused:
            pair.sender.release(7)
        pull = pair.ends.pull(7, block)
        settled(lambda: len(dropped) == 1)
        assert not pull.is_ready() or lost is Posted
        pair.clock.seconds = 1.0
        if lost is Refused:
            fails(pull, "released")
        else:
            arrives(pull, block)
        del pull
        settled(lambda: gc.collect() >= 0 and pair.sender.postings() == 0)

    def test_a_block_that_is_still_computed_keeps_no_other_waiting(self, pair: Pair) -> None:
        block, there = case("tp=2", "tp=2"), case("tp=1", "tp=2")
        pair.sender.offer(1, behind_work(block.block), 0)
        slow = pair.ends.pull(1, block)
        pair.sender.offer(2, jax.block_until_ready(there.block), 0)
        arrives(pair.ends.pull(2, there), there)
        arrives(slow, block)

    def test_a_revocation_ends_pulls_of_a_block_that_is_still_computed(self, pair: Pair) -> None:
        block = case("tp=2", "tp=2")
        computing = behind_work(block.block)
        pair.sender.offer(7, computing, 0)
        pull: Any = pair.ends.pull(7, block)
        settled(lambda: pair.sender.postings() == 1)
        # Memory that is freed before the receiver has mapped it is requested again.
        settled(lambda: not self.early or pull._coming is not None)
        pair.sender.revoke(7, "prefill was aborted")
        fails(pull, "prefill was aborted")
        jax.block_until_ready(computing)
        settled(pair.quiet)

    def test_a_storm_of_pulls_that_arrive_or_are_cancelled_or_revoked_leaves_nothing(
        self, pair: Pair
    ) -> None:
        block = case("tp=2", "tp=4")
        for number in range(30):
            pair.sender.offer(number, block.block, 0)
            pull = pair.ends.pull(number, block)
            if number % 3:
                finished(pull)
            else:
                pull.cancel()
            if number % 5 == 0:
                pair.sender.revoke(number, "enough")
            else:
                pair.sender.release(number)
        del pull
        settled(lambda: gc.collect() >= 0 and pair.quiet())
        self.check_nothing_is_kept(pair)
        waiting = pair.ends.pull(99, block)
        pair.close()
        fails(waiting, "closed")
        self.check_nothing_is_open(pair)
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("kv-")]


class MemoryConformance(ProcessConformance):
    """Of the backends beside the transfer engine. `memory`: type of their answers."""

    memory: type

    def test_the_answer_says_where_the_pieces_lie_and_the_engine_is_not_used(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        block = case("tp=2", "tp=4")
        engine = "jdisagg.transfer.transfer_engine.EngineOptions.start_server"
        monkeypatch.setattr(engine, None)
        pair.sender.offer(7, block.block, 0)
        arrives(pair.ends.pull(7, block), block)
        assert pair.receiver.channels() == (f"{SENDER.control} {self.title}",)
        answers = pair.heard(Posted)
        assert answers and all(type(answer.memory) is self.memory for answer in answers)  # type: ignore[union-attr]

    def test_a_block_that_is_not_computed_yet_is_answered_early_or_late(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The test itself decides when the computation ends."""
        computed: list[Callable[[], object]] = []
        monkeypatch.setattr("jdisagg.transfer.kv_sender.is_ready", lambda array: False)
        monkeypatch.setattr(
            ComputeWait, "then", lambda self, number, arrays, job: computed.append(job)
        )
        block = case("tp=2", "tp=2")
        pair.sender.offer(1, block.block, 0)
        pull = pair.ends.pull(1, block)
        settled(lambda: bool(computed) and bool(pair.heard(Posted)) == self.early)
        assert not pull.is_ready()
        before = list(pair.messages)
        for job in computed:
            job()
        arrives(pull, block)
        if self.early:
            assert pair.messages == before, "what lies there reports by itself that it is written"


def fails_and_the_next_arrives(pair: Pair, spoil: Callable[[Any], KvMemory]) -> None:
    """Spoils the memory of the first answer: its pull fails, and the next one arrives."""
    block, spoilt = case("tp=2", "tp=2"), []

    def tamper(message: KvMessage) -> list[KvMessage]:
        pair.messages.append(message)
        if isinstance(message, Posted) and message.memory and not spoilt:
            spoilt.append(message)
            return [msgspec.structs.replace(message, memory=spoil(message.memory))]
        return [message]

    pair.loopback.tamper = tamper
    pair.sender.offer(1, block.block, 0)
    fails(pair.ends.pull(1, block))
    assert spoilt
    settled(lambda: pair.receiver.under_way() == 0)
    arrives(pair.ends.pull(1, block), block)
