"""Work on long texts: in threads, so that it delays no stream, and bounded, so that those who send
many hold up no one's prompt.

A text is taken while it is at most half of the room that the texts at work leave: however many the
largest are, there is room for smaller ones. What finds none is refused and may come again; nothing
waits in a queue. Work whose caller has gone is still work: it counts until its thread has ended.
Knows neither tokenizers nor requests."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jdisagg.errors import OverloadedError

RETRY_SECONDS = 1.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class LongTexts:
    """At most `room_bytes` at work. Use it on one event loop."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._at_work_bytes = 0

    async def run(
        self,
        size_bytes: int,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """`work`'s result. Raises OverloadedError where there is no room."""
        left_bytes = self._room_bytes - self._at_work_bytes
        if size_bytes > left_bytes / 2:
            raise OverloadedError(
                f"texts of {self._at_work_bytes} bytes are being tokenized, and {size_bytes} more"
                f" exceed half of what is left of {self._room_bytes}; try again later, or send"
                " token ids",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._at_work_bytes += size_bytes
        task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))

        def ended(task: asyncio.Task[Result]) -> None:
            self._at_work_bytes -= size_bytes
            if not task.cancelled():
                task.exception()  # its caller may have gone, and nobody else would look

        task.add_done_callback(ended)
        return await asyncio.shield(task)
