"""What one coroutine sends to another: a queue without bound for a single reader, leaner than
asyncio's, which must serve many.

Putting never waits. Invariant: items are got once, in the order in which they were put, also
when a `get` was cancelled."""

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
        """The next item, once there is one. One reader at a time."""
        while not self._items:
            assert self._waiter is None, "a mailbox has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()
