"""How many long texts are worked on at once, whatever their callers do."""

import asyncio
import threading

import pytest

from jdisagg.dispatch.long_texts import LongTexts
from jdisagg.errors import OverloadedError


async def test_the_largest_texts_leave_room_for_smaller_ones_and_are_refused_beyond_it() -> None:
    texts, go = LongTexts(room_bytes=1600), threading.Event()
    running = [asyncio.create_task(texts.run(400, go.wait, 30)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(
        OverloadedError, match="texts of 1200 bytes are being tokenized, and 400 more exceed half"
    ) as caught:
        await texts.run(400, go.wait, 30)
    assert caught.value.retry_after_seconds
    assert await texts.run(100, len, "abc") == 3
    go.set()
    assert await asyncio.gather(*running) == [True] * 3
    assert await texts.run(800, len, "abc") == 3


async def test_work_whose_caller_has_gone_counts_until_it_ends() -> None:
    texts, go = LongTexts(room_bytes=1000), threading.Event()
    running = asyncio.create_task(texts.run(500, go.wait, 30))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(OverloadedError):
        await texts.run(500, len, "abc")
    go.set()
    async with asyncio.timeout(30):
        while True:
            try:
                assert await texts.run(500, len, "abc") == 3
                return
            except OverloadedError:
                await asyncio.sleep(0.01)


async def test_an_error_of_the_work_is_its_callers() -> None:
    texts = LongTexts(room_bytes=1000)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await texts.run(500, divmod, 1, 0)
