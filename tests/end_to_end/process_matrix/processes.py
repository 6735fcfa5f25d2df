"""The parent's side of the matrix: two processes for all cases, the request path over their
workers, and the same case in one process."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import numpy as np

from jdisagg.clock import MonotonicClock
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.token_stream import TokenStream
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.replica import Replica
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import Request, SamplingParams
from jdisagg.service.internal.remote_ports import RemoteWorker
from models.checkpoint import load_model
from models.tokenizer import Tokenizer
from tests.end_to_end.clusters import LLAMA, assert_all_free, collect
from tests.end_to_end.process_matrix.cases import (
    ANSWER_SECONDS,
    DECODE_DEVICES,
    NEW_TOKENS,
    PREFILL_DEVICES,
    PROMPTS,
    Case,
    Streams,
)
from tests.end_to_end.process_matrix.host import Build, Built, Failed, Gone, Look, Looked, TearDown
from tests.end_to_end.process_matrix.kv_watch import KvWatch

ROOT = Path(__file__).resolve().parents[3]
QUIET_SECONDS = 20.0
TOKENIZER = Tokenizer.from_directory(LLAMA)
PROMPT_IDS = tuple(tuple(TOKENIZER.encode(prompt)) for prompt in PROMPTS)


@dataclass
class HostProcess:
    """A child; `ask` gives a command and waits for what became of it."""

    child: "subprocess.Popen[bytes]"
    connection: Connection

    async def ask(self, command: Build | Look | TearDown) -> Built | Looked | Gone:
        answer = await asyncio.to_thread(self._ask, command)
        assert not isinstance(answer, Failed), answer.traceback
        return answer

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        self.connection.close()

    def _ask(self, command: Build | Look | TearDown) -> Built | Looked | Gone | Failed:
        self.connection.send(command)
        assert self.connection.poll(ANSWER_SECONDS), f"process {self.child.pid} does not answer"
        return self.connection.recv()


@dataclass
class Run:
    """What a case gave: its streams, and what sender and receiver saw of each prompt run by
    itself."""

    streams: Streams
    sent: Looked
    received: Looked


class Matrix:
    """The two processes."""

    def __init__(self, sender: HostProcess, receiver: HostProcess) -> None:
        self._sender, self._receiver = sender, receiver

    async def run(self, case: Case) -> Run:
        """The case with its halves in two processes; every page must be free again afterwards, and
        nothing on offer."""
        try:
            built = await asyncio.gather(
                self._sender.ask(Build(WorkerRole.PREFILL, case)),
                self._receiver.ask(Build(WorkerRole.DECODE, case)),
            )
            return await self._drive(
                case, *(one.address for one in built if isinstance(one, Built))
            )
        finally:
            await self._receiver.ask(TearDown())
            await self._sender.ask(TearDown())

    async def _drive(self, case: Case, sender: str, receiver: str) -> Run:
        prefill, decode = RemoteWorker(sender), RemoteWorker(receiver)
        addresses = {WorkerRole.PREFILL.value: sender, WorkerRole.DECODE.value: receiver}
        path = RequestPath(
            ClusterPorts(
                {WorkerRole.PREFILL.value: prefill.prefill},
                {WorkerRole.DECODE.value: decode.decode},
                addresses.__getitem__,
            ),
            lambda request: TokenStream(
                TOKENIZER,
                request.prompt_token_ids,
                request.sampling.stop,
                request.sampling.min_tokens,
            ),
            case.engine().limits,
            MonotonicClock(),
        )
        try:
            alone = [await complete(path, request) for request in requests()]
            sent, received = await self._sender.ask(Look()), await self._receiver.ask(Look())
            assert isinstance(sent, Looked) and isinstance(received, Looked)
            together = list(
                await asyncio.gather(*(complete(path, request) for request in requests()))
            )
            await self._quiet(path)
            return Run(Streams(alone, together), sent, received)
        finally:
            await prefill.aclose()
            await decode.aclose()

    async def _quiet(self, path: RequestPath) -> None:
        async with asyncio.timeout(QUIET_SECONDS):
            while True:
                looked = await self._sender.ask(Look())
                assert isinstance(looked, Looked)
                statuses = await path.status()
                if looked.offers == 0 and all(
                    one.free_pages == one.total_pages and not one.handoffs for one in statuses
                ):
                    return
                await asyncio.sleep(0.02)


@contextmanager
def two_processes(lends: bool = False) -> Iterator[Matrix]:
    """They have this process's XLA flags and folder of compiled programs, end with it, and are gone
    when this is left. `lends`: as of `host.main`."""
    hosts = []
    try:
        hosts += [_start(lends), _start(lends)]  # which is which does not matter yet
        yield Matrix(*hosts)
    finally:
        for host in hosts:
            host.end()


def _start(lends: bool) -> HostProcess:
    """The pipe between them closes when either is gone, which the other notices."""
    ours, its = Pipe()
    cache: str = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    program = (
        "from tests.end_to_end.process_matrix.host import main;"
        f" main({its.fileno()}, {cache!r}, {lends})"
    )
    with its:
        return HostProcess(
            subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, pass_fds=(its.fileno(),)),
            ours,
        )


async def in_process(case: Case) -> tuple[Streams, dict[int, np.ndarray]]:
    """The reference: the same layouts, page sizes, type and codec in this process; and the KV that
    its receiver saw."""
    watches: list[KvWatch] = []

    def watch(name: str, instance: Replica) -> KvWatch:
        watches.append(KvWatch(instance.executor))
        return watches[-1]

    engine = case.engine()
    load = lambda layout, devices: load_model(LLAMA, layout, devices, dtype=case.dtype)  # noqa: E731
    prefill, decode = jax.devices()[PREFILL_DEVICES], jax.devices()[DECODE_DEVICES]
    cluster = EmbeddedCluster(
        engine, load, TOKENIZER, [*prefill[: engine.prefill.layout.devices], *decode], record=watch
    )
    await cluster.start()
    try:
        alone = [await complete(cluster, request) for request in requests()]
        seen = await watches[-1].seen()
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
