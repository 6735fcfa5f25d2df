"""An unbounded queue with one reader, which is cheaper than `asyncio.Queue`.

`put_nowait` never waits. Invariant: each item is returned exactly once, in insertion order, even if
a `get` was cancelled."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __len__(self) -> int:
        return len(self._items)

    async def get(self) -> T:
        """Waits for the next item and returns it. Only one reader may wait at a time."""
        while not self._items:
            assert self._waiter is None, "a mailbox has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()
