"""A leader and its followers over real gRPC in one process, with executors that only record their
commands."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from jdisagg.errors import HandoffError, InvalidRequestError, UnavailableError
from jdisagg.instance.broadcast import BroadcastExecutor
from jdisagg.instance.follower import run_follower
from jdisagg.instance.followers import Followers
from jdisagg.instance.liveness import SilenceWatch
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.instance import Join
from jdisagg.messages.step_commands import (
    NO_ROOM,
    CopyPages,
    DiskResult,
    Done,
    DropBlocks,
    FindSaved,
    LoadBlock,
    PullBlock,
    PullResult,
    ReadWeights,
    StepCommand,
    StepResult,
)
from jdisagg.service.internal.instance_stream import InstanceServer, LeaderConnection
from tests import time_scale
from tests.instance.noting import CLOCK, FAST, NotingExecutor, nothing

Answer = Callable[[StepCommand], StepResult | Exception | None]


@dataclass
class Instance:
    leader: NotingExecutor
    others: list[NotingExecutor]
    tasks: list[asyncio.Task[None]]
    links: list[LeaderConnection]
    followers: Followers
    executor: BroadcastExecutor

    def answer(self, *answers: Answer) -> None:
        """What the leader and each follower make of commands from now on."""
        for one, its in zip((self.leader, *self.others), answers, strict=True):
            one.answers = its


@asynccontextmanager
async def instance(processes: int = 3) -> AsyncIterator[Instance]:
    followers = Followers(processes, CLOCK, FAST)
    server = InstanceServer(followers)
    address = await server.start()
    leader, others = NotingExecutor(), [NotingExecutor() for _ in range(processes - 1)]
    links = [LeaderConnection(address) for _ in others]
    tasks = []
    for i, (link, other) in enumerate(zip(links, others, strict=True), 1):
        join = Join(i, followers.secret, KvEnd(f"h:{i}", i))
        follows = run_follower(link, join, other, nothing, CLOCK, FAST)
        tasks.append(asyncio.create_task(follows))
    try:
        await followers.all_ready(10)
        executor = BroadcastExecutor(leader, followers, KvEnd("h:0", 100))
        yield Instance(leader, others, tasks, links, followers, executor)
    finally:
        followers.stop()
        await asyncio.wait(tasks, timeout=time_scale.seconds(5))
        await server.stop()
        for task in tasks:
            assert task.done()
            _ = task.cancelled() or task.exception()


def pull(step: int) -> PullBlock:
    return PullBlock(step, 7, rank=0, group=0, block_tokens=16, deadline_seconds=1.0, peer="p")


def pulled(moved: int, error: str = "") -> Answer:
    return lambda command: PullResult(command.step, 7, moved, error)


def done(command: StepCommand) -> Done:
    return Done(command.step)


def never(command: StepCommand) -> None:
    return None


async def test_every_process_runs_the_same_commands_in_the_same_order() -> None:
    commands = [CopyPages(step, ((0, step, step + 1),)) for step in range(50)]
    async with instance() as it:
        # the card holds where every process takes messages
        assert it.executor.card.ends == (KvEnd("h:0", 100), KvEnd("h:1", 1), KvEnd("h:2", 2))
        results = await asyncio.gather(*(it.executor.run(command) for command in commands))
    assert results == [Done(step) for step in range(50)]
    assert it.leader.seen == commands
    assert all(other.seen == commands for other in it.others), (
        "a follower ended before it had run what was ordered"
    )


async def test_a_pull_is_over_when_it_is_over_on_every_process() -> None:
    async with instance() as it:
        it.answer(pulled(100), pulled(20), pulled(3))
        assert await it.executor.run(pull(1)) == PullResult(1, 7, 123)
        it.others[1].answers = never
        waiting = it.executor.run(pull(2))
        await asyncio.sleep(0.2)
        assert len(it.others[1].seen) == 2 and not waiting.done()


async def test_one_process_that_cannot_pull_fails_the_pull_and_not_the_instance() -> None:
    async with instance() as it:
        it.answer(pulled(1), pulled(1), pulled(0, "the offer was revoked"))
        result = await it.executor.run(pull(1))
        assert isinstance(result, PullResult) and result.error == "the offer was revoked"
        it.others[1].answers = lambda command: HandoffError("not connected")
        result = await it.executor.run(pull(2))
        assert isinstance(result, PullResult) and result.error == "not connected"
        it.leader.answers = done
        assert await it.executor.run(DropBlocks(3, (7,))) == Done(3)


async def test_a_pull_whose_parts_do_not_fit_together_fails_the_instance_at_once() -> None:
    async with instance() as it:
        it.answer(pulled(None), pulled(1), pulled(1))  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match="its parts do not fit"):
            async with asyncio.timeout(10):
                await it.executor.run(pull(1))
        async with asyncio.timeout(5):
            assert "command 1: its parts do not fit" in (await it.followers.failed()).message


async def test_what_all_processes_refuse_alike_is_refused_and_breaks_nothing() -> None:
    async with instance() as it:
        it.answer(*[lambda command: HandoffError("offer 7 is live already")] * 3)
        with pytest.raises(HandoffError, match="live already"):
            await it.executor.run(DropBlocks(1, (7,)))
        it.answer(done, done, done)
        await asyncio.sleep(0.2)
        assert await it.executor.run(DropBlocks(2, ())) == Done(2)


@pytest.mark.parametrize(
    "error", [UnavailableError("a program on the mesh failed"), HandoffError("here alone")]
)
async def test_a_command_that_fails_on_one_process_alone_fails_the_instance(
    error: Exception,
) -> None:
    async with instance() as it:
        it.others[0].answers = lambda command: error
        first = await asyncio.gather(it.executor.run(DropBlocks(1, ())), return_exceptions=True)
        async with asyncio.timeout(5):
            failure = await it.followers.failed()
        assert "process 1, command 1" in failure.message and str(error) in failure.message
        assert first == [Done(1)] or isinstance(first[0], UnavailableError)
        with pytest.raises(UnavailableError, match="process 1"):
            await it.executor.run(DropBlocks(2, ()))
        it.executor.close()
        assert not it.leader.closed, "the mesh of a failed instance may hang: nobody waits for it"


async def test_a_block_is_on_disk_only_if_every_process_has_its_part() -> None:
    async with instance() as it:
        names = (b"a", b"b", b"c")
        it.answer(
            lambda one: DiskResult(1, names=names, ages=(3.0, 2.0, 1.0)),
            lambda one: DiskResult(1, names=(b"c", b"a"), ages=(9.0, 9.0)),
            lambda one: DiskResult(1, names=names, ages=(9.0, 9.0, 9.0)),
        )
        found = await it.executor.run(FindSaved(1, b"space", 1.0))
        assert found == DiskResult(1, names=(b"a", b"c"), ages=(3.0, 1.0))
        it.answer(
            lambda one: DiskResult(2, bytes_moved=5, checksums=(8,)),
            lambda one: DiskResult(2, bytes_moved=6, checksums=(8,)),
            lambda one: DiskResult(2, "gone"),
        )
        loaded = await it.executor.run(LoadBlock(2, b"a", 0, (4,), 1.0))
        assert loaded == DiskResult(2, "gone", bytes_moved=11, checksums=(8,))


async def test_weights_lack_room_if_room_is_all_that_any_process_lacks() -> None:
    async with instance() as it:
        it.answer(
            lambda one: DiskResult(1, names=(b"content",), ages=(0.0,)),
            lambda one: DiskResult(1, "no room", skipped=((NO_ROOM, 7),)),
            lambda one: DiskResult(1, "no room", skipped=((NO_ROOM, 9),)),
        )
        found = await it.executor.run(ReadWeights(1, 1, "folder"))
        assert found == DiskResult(1, "no room", skipped=((NO_ROOM, 9),))
        it.others[1].answers = lambda one: DiskResult(1, "no file")
        found = await it.executor.run(ReadWeights(1, 1, "folder"))
        assert isinstance(found, DiskResult) and found.error and not found.skipped


async def test_a_follower_that_goes_fails_what_is_under_way() -> None:
    async with instance() as it:
        it.leader.answers = never  # as a collective whose other half is gone
        waiting = it.executor.run(DropBlocks(1, ()))
        await it.links[0].close()
        with pytest.raises(UnavailableError, match="process 1: its stream"):
            async with asyncio.timeout(5):
                await waiting
        async with asyncio.timeout(5):
            with pytest.raises(UnavailableError):
                await it.tasks[1]


async def test_a_silent_follower_fails_the_instance() -> None:
    async with instance() as it:
        it.links[1].send = lambda message: None  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            failure = await it.followers.failed()
        assert "process 2 was silent" in failure.message


async def test_a_silent_leader_ends_its_followers() -> None:
    async with instance() as it:
        it.followers._send_all = lambda message: None  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError, match="the leader was silent"):
                await it.tasks[0]


async def test_strangers_and_doubles_are_refused() -> None:
    followers = Followers(2, CLOCK, FAST)
    server = InstanceServer(followers)
    address = await server.start()
    for join in (
        Join(1, followers.secret ^ 1),
        Join(2, followers.secret),
        Join(0, followers.secret),
    ):
        # INTERNAL: what gRPC makes of a refusal that comes while the follower is still writing.
        with pytest.raises(UnavailableError, match="INVALID_ARGUMENT|INTERNAL"):
            await run_follower(
                LeaderConnection(address), join, NotingExecutor(), nothing, CLOCK, FAST
            )
        assert not followers.failure
    followers.join(Join(1, followers.secret))
    with pytest.raises(InvalidRequestError, match="has joined already"):
        followers.join(Join(1, followers.secret))
    assert not followers.failure
    followers.stop()
    await server.stop()


async def test_followers_that_never_come_fail_the_start() -> None:
    with pytest.raises(UnavailableError, match=r"processes \[1\] were not ready within 0.1 s"):
        await Followers(2, CLOCK, FAST).all_ready(0.1)


def test_silence_counts_only_while_somebody_listened() -> None:
    watch = SilenceWatch(0.0)
    assert watch.look(0.1) == pytest.approx(0.1)
    assert watch.look(1000.0) == pytest.approx(0.3), "we were asleep: nobody else was silent"
    watch.heard()
    assert watch.look(1000.1) == pytest.approx(0.1)


async def test_a_command_is_packed_once_however_many_followers_hear_it() -> None:
    followers = Followers(64, CLOCK, FAST)
    sessions = [followers.join(Join(number, followers.secret)) for number in range(1, 64)]
    followers.order(DropBlocks(7, (1, 2)))
    followers.stop()
    sent = [[packed async for packed in session.outgoing()] for session in sessions]
    assert len({id(packed[-2]) for packed in sent}) == 1  # the last is the farewell
    assert all(packed == sent[0] for packed in sent)
