"""Runs the batches of a folder in the background, below all other requests, and continues them
after a restart of the server."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from jdisagg.dispatch.caller import calling
from jdisagg.dispatch.frontend import MAX_PRIORITY
from jdisagg.errors import JdisaggError
from jdisagg.service.batch_folder import ENDED, Batch, BatchFolder
from jdisagg.service.batch_lines import (
    AnswerFile,
    BatchLine,
    BatchReply,
    LineFault,
    answer_line,
    checked,
    error_line,
    read_lines,
    send_lines,
)

AT_ONCE = 32  # requests of all batches
WINDOW_SECONDS = 24 * 3600

log = logging.getLogger(__name__)

_encode = msgspec.json.encode


class BatchJobs:
    """Use it on one event loop. `answer`: function that answers the body of a request at a path."""

    def __init__(
        self, folder: BatchFolder, answer: Callable[[str, bytes], Awaitable[BatchReply]]
    ) -> None:
        self.folder = folder
        self._answer = answer
        self._on = False
        self._room = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Continues the batches that have not ended."""
        self._on = True
        for batch in self.running:
            if batch.id not in self._tasks:
                self._begin(batch)

    @property
    def running(self) -> list[Batch]:
        return [one for one in self.folder.batches.values() if one.status not in ENDED]

    def stop(self) -> None:
        """Sends no further requests until the next start."""
        self._on = False
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        self.stop()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()))
        self.folder.close()

    def add(self, batch: Batch) -> None:
        self.folder.keep(batch)
        if self._on:
            self._begin(batch)

    def cancel(self, batch: Batch) -> None:
        """Cancels a batch that has not ended. Its answers so far are kept."""
        if batch.status not in ENDED:
            self._enter(batch, "cancelling")
            if (task := self._tasks.get(batch.id)) is not None:
                task.cancel()

    def _begin(self, batch: Batch) -> None:
        task = asyncio.create_task(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._ended(batch))

    def _ended(self, batch: Batch) -> None:
        del self._tasks[batch.id]
        if self._on and batch.status not in ENDED:  # started again, or to be cancelled
            self._begin(batch)

    def _enter(self, batch: Batch, status: str) -> None:
        batch.status = status
        batch.times.setdefault(f"{status}_at", int(time.time()))
        self.folder.keep(batch)

    async def _run(self, batch: Batch) -> None:
        if batch.status == "cancelling":
            return self._end(batch, "cancelled")
        try:
            await self._send(batch)
        except (JdisaggError, OSError) as error:
            log.exception("batch %s failed", batch.id)
            batch.faults = [_fault(error)]
            self._end(batch, "failed")

    async def _send(self, batch: Batch) -> None:
        source = self.folder.content(batch.input_file_id)
        if batch.status == "validating":
            ids, batch.faults = await asyncio.to_thread(checked, source, batch.endpoint)
            batch.total = len(ids)
            if batch.faults:
                return self._enter(batch, "failed")
            self._enter(batch, "in_progress")
        if batch.status == "in_progress":
            late = await self._in_time(batch)
            return self._end(batch, "expired" if late else "completed")
        # A server ended while it finalized the batch.
        self._end(batch, "completed" if time.time() < batch.expires_at else "expired")

    async def _in_time(self, batch: Batch) -> bool:
        """Sends the requests that have no answer. Returns whether the batch expired."""
        with contextlib.ExitStack() as files:
            output, errors = (
                files.enter_context(contextlib.closing(AnswerFile(path)))
                for path in (self.folder.answers(batch, failed=one) for one in (False, True))
            )
            batch.completed, batch.failed = len(output.ids), len(errors.ids)
            source = self.folder.content(batch.input_file_id)
            done = output.ids | errors.ids

            def left() -> list[BatchLine]:
                lines = read_lines(source)
                return [
                    one for one in lines if isinstance(one, BatchLine) and one.custom_id not in done
                ]

            def take(line: BatchLine, reply: BatchReply) -> None:
                (errors if reply.failed else output).add(answer_line(line, reply))
                done.add(line.custom_id)
                batch.completed += not reply.failed
                batch.failed += reply.failed

            lines = await asyncio.to_thread(left)
            seconds = max(0.0, batch.expires_at - time.time())
            try:
                async with asyncio.timeout(seconds):
                    with calling(batch.owner.caller):
                        await send_lines(lines, self._answering(batch), take, AT_ONCE)
            except TimeoutError:
                message = "the batch's completion window ended before this request was answered"
                for line in lines:
                    if line.custom_id not in done:
                        errors.add(error_line(line, "batch_expired", message))
                        batch.failed += 1
                return True
        return False

    def _answering(self, batch: Batch) -> Callable[[BatchLine], Awaitable[BatchReply]]:
        async def answer(line: BatchLine) -> BatchReply:
            seconds = max(1.0, batch.expires_at - time.time())
            ours = {
                "priority": -MAX_PRIORITY,
                "request_id": f"{batch.id}-{line.number}",
                "deadline_seconds": seconds,
                "stream": False,
            }
            async with self._room:
                return await self._answer(line.url, _encode({**line.body, **ours}))

        return answer

    def _end(self, batch: Batch, status: str) -> None:
        """Makes files of the answers. It may run again after a kill."""
        if status != "cancelled":
            self._enter(batch, "finalizing")
        of = self.folder
        batch.output_file_id = of.adopt(of.answers(batch, failed=False), batch, "output")
        batch.error_file_id = of.adopt(of.answers(batch, failed=True), batch, "errors")
        self._enter(batch, status)


def _fault(error: Exception) -> LineFault:
    return LineFault(0, type(error).__name__, str(error))
