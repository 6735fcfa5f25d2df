"""What do many workers cost a router? CPU time per request, traffic of heartbeats, and the time
after a restart of the router until it has all workers.

    python -m benchmarks.many_workers --name=many_workers        # root: it makes namespaces

A router (`jdisagg router` with the tiny model's tokenizer) and its workers are on hosts made of
network namespaces (tests/hosts). The workers' engine is fake: a worker is a real gRPC server with a
real registration and heartbeats, and answers each call with constant tokens at a steady pace. So
the figures are those of the router and the network, and not of an engine.

- idle: the router's CPU time and the bytes on its network device, while there are no requests.
- load: the same while clients send requests. The CPU time of the idle router is subtracted.
- restart: the router is killed and started again. Times from the new process's start, and from its
  first line of output that it listens, until its status has all workers."""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import psutil
from absl import app, flags

from benchmarks.measure import save
from jdisagg.client import AsyncClient, Client
from jdisagg.config import ServiceConfig
from jdisagg.errors import JdisaggError
from jdisagg.ids import random_id
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import (
    FetchCall,
    FetchReply,
    FirstToken,
    GenerateCall,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    Span,
    SpanEnd,
)
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.service.internal.registry import RegistryClient
from jdisagg.service.internal.worker_service import decode_service, peer_service, prefill_service
from jdisagg.service.server import GrpcServer
from tests.end_to_end.clusters import LLAMA
from tests.hosts.hosts import Hosts, Process, hosts
from tests.service.port_worker import Worker

