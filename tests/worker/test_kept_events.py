"""Events about cached blocks: what a subscriber makes of them is what the pages hold, and a plain
ZeroMQ client reads them in the form that vLLM's and SGLang's subscribers read."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from jdisagg.config import ConfigError, Mode, PrefixConfig
from jdisagg.node.kv_events import KvEventPublisher
from jdisagg.request import Request
from jdisagg.scheduler import kept_log
from jdisagg.scheduler.kept_log import KeptEvents
from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.scheduler.residency import Residency
from jdisagg.worker.worker import Worker
from tests.fakes.cluster import Cluster
from tests.worker.conversations import NAMES, Talk, limits, storm

GRAIN = 16
SECONDS = 20


class Index:
    """What another router would know of one worker, from the batches alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.removed = self.cleared = 0

    def take(self, batches: list[Any]) -> None:
        for batch in batches:
            _, events, rank = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
            blocks = self.blocks.setdefault(rank, {})
            for kind, *fields in events:
                if kind == "BlockStored":
                    hashes, parent, tokens, size, lora, medium = fields
                    assert (lora, medium, len(tokens)) == (None, "GPU", size * len(hashes))
                    for at, name in enumerate(hashes):
                        assert name not in blocks
                        blocks[name] = parent, tuple(tokens[at * size : (at + 1) * size])
                        parent = name
                elif kind == "BlockRemoved":
                    for name in fields[0]:
                        del blocks[name]
                        self.removed += 1
                else:
                    assert (kind, fields) == ("AllBlocksCleared", [])
                    blocks.clear()
                    self.cleared += 1

    def tokens(self, rank: int, name: int | None) -> tuple[int, ...] | None:
        """All tokens up to the end of a block, or None if an earlier block is gone."""
        if name is None:
            return ()
        if name not in self.blocks[rank]:
            return None
        parent, own = self.blocks[rank][name]
        before = self.tokens(rank, parent)
        return None if before is None else before + own


@pytest.mark.parametrize("pages", [60, 160])
async def test_a_subscriber_knows_what_the_pages_hold(pages: int) -> None:
    async with Cluster(
        Mode.DISAGGREGATED, prefill=limits(2, pages), decode=limits(2, pages), names=NAMES
    ) as cluster:
        watched: list[tuple[Worker, KeptEvents, Index]] = []
        for worker in (cluster.prefill, cluster.decode):
            events = worker.report_kept(lambda: None)
            assert events is not None
            watched.append((worker, events, Index()))
        await storm(cluster, Talk(3), 60, 4)
        whole = 0
        for worker, events, index in watched:
            index.take(events.take(0.0))
            for rank, tree in enumerate(worker._kept.trees):
                held = {int.from_bytes(name[:8], "big") for name, _, _ in tree.by_last_use()}
                assert held and set(index.blocks[rank]) == held
                for name in held:
                    if (tokens := index.tokens(rank, name)) is not None:
                        own = NAMES.chain(Request("r", (1,)), tokens, GRAIN)[-1]
                        assert int.from_bytes(own[:8], "big") == name
                        whole += 1
        assert whole > 20
        assert pages > 60 or sum(index.removed for _, _, index in watched) > 0
        for worker, events, index in watched:
            await worker.reset_cache()
            index.take(events.take(0.0))
            assert index.cleared == 2 and not any(index.blocks.values())


class Held:
    """A cache of one rank, in which a test stores blocks by hand."""

    def __init__(self, pages: int = 8) -> None:
        self.ledger = PageLedger(pages)
        self.kept = Residency([self.ledger], GRAIN, NAMES)
        self.owners = 0

    def report_kept(self, pending: Any) -> KeptEvents | None:
        return self.kept.report(pending)

    def store(self, *tokens: int) -> list[int]:
        """Stores one block of each of `tokens`; returns the hashes of the blocks."""
        text = [token for token in tokens for _ in range(GRAIN)]
        chain, self.owners = self.kept.chain(Request("r", (1,)), text), self.owners + 1
        assert self.kept.reserve(0, self.owners, (), 0, len(tokens)) is not None
        self.kept.let_go(0, self.owners, chain)
        return [int.from_bytes(name[:8], "big") for name in chain]


