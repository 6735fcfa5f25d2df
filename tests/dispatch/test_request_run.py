"""The state of one request: its tokens are accepted once, in order, and up to their end."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.dispatch.request_run import DeliveryError, RequestRun
from jdisagg.dispatch.token_stream import TextDelta
from jdisagg.request import AcceptedChild, FinishReason, Resumption
from tests.fakes.cluster import toy_request
from tests.fakes.virtual_time import VirtualClock


class Letters:
    """A letter for each token."""

    stop_string = ""

    def __init__(self) -> None:
        self.pushed: list[int] = []

    def push(self, token_ids: tuple[int, ...]) -> TextDelta:
        self.pushed += token_ids
        return TextDelta("x" * len(token_ids), len(token_ids), False)

    def finish(self) -> str:
        return ""


def running(text: Letters, **options: object) -> RequestRun:
    request = replace(toy_request(1, max_tokens=20), **options)  # type: ignore[arg-type]
    run = RequestRun(request, lambda request: text, VirtualClock(), 60.0)
    run.context_tokens = 1000
    return run


async def test_a_long_text_is_resumed_in_turns_with_others() -> None:
    had, text, turns = tuple(range(10_000)), Letters(), 0
    run = running(text, resumption=Resumption(1, (AcceptedChild(had),)))

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await run.resume()
    task.cancel()
    await run.close(1.0)
    assert turns > 100
    assert tuple(text.pushed) == had == run.as_child(0).accepted


async def test_a_token_is_accepted_once_however_often_it_comes() -> None:
    text = Letters()
    run = running(text)
    for first_index, token_ids in [(0, (5,)), (0, (5, 6)), (1, (6,)), (0, (5, 6, 7, 8))]:
        run.accept(0, first_index, token_ids, ())
    events = [await run.next_event() for _ in range(3)]
    assert [(event.first_index, event.token_ids) for event in events] == [
        (0, (5,)),
        (1, (6,)),
        (2, (7, 8)),
    ]
    assert text.pushed == [5, 6, 7, 8]
    await run.close(1.0)


async def test_a_token_that_was_left_out_is_a_bug_of_ours() -> None:
    run = running(Letters())
    run.accept(0, 0, (5,), ())
    with pytest.raises(DeliveryError, match="token 2 arrived, but 1 was next"):
        run.accept(0, 2, (7,), ())
    await run.close(1.0)


async def test_nothing_follows_the_end_and_usage_rides_on_it() -> None:
    run = running(Letters())
    run.accept(0, 0, tuple(range(10, 30)), ())
    run.accept(0, 20, (99,), ())
    last = await run.next_event()
    assert last.usage is not None and last.usage.completion_tokens == 20
    assert last.timings is not None and not run.has_more
    await run.close(1.0)


@pytest.mark.parametrize(("last", "stop_token"), [(9, 9), (7, None)])
async def test_a_stop_token_is_not_delivered_but_named_if_it_is_the_clients(
    last: int, stop_token: int | None
) -> None:
    run = running(Letters(), stop_ids=(7, 9))
    sampling = replace(run.request.sampling, stop_token_ids=(9,))
    run.request = replace(run.request, sampling=sampling)
    run.accept(0, 0, (5, 6, last, 8), ())
    event = await run.next_event()
    assert (event.token_ids, event.finish_reason) == ((5, 6), FinishReason.STOP)
    assert event.stop_token == stop_token
    await run.close(1.0)
