"""A watch on an executor that copies out the KV of a sequence: on a prefill mesh after the last
chunk of its prompt, on a decode mesh before the step that admits it.

It reads the page arrays themselves, by NumPy and the pages that the command names, and none of the
programs under test."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.messages.step_commands import (
    DecodeSteps,
    InsertBlock,
    PrefillChunk,
    StepCommand,
    StepResult,
)
from tests.end_to_end.process_matrix.cases import Seen


class KvWatch:
    """Implements `scheduler.executor.Executor`. KV is keyed by prompt length, in which the prompts
    of a case differ."""

    def __init__(self, inner: MeshExecutor) -> None:
        self.limits, self.card = inner.limits, inner.card
        self._inner = inner
        self._run = inner.run
        self._seen = Seen()
        self._looks: list[asyncio.Future[StepResult]] = []
        self._copy = jax.jit(lambda layers: jax.tree.map(jnp.copy, layers))

    def run(self, command: StepCommand) -> asyncio.Future[StepResult]:
        if isinstance(command, DecodeSteps):
            for admit in command.admits:
                self._look(admit.rank, admit.pages, admit.position)
        running = self._run(command)
        if isinstance(command, PrefillChunk):
            self._seen.chunks += 1
            for row in command.rows:
                if row.samples:
                    self._look(row.rank, row.pages, row.start + len(row.tokens))
        self._seen.inserts += isinstance(command, InsertBlock)
        return running

    def close(self) -> None:
        self._inner.close()

    async def seen(self) -> Seen:
        """What was seen since the last call."""
        looks, self._looks = self._looks, []
        await asyncio.gather(*looks)
        seen, self._seen = self._seen, Seen()
        return seen

    def _look(self, rank: int, pages: tuple[int, ...], tokens: int) -> None:
        seen = self._seen
        self._looks.append(
            self._inner.on_dispatch_thread(
                lambda: seen.kv.__setitem__(tokens, self._read(rank, pages, tokens))
            )
        )

    def _read(self, rank: int, pages: tuple[int, ...], tokens: int) -> np.ndarray:
        """Reads a device copy, because a view of an array that is donated later is invalid."""
        pool = self._inner._pool
        position = np.arange(tokens)
        page = rank * pool.rank_rows + np.asarray(pages)[position // pool.page_size]
        parts = [np.asarray(part) for layer in self._copy(pool.layers) for part in layer]
        return np.stack([part[page, :, position % pool.page_size].swapaxes(0, 1) for part in parts])