@pytest.mark.real_time
async def test_a_plain_client_reads_and_replays_batches() -> None:
    held = Held()
    publisher = KvEventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "kv@one@tiny")
    context = zmq.asyncio.Context()
    subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        subscriber.connect(publisher.address)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        dealer.connect(publisher.replay)
        publisher.watch(held)  # type: ignore[arg-type]

        async def replay(first: int) -> list[tuple[int, Any]]:
            await dealer.send_multipart((b"", first.to_bytes(8, "big")))
            found: list[tuple[int, Any]] = []
            async with asyncio.timeout(SECONDS):
                while True:
                    empty, number, data = await dealer.recv_multipart()
                    assert empty == b""
                    at = int.from_bytes(number, "big", signed=True)
                    if at < 0:
                        assert data == b""
                        return found
                    found.append((at, msgspec.msgpack.decode(data)))

        # A subscription takes a moment: until then, batches are lost, as over any PUB socket.
        async with asyncio.timeout(SECONDS):
            while not await subscriber.poll(50):
                held.kept.clear()
                await asyncio.sleep(0)
            while await subscriber.poll(50):
                await subscriber.recv_multipart()
        begun = time.time()
        first = held.store(1, 2, 3)
        await asyncio.sleep(0)
        second = held.store(1, 2, 4)
        async with asyncio.timeout(SECONDS):
            parts = [await subscriber.recv_multipart() for _ in range(2)]
        assert {topic for topic, _, _ in parts} == {b"kv@one@tiny"}
        numbers = [int.from_bytes(number, "big") for _, number, _ in parts]
        assert numbers == [numbers[0], numbers[0] + 1]
        batches = [msgspec.msgpack.decode(data) for _, _, data in parts]
        assert all(begun - 1 <= ts <= time.time() + 1 and rank == 0 for ts, _, rank in batches)
        tokens = [[token] * GRAIN for token in (1, 2, 3, 4)]
        stored = ["BlockStored", first, None, sum(tokens[:3], []), GRAIN, None, "GPU"]
        assert batches[0][1] == [stored]
        stored = ["BlockStored", second[2:], first[1], tokens[3], GRAIN, None, "GPU"]
        assert batches[1][1] == [stored]
        # What came is on record too, and everything before it from the start.
        assert await replay(numbers[0]) == list(zip(numbers, batches, strict=True))
        whole = await replay(0)
        assert [number for number, _ in whole] == [*range(numbers[1] + 1)]
        assert whole[0][1][1] == [["AllBlocksCleared"]]
        await dealer.send_multipart((b"", b"short"))  # is passed over
        assert await replay(numbers[1]) == whole[-1:]
    finally:
        publisher.close()
        subscriber.close(linger=0)
        dealer.close(linger=0)
        context.term()


@pytest.mark.real_time
async def test_an_address_that_is_taken_is_named() -> None:
    one = KvEventPublisher("tcp://127.0.0.1:0")
    try:
        with pytest.raises(ConfigError, match=f"prefix.events='{one.address}' cannot be bound"):
            KvEventPublisher(one.address)
    finally:
        one.close()


def test_tokens_of_blocks_are_remembered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_log, "REMEMBERED_BLOCKS", 2)
    held, calls = Held(), []
    events = held.kept.report(lambda: calls.append(1))
    assert events is not None
    names = held.store(1, 2, 3)
    (batch,) = events.take(0.0)
    assert [event.block_hashes for event in batch.events] == [names[1:]]  # type: ignore[union-attr]
    assert calls == [1]


def test_each_worker_of_a_host_has_ports_of_its_own() -> None:
    config = PrefixConfig(
        reuse=True, events="tcp://*:5557", events_replay="tcp://*:6557", events_topic="kv"
    )
    third = config.of_worker(2)
    assert (third.events, third.events_replay) == ("tcp://*:5559", "tcp://*:6559")
    assert PrefixConfig(reuse=True, events="ipc:///tmp/kv").of_worker(1).events == "ipc:///tmp/kv.1"
    assert PrefixConfig(reuse=True, events="tcp://*:0").of_worker(1).events == "tcp://*:0"
    with pytest.raises(ConfigError, match="needs reuse .*, got False"):
        PrefixConfig(reuse=False, events="tcp://*:5557")
    with pytest.raises(ConfigError, match="events_replay"):
        PrefixConfig(reuse=True, events_replay="tcp://*:5557")
