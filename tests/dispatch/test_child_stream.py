"""One child's stream: what resuming it costs the others."""

import asyncio
from dataclasses import dataclass

from jdisagg.dispatch.child_stream import ChildStream
from jdisagg.request import AcceptedChild
from tests.fakes.cluster import toy_request


@dataclass(frozen=True)
class Delta:
    text: str
    tokens_kept: int
    stopped: bool = False


class Letters:
    """A letter for each token."""

    stopped = False

    def __init__(self) -> None:
        self.pushed: list[int] = []

    def push(self, token_ids: tuple[int, ...]) -> Delta:
        self.pushed += token_ids
        return Delta("x" * len(token_ids), len(token_ids))

    def finish(self) -> str:
        return ""


async def test_a_long_text_is_resumed_in_turns_with_others() -> None:
    had, text, turns = tuple(range(10_000)), Letters(), 0
    stream = ChildStream(toy_request(1), 0, text)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await stream.resume(AcceptedChild(had))
    task.cancel()
    assert turns > 100
    assert tuple(text.pushed) == had == stream.child.accepted
