"""The parent's side of the matrix: two processes for all cases, the request path to their workers,
and the same case in one process."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdisagg.clock import MonotonicClock
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.token_stream import TokenStream
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import Request, SamplingParams
from jdisagg.service.internal.remote_ports import RemoteWorker
from launch.model import loader
from models.tokenizer import Tokenizer
from tests.end_to_end.clusters import assert_all_free, collect
from tests.end_to_end.process_matrix.cases import (
    ANSWER_SECONDS,
    DECODE_DEVICES,
    NEW_TOKENS,
    PREFILL_DEVICES,
    PROMPTS,
    Case,
    Streams,
)
from tests.end_to_end.process_matrix.host import Looked
from tests.end_to_end.process_matrix.kv_watch import KvWatch
from tests.shapes import LLAMA

ROOT = Path(__file__).resolve().parents[3]
QUIET_SECONDS = 20.0
TOKENIZER = Tokenizer.from_directory(LLAMA)
PROMPT_IDS = tuple(tuple(TOKENIZER.encode(prompt)) for prompt in PROMPTS)


@dataclass
class HostProcess:
    """A child process of `host.main`."""

    child: "subprocess.Popen[bytes]"
    connection: Connection

    async def call(self, name: str, *arguments: object) -> Any:
        """Calls a method of the child's `Host` and returns its result."""
        done, result = await asyncio.to_thread(self._call, name, arguments)
        assert done, result
        return result

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        self.connection.close()

    def _call(self, name: str, arguments: tuple[object, ...]) -> tuple[bool, Any]:
        self.connection.send((name, arguments))
        assert self.connection.poll(ANSWER_SECONDS), f"process {self.child.pid} does not answer"
        return self.connection.recv()


@dataclass
class Run:
    """Streams of a case, and what sender and receiver held of each prompt run alone."""

    streams: Streams
    sent: Looked
    received: Looked


class Matrix:
    """The two processes."""

    def __init__(self, sender: HostProcess, receiver: HostProcess) -> None:
        self._sender, self._receiver = sender, receiver

    async def run(self, case: Case) -> Run:
        """Runs the case with its halves in two processes. Every page must be free again afterwards,
        and no offer be left."""
        try:
            built = await asyncio.gather(
                self._sender.call("build", WorkerRole.PREFILL, case),
                self._receiver.call("build", WorkerRole.DECODE, case),
            )
            return await self._drive(case, *built)
        finally:
            await self._receiver.call("tear_down")
            await self._sender.call("tear_down")

    async def _drive(self, case: Case, sender: str, receiver: str) -> Run:
        prefill, decode = RemoteWorker(sender), RemoteWorker(receiver)
        addresses = {"prefill": sender, "decode": receiver}
        path = RequestPath(
            ClusterPorts(
                {"prefill": prefill.prefill}, {"decode": decode.decode}, addresses.__getitem__
            ),
            lambda request: TokenStream.of(TOKENIZER, request),
            case.engine().limits,
            MonotonicClock(),
        )
        try:
            alone = [await complete(path, request) for request in requests()]
            sent, received = await self._sender.call("look"), await self._receiver.call("look")
            together = list(await asyncio.gather(*(complete(path, one) for one in requests())))
            await self._quiet(path)
            return Run(Streams(alone, together), sent, received)
        finally:
            await prefill.aclose()
            await decode.aclose()

    async def _quiet(self, path: RequestPath) -> None:
        async with asyncio.timeout(QUIET_SECONDS):
            while True:
                looked = await self._sender.call("look")
                statuses = await path.status()
                if looked.offers == 0 and all(
                    one.free_pages == one.total_pages and not one.handoffs for one in statuses
                ):
                    return
                await asyncio.sleep(0.02)


@contextmanager
def two_processes() -> Iterator[Matrix]:
    """Starts two processes with this process's XLA flags and folder of compiled programs. They end
    with this context, or with this process."""
    hosts = []
    try:
        hosts += [_start(), _start()]  # which is which does not matter yet
        yield Matrix(*hosts)
    finally:
        for host in hosts:
            host.end()


def _start() -> HostProcess:
    """The pipe closes when either process ends, which ends the other."""
    ours, its = Pipe()
    cache: str = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    program = (
        f"from tests.end_to_end.process_matrix.host import main; main({its.fileno()}, {cache!r})"
    )
    with its:
        return HostProcess(
            subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, pass_fds=(its.fileno(),)),
            ours,
        )


async def in_process(case: Case) -> tuple[Streams, dict[int, np.ndarray]]:
    """The reference: the same layouts, page sizes, dtype and codec in this process, and the KV in
    its decode mesh's pages."""
    engine = case.engine()
    load = loader(engine.model.directory, case.dtype)
    prefill, decode = jax.devices()[PREFILL_DEVICES], jax.devices()[DECODE_DEVICES]
    cluster = EmbeddedCluster(
        engine, load, TOKENIZER, [*prefill[: engine.prefill.layout.devices], *decode]
    )
    watch = KvWatch(cluster.decode.executor)
    cluster.decode.executor.run = watch.run  # type: ignore[method-assign]
    await cluster.start()
    try:
        alone = [await complete(cluster, request) for request in requests()]
        seen = await watch.seen()
        together = list(
            await asyncio.gather(*(complete(cluster, request) for request in requests()))
        )
        await assert_all_free(cluster)
        return Streams(alone, together), seen.kv
    finally:
        await cluster.stop()


def requests() -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [Request(f"prompt {number}", ids, sampling) for number, ids in enumerate(PROMPT_IDS)]


async def complete(path: RequestPath | EmbeddedCluster, request: Request) -> list[int]:
    return collect([event async for event in path.stream(request)]).tokens[0]