_WORKERS = flags.DEFINE_integer("workers", 50, "Workers; every fifth prefills.")
_HOSTS = flags.DEFINE_integer("hosts", 16, "Namespaces: one of the router, the others of workers.")
_REQUESTS = flags.DEFINE_integer("requests", 400, "Requests of the load.")
_CLIENTS = flags.DEFINE_integer("clients", 32, "Requests at the same time.")
_TOKENS = flags.DEFINE_integer("tokens", 32, "Tokens of each answer.")
_PROMPT = flags.DEFINE_integer("prompt", 128, "Tokens of each prompt.")
_SECONDS = flags.DEFINE_float("seconds", 10.0, "Time for which the idle router is watched.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
_SERVE = flags.DEFINE_list("serve", [], "Internal: names of the workers of this process.")
_OWN = flags.DEFINE_string("own", "", "Internal: address of this process's host.")
_ROUTER = flags.DEFINE_string("router", "", "Internal: address of the router.")

PORT, FIRST_PORT = 19200, 19300
STEP_SECONDS = 0.01
CONTEXT = 4096
MODEL = ModelCard("tiny", "llama", 260, CONTEXT, "float32", 64)
START_SECONDS = 240.0


class FakeWorker(Worker):
    """Answers with constant tokens: one each `STEP_SECONDS`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self._lengths = name, dict[int, int]()

    @property
    def role(self) -> WorkerRole:
        return WorkerRole.PREFILL if self.name.startswith("prefill") else WorkerRole.DECODE

    async def status(self) -> WorkerStatus:
        return WorkerStatus(
            self.name, self.role, "tp=1", (8000,), (8000,), len(self._lengths), 0, 256, 16, CONTEXT,
            can_prefill=self.role is WorkerRole.PREFILL, chunk_tokens=2048,
        )  # fmt: skip

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        await asyncio.sleep(STEP_SECONDS)
        return PrefillReply((FirstToken(0, 5),), 0.0, STEP_SECONDS)

    async def reserve(self, call: ReserveCall) -> Reservation:
        reservation = random_id()
        self._lengths[reservation] = call.request.sampling.max_tokens
        return Reservation(reservation, self.name, 0, 30.0)

    async def fetch(self, call: FetchCall) -> FetchReply:
        raise NotImplementedError("no worker of this benchmark fetches blocks")

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        length = self._lengths[call.reservation_id]
        try:
            for index in range(length):
                await asyncio.sleep(STEP_SECONDS)
                end = SpanEnd.LENGTH if index == length - 1 else None
                yield Span(0, index, (5,), end=end)
        finally:
            del self._lengths[call.reservation_id]


async def serve(names: list[str]) -> None:
    """Serves the workers of one process until it is killed."""
    kept: list[object] = []  # a server that is not referred to ends
    for number, name in enumerate(names):
        worker, boot_id, port = FakeWorker(name), random_id(), FIRST_PORT + number
        role = prefill_service if worker.role is WorkerRole.PREFILL else decode_service
        services = (role(worker), peer_service(worker))
        server = GrpcServer(services, ServiceConfig(_OWN.value, port), boot_id)
        await server.start()
        address = f"{_OWN.value}:{port}"
        card = WorkerCard(name, boot_id, worker.role, address, Layout(), MODEL)
        registration = RegistryClient((_ROUTER.value,), card, worker.status)
        registration.start()
        kept += [server, registration]
    print("serves", flush=True)
    await asyncio.Event().wait()


class Cluster:
    """The router and the workers on their hosts. Host 1 has the router."""

    def __init__(self, made: Hosts, names: list[str]) -> None:
        self._hosts, self._names = made, names
        self.target = f"{made.address(1)}:{PORT}"
        self.router = self.start_router()
        for host in range(2, _HOSTS.value + 1):
            own = names[host - 2 :: _HOSTS.value - 1]
            command = [sys.executable, "-m", "benchmarks.many_workers", f"--serve={','.join(own)}"]
            command += [f"--own={made.address(host)}", f"--router={self.target}"]
            made.run(host, command)

    def start_router(self) -> Process:
        command = [sys.executable, "-m", "launch.router", f"--model={LLAMA}", "--http_port=-1"]
        command += [f"--host={self._hosts.address(1)}", f"--port={PORT}", "--canary_seconds=0"]
        return self._hosts.run(1, command)

    def wait_for_all(self) -> float:
        """Waits until the router has all workers. Returns the time at which it had them."""
        until = time.monotonic() + START_SECONDS
        with Client(self.target) as client:
            while time.monotonic() < until:
                try:
                    if len(client.status()) == len(self._names):
                        return time.monotonic()
                except JdisaggError:
                    pass
                time.sleep(0.02)
        raise TimeoutError(f"not all workers registered: {self.router.log.read_text()[-2000:]}")

    def used(self) -> dict[str, float]:
        """Returns the router's CPU seconds, the bytes of its network device, and the time."""
        times = psutil.Process(self.router.pid).cpu_times()
        shown = self._hosts.in_host(1, "ip", "-s", "-j", "link", "show", "up").stdout
        device = next(link for link in json.loads(shown) if link["ifname"] != "lo")["stats64"]
        return {
            "cpu": times.user + times.system,
            "in": device["rx"]["bytes"],
            "out": device["tx"]["bytes"],
            "at": time.monotonic(),
        }


def rates(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    seconds = after["at"] - before["at"]
    found = {name: (after[name] - before[name]) / seconds for name in ("cpu", "in", "out")}
    return {
        "seconds": seconds,
        "cpu_share": found["cpu"],
        "bytes_in_per_second": found["in"],
        "bytes_out_per_second": found["out"],
    }


async def load(target: str) -> None:
    """Sends all requests, `clients` at a time, and checks each answer's tokens."""
    waiting = iter(range(_REQUESTS.value))
    async with AsyncClient(target) as client:

        async def one_after_the_other() -> None:
            for number in waiting:
                prompt = [(number * 31 + at * 7) % 250 + 1 for at in range(_PROMPT.value)]
                done = await client.complete(
                    token_ids=prompt, max_tokens=_TOKENS.value, temperature=0.0, ignore_eos=True
                )
                assert done.choices[0].token_ids == [5] * _TOKENS.value, done

        await asyncio.gather(*(one_after_the_other() for _ in range(_CLIENTS.value)))


def measure(cluster: Cluster) -> dict[str, object]:
    cluster.wait_for_all()
    time.sleep(2.0)
    before = cluster.used()
    time.sleep(_SECONDS.value)
    idle = rates(before, cluster.used())
    before = cluster.used()
    asyncio.run(load(cluster.target))
    after = cluster.used()
    loaded = rates(before, after)
    cpu = after["cpu"] - before["cpu"] - idle["cpu_share"] * loaded["seconds"]
    loaded["requests_per_second"] = _REQUESTS.value / loaded["seconds"]
    loaded["cpu_ms_per_request"] = 1e3 * cpu / _REQUESTS.value
    cluster.router.kill()
    began = time.monotonic()
    cluster.router = cluster.start_router()
    cluster.router.wait_for("router listens on", START_SECONDS)
    listens = time.monotonic()
    known = cluster.wait_for_all()
    restart = {"from_start_seconds": known - began, "from_listening_seconds": known - listens}
    beat = idle["bytes_in_per_second"] / _WORKERS.value
    return {
        "workers": _WORKERS.value,
        "hosts": _HOSTS.value,
        "tokens": {"prompt": _PROMPT.value, "answer": _TOKENS.value},
        "idle": {**idle, "bytes_in_per_worker_and_second": beat},
        "load": loaded,
        "restart": restart,
        "load_average_after": round(os.getloadavg()[0], 2),
    }


def main(_: list[str]) -> None:
    if _SERVE.value:
        asyncio.run(serve(_SERVE.value))
    names = [
        f"{'decode' if number % 5 else 'prefill'}-{number}" for number in range(_WORKERS.value)
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = stack.enter_context(hosts(_HOSTS.value, folder))
        figures = measure(Cluster(made, names))
    print(json.dumps(figures, indent=1))
    if _NAME.value:
        save(_NAME.value, figures)


if __name__ == "__main__":
    app.run(main)
