"""Runs prompts concurrently in an embedded cluster and shows their answers one after the other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Unpack

from jdisagg.chat.messages import ChatMessage, ChatPrompt
from jdisagg.errors import JdisaggError, first_error
from jdisagg.node.deployment import Deployment
from jdisagg.request import SamplingOptions, StreamEvent


class PromptRun:
    """Runs several prompts on an embedded cluster. `chat`: whether each prompt is a user message,
    to which the chat template is applied."""

    def __init__(
        self, deployment: Deployment, chat: bool, **options: Unpack[SamplingOptions]
    ) -> None:
        self._deployment = deployment
        self._chat = chat
        self._options = options

    async def stream(self, prompt: str, max_tokens: int | None) -> AsyncIterator[StreamEvent]:
        frontend = self._deployment.frontend
        asked = ChatPrompt((ChatMessage("user", prompt),)) if self._chat else prompt
        request = await frontend.build_request(asked, **{**self._options, "max_tokens": max_tokens})
        async for event in frontend.stream(request):
            yield event

    async def all_at_once(
        self,
        prompts: Sequence[str],
        max_tokens: int | None,
        show: Callable[[int, AsyncIterator[StreamEvent]], Awaitable[None]],
    ) -> None:
        """Runs all prompts concurrently, and shows their answers in order. `show` is called with
        the index and the events of each prompt, one prompt after the other. Raises the first error
        of any prompt."""
        queues = [asyncio.Queue[StreamEvent | None]() for _ in prompts]
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt, queue in zip(prompts, queues, strict=True):
                    tasks.create_task(_fill(queue, self.stream(prompt, max_tokens)))
                for index, queue in enumerate(queues):
                    await show(index, _drained(queue))
        except* (JdisaggError, BrokenPipeError) as group:
            raise first_error(group) from None


async def _fill(
    queue: asyncio.Queue[StreamEvent | None], events: AsyncIterator[StreamEvent]
) -> None:
    async for event in events:
        queue.put_nowait(event)
    queue.put_nowait(None)


async def _drained(queue: asyncio.Queue[StreamEvent | None]) -> AsyncIterator[StreamEvent]:
    while (event := await queue.get()) is not None:
        yield event
