"""The virtual loop: order, jumps of time, stuck states, and what asyncio expects of any loop."""

import asyncio
import gc
from collections.abc import AsyncGenerator

import pytest

from jdisagg.simulator.virtual_time import (
    MOST_CANCELLED,
    Stuck,
    VirtualClock,
    VirtualLoop,
    run_virtually,
)


def test_timers_run_by_time_and_those_of_one_instant_as_they_were_set() -> None:
    async def main() -> list[tuple[float, str]]:
        loop, seen = asyncio.get_running_loop(), list[tuple[float, str]]()
        for name, at in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
            loop.call_at(at, lambda name=name: seen.append((loop.time(), name)))
        loop.call_at(1.5, lambda: seen.append((loop.time(), "never"))).cancel()
        await VirtualClock().sleep(1e6)
        return seen

    assert run_virtually(main, limit_seconds=2e6) == [
        (1.0, "a"),
        (1.0, "b"),
        (2.0, "c"),
        (2.0, "d"),
    ]


async def test_it_runs_where_a_loop_runs_already() -> None:
    """A notebook's thread already runs a loop."""

    async def main() -> float:
        await asyncio.sleep(7.0)
        return asyncio.get_running_loop().time()

    ours = asyncio.get_running_loop()
    assert run_virtually(main) == 7.0
    assert asyncio.get_running_loop() is ours


def test_nothing_to_come_and_too_long_are_stuck() -> None:
    async def for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    async def long() -> None:
        await asyncio.sleep(11.0)

    with pytest.raises(Stuck, match="no task"):
        run_virtually(for_ever)
    with pytest.raises(Stuck, match="10"):
        run_virtually(long, limit_seconds=10.0)


@pytest.mark.parametrize("within", ["a callback", "a task", "a task that another awaits"])
def test_an_interrupt_ends_all_that_runs_and_says_nothing_of_it(
    within: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []

    async def sleeper(number: int) -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            await asyncio.sleep(1.0)
            ended.append(number)

    async def interrupted() -> None:
        await asyncio.sleep(5.0)
        raise KeyboardInterrupt

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        sleepers = [asyncio.ensure_future(sleeper(number)) for number in range(5)]
        if within == "a callback":
            asyncio.get_running_loop().call_later(5.0, interrupt)
        else:
            sleepers.append(asyncio.ensure_future(interrupted()))
        if within == "a task that another awaits":
            await sleepers[-1]
        await asyncio.gather(*sleepers)

    with pytest.raises(KeyboardInterrupt):
        run_virtually(main)
    gc.collect()
    assert sorted(ended) == list(range(5)) and not caplog.records


def test_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(10 * MOST_CANCELLED):
            loop.call_later(1e9, print).cancel()
        return len(loop._timers)

    assert run_virtually(main) <= 2 * MOST_CANCELLED + 2


def test_groups_timeouts_and_generators_work_as_on_any_loop() -> None:
    closed: list[str] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            for number in range(10):
                await asyncio.sleep(1.0)
                yield number
        finally:
            closed.append("generator")

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            one = tasks.create_task(asyncio.sleep(3.0, "one"))
            two = tasks.create_task(asyncio.sleep(1.0, "two"))
        assert one.result() == "one" and two.result() == "two"
        assert asyncio.get_running_loop().time() == 3.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.sleep(5.0)
        async for number in numbers():
            if number == 2:
                break
        await asyncio.sleep(1.0)

    run_virtually(main)
    assert closed == ["generator"]


def test_what_fails_in_a_callback_is_told_and_the_rest_goes_on() -> None:
    told: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1.0)

    run_virtually(main)
    assert [type(error) for error in told] == [ZeroDivisionError]
