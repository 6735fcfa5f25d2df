"""The KV plane's messages between processes: in order, to the right boot, never blocking, lost only
where nobody answers."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from jdisagg.config import ServiceConfig
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import (
    KvMessage,
    Posted,
    PostedPiece,
    Pulled,
    PullRequest,
    Refused,
    Wanted,
)
from jdisagg.service.internal.kv_link import GrpcKvLink
from jdisagg.service.server import GrpcServer
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, TransferTimeouts
from tests import time_scale
from tests.service.doors import eventually

REQUEST = PullRequest(
    *(2**64 - 1, 5, 7, 1, 2, 3.5, "int8", "bfloat16", 2, 4, 16, 64, 2),
    (Wanted(3, 0, 0), Wanted(4, 1, 1)),
    *(0, 6),
)
POSTED = Posted(2**64 - 1, 1, "127.0.0.1:9", 8, (PostedPiece(0, 3, 0), PostedPiece(1, 4, 1)))


class Channel:
    """Keeps what it gets; answers a pull request, as the real ones do, to whoever sent it."""

    def __init__(self, link: GrpcKvLink) -> None:
        self.got: list[tuple[KvEnd, KvMessage]] = []
        self._link = link

    def handle(self, sender: KvEnd, message: KvMessage) -> None:
        self.got.append((sender, message))
        if isinstance(message, PullRequest):
            self._link.send(sender, POSTED)


@contextlib.asynccontextmanager
async def process(
    boot_id: int,
    port: int = 0,
    queue_messages: int = 8192,
    timeouts: TransferTimeouts = DEFAULT_TIMEOUTS.transfer,
) -> AsyncIterator[tuple[GrpcKvLink, Channel]]:
    """What a worker process has: a link, its channel, its server."""
    link = GrpcKvLink(KvEnd("", boot_id), queue_messages=queue_messages, timeouts=timeouts)
    channel = Channel(link)
    link.deliver_to(channel)
    server = GrpcServer((link.service(),), ServiceConfig(port=port, drain_seconds=0.0), boot_id)
    link.end = KvEnd(f"127.0.0.1:{await server.start()}", boot_id)
    try:
        yield link, channel
    finally:
        await link.close()
        await server.drain()


async def test_a_request_arrives_and_its_answer_comes_back() -> None:
    async with process(7) as (sender, sending), process(8) as (receiver, receiving):
        receiver.send(sender.end, REQUEST)
        await eventually(lambda: receiving.got)
        assert sending.got == [(receiver.end, REQUEST)]
        assert receiving.got == [(sender.end, POSTED)]


async def test_messages_of_many_threads_arrive_each_threads_in_order() -> None:
    async with process(7) as (one, channel), process(8) as (other, _):

        def say(thread: int) -> None:
            for index in range(500):
                other.send(one.end, Pulled(1000 * thread + index))

        threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        await eventually(lambda: len(channel.got) == 2000)
        for thread in threads:
            thread.join()
        pulls = [message.pull_id for _, message in channel.got if isinstance(message, Pulled)]
        for thread in range(4):
            assert [pull for pull in pulls if pull // 1000 == thread] == [
                1000 * thread + index for index in range(500)
            ]
        await eventually(lambda: other.counters["kv_messages_sent"] == 2000)


async def test_messages_for_another_boot_are_dropped_and_later_ones_arrive() -> None:
    async with process(7) as (one, channel), process(8) as (other, _):
        other.send(KvEnd(one.end.control, 6), Pulled(1))
        await eventually(lambda: other.counters.snapshot().get("kv_messages_lost") == 1)
        other.send(one.end, Pulled(2))
        await eventually(lambda: channel.got)
        assert [message for _, message in channel.got] == [Pulled(2)]


async def test_a_process_that_comes_up_a_moment_later_gets_what_was_said() -> None:
    async with process(8) as (other, _):
        async with process(7) as (gone, _):
            end = gone.end
        other.send(end, Refused(1, "HandoffError", "x"))
        await asyncio.sleep(0.2)
        async with process(7, port=int(end.control.rpartition(":")[2])) as (_, channel):
            await eventually(lambda: channel.got)
            assert channel.got == [(other.end, Refused(1, "HandoffError", "x"))]


async def test_what_nobody_takes_is_lost_within_bounds_and_holds_up_no_other() -> None:
    soon = TransferTimeouts(link_try_seconds=0.2)
    async with (
        process(7) as (one, channel),
        process(8, queue_messages=100, timeouts=soon) as (other, _),
    ):
        nobody = KvEnd("127.0.0.1:1", 1)
        for index in range(300):
            other.send(nobody, Pulled(index))
        other.send(one.end, Pulled(1))
        await eventually(lambda: channel.got)
        await eventually(lambda: other.counters.snapshot().get("kv_messages_lost") == 300)


async def test_a_link_closes_at_once_whenever_its_last_message_comes() -> None:
    """A message between the wake-up of a line and its cancellation once cost it 60 seconds."""
    for turns in range(6):
        async with process(7) as (_, sending), process(8) as (receiver, _):
            end = sending._link.end
            receiver.send(end, REQUEST)
            await eventually(lambda sending=sending: sending.got)
            line = receiver.lines[end]
            line.stirred.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(time_scale.seconds(10.0)):
                await receiver.close()
            assert line.task.done()
