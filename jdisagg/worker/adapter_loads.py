"""Loads the LoRA adapters of requests into the slots of a worker's mesh.

A request identifies its adapter by the hash of its content, and gives its folder. If the adapter is
not loaded, the request waits for the load. If all slots are used, it first waits for a slot.
Reading the files does not block the mesh. A command then writes the slot between two steps, in the
mesh's order."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable

from jdisagg.clock import limit
from jdisagg.errors import DeadlineExceededError, InvalidRequestError
from jdisagg.messages.step_commands import DiskResult, PutAdapter, ReadAdapter
from jdisagg.request import Adapter, Request
from jdisagg.scheduler.prompt_room import AdapterTable
from jdisagg.telemetry import Counters
from jdisagg.worker.step_loop import StepLoop

_NOTHING_HELD = contextlib.nullcontext()


class AdapterLoads:
    """The adapters of one worker. `in_use`: function that returns the requests whose adapters must
    stay loaded."""

    def __init__(
        self,
        worker: str,
        slots: int,
        loop: StepLoop,
        counters: Counters,
        in_use: Callable[[], Iterable[Request]],
    ) -> None:
        self.table = AdapterTable(slots)
        self._worker, self._loop, self._counters, self._in_use = worker, loop, counters, in_use
        self._held: Counter[str] = Counter()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()

    @property
    def idle(self) -> bool:
        return not (self._loads or self._held)

    def held(
        self, request: Request, seconds: float
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Returns a context manager that waits until the request's adapter is loaded. The adapter
        stays loaded within the context. Before the context ends, the caller must add the request to
        the requests that `in_use` returns. Raises InvalidRequestError if the adapter cannot be
        served. Raises DeadlineExceededError if the adapter was not loaded within `seconds`."""
        return self._hold(request.adapter, seconds) if request.adapter else _NOTHING_HELD

    @contextlib.asynccontextmanager
    async def _hold(self, adapter: Adapter, seconds: float) -> AsyncIterator[None]:
        late = DeadlineExceededError(
            f"worker {self._worker!r} had no slot for adapter {adapter.name!r} within the"
            f" request's {seconds:g} s; all {self.table.slots} of --adapters are used"
        )
        self._held[adapter.digest] += 1
        try:
            with limit(seconds, late):
                await self._load(adapter)
            yield
        finally:
            self._held -= Counter((adapter.digest,))  # drops those at zero
            self.poke()

    def poke(self) -> None:
        if self.table.slots:
            self._freed.set()

    def stop(self) -> None:
        for load in self._loads.values():
            load.cancel()

    async def _load(self, adapter: Adapter) -> None:
        if not self.table.slots:
            raise InvalidRequestError(
                f"adapter {adapter.name!r}: worker {self._worker!r} has no adapter slots; start it"
                " with --adapters"
            )
        while adapter.digest not in self.table:
            load = self._loads.get(adapter.digest) or self._begin(adapter)
            if load is not None:
                await asyncio.shield(load)
                continue
            self._freed.clear()
            await self._freed.wait()
        self.table.use(adapter.digest)

    def _begin(self, adapter: Adapter) -> "asyncio.Task[None] | None":
        running = {one.adapter.digest for one in self._in_use() if one.adapter is not None}
        slot = self.table.take(adapter.digest, running.union(self._held))
        if slot is None:
            return None
        evicted = self.table.evictions - self._counters["adapter_evictions"]
        if evicted:
            self._counters.add("adapter_evictions", evicted)
        load = asyncio.get_running_loop().create_task(self._run(adapter, slot))
        self._loads[adapter.digest] = load
        load.add_done_callback(lambda _: self._ended(adapter.digest))
        return load

    def _ended(self, digest: str) -> None:
        load = self._loads.pop(digest)
        if not load.cancelled():
            load.exception()  # marks the error as retrieved, in case no request waits any longer

    async def _run(self, adapter: Adapter, slot: int) -> None:
        digest, loaded = adapter.digest, False
        try:
            number = self._loop.next_number()
            result = await self._loop.submit(ReadAdapter(number, digest, adapter.path))
            assert isinstance(result, DiskResult)
            if result.error:
                raise InvalidRequestError(result.error)
            self._loop.fire(PutAdapter(self._loop.next_number(), digest, slot))
            self._counters.add("adapter_loads")
            self._counters.add("adapter_load_bytes", result.bytes_moved)
            loaded = True
        finally:
            self.table.load_ended(digest, loaded)
            self.poke()
