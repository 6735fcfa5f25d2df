"""Bounds on what clients use: streams and rates of a token against plain counting, and long texts
in work whatever their callers do."""

import asyncio
import contextlib
import random
import threading

import pytest

from jdisagg.dispatch.caller import Caller, KeyLimits
from jdisagg.dispatch.client_limits import BURST_SECONDS, KeyUse, LongTexts
from jdisagg.errors import OverloadedError, QuotaExceededError

pytestmark = pytest.mark.real_time  # threads work on long texts


def who(key: str = "k", **limits: float) -> Caller:
    return Caller(key=key, limits=KeyLimits(**limits))  # type: ignore[arg-type]


def test_streams_at_a_time_are_bounded_and_one_that_ends_makes_room() -> None:
    use, two = KeyUse(), who(streams=2)
    with use.stream(two, 1, 0.0):
        with use.stream(two, 1, 0.0):
            with pytest.raises(QuotaExceededError, match="2 running streams") as caught:
                use.stream(two, 1, 0.0).__enter__()
            assert caught.value.retry_after_seconds == 1.0
            with use.stream(who("other", streams=2), 1, 0.0):
                pass
        with contextlib.suppress(RuntimeError), use.stream(two, 1, 0.0):
            raise RuntimeError("it broke")
        with use.stream(two, 1, 0.0):
            pass
    assert not use._spending.exchange((), 0.0, 1).streams


def test_who_is_not_bounded_is_not() -> None:
    use = KeyUse()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(use.stream(Caller(), 10**6, 0.0))(10**6)


def test_over_a_long_time_requests_are_their_rate() -> None:
    use, one, draw, let_in = KeyUse(), who(requests_per_second=2.0), random.Random(0), 0
    now = 0.0
    for _ in range(5000):
        now += draw.expovariate(5.0)
        try:
            with use.stream(one, 1000, now):
                let_in += 1
        except QuotaExceededError as error:
            assert "2 requests per second (requests_per_second in the token file)" in str(error)
    assert let_in == pytest.approx(2.0 * (now + BURST_SECONDS), rel=0.01)


def test_prompts_and_answers_are_paid_and_who_is_in_debt_waits() -> None:
    use, one = KeyUse(), who(tokens_per_second=10.0)  # 100 at once
    with use.stream(one, 60, 0.0) as used:
        for _ in range(30):
            used(5)  # a stream that runs is not cut short
    with pytest.raises(QuotaExceededError) as caught:
        use.stream(one, 5, 0.0).__enter__()
    assert caught.value.retry_after_seconds == pytest.approx((60 + 150 + 5 - 100) / 10)
    with use.stream(one, 5, 11.6):
        pass


def test_a_refused_request_pays_nothing() -> None:
    use, one = KeyUse(), who(requests_per_second=0.2, tokens_per_second=10.0)
    with use.stream(one, 90, 0.0):
        pass
    for _ in range(9):
        with pytest.raises(QuotaExceededError, match="10 tokens per second"):
            use.stream(one, 11, 0.0).__enter__()
    with use.stream(one, 10, 0.0):
        pass


def test_what_is_resumed_was_paid_before_but_is_a_stream() -> None:
    use, one = KeyUse(), who(requests_per_second=0.1, streams=1)
    with use.stream(one, 5, 0.0):
        pass
    with (
        use.stream(one, 5, 0.0, resumed=True),
        pytest.raises(QuotaExceededError, match="1 running streams"),
    ):
        use.stream(one, 5, 0.0, resumed=True).__enter__()
    with pytest.raises(QuotaExceededError, match="requests per second"):
        use.stream(one, 5, 0.0).__enter__()


def test_a_limit_that_is_taken_back_no_longer_holds() -> None:
    use = KeyUse()
    with use.stream(who(tokens_per_second=1.0), 500, 0.0):
        pass
    with pytest.raises(QuotaExceededError):
        use.stream(who(tokens_per_second=1.0), 1, 0.0).__enter__()
    with use.stream(who(), 500, 0.0) as used:
        used(10**6)
    with use.stream(who(tokens_per_second=1.0), 1, 0.0):
        pass


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
