"""Orders from the test to the worker processes that it started, over a Unix socket with one JSON
object per line.

A worker connects at its start and sends its name and process id. The test sends `order` and
`let_go`, and the worker replies with `reached`. The worker's end is a separate thread, so that it
answers even if the event loop is blocked. A process that cannot connect is not part of a test."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.soak.moments import Moment, Moments, Order


@dataclass(frozen=True)
class Reached:
    """`worker` holds a hand-off at the order's moment. `other` is the worker on the other side, or
    "" if unknown."""

    number: int
    worker: str
    other: str


class OrderDesk:
    """The test's end. Used on one event loop."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._reached: dict[int, asyncio.Future[Reached]] = {}
        self._numbers = 0
        self.counts: dict[str, dict[str, int]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    def hold(
        self, workers: Iterable[str], moment: Moment, seconds: float
    ) -> "tuple[int, asyncio.Future[Reached]]":
        """Orders that the first of `workers` to reach the moment holds one hand-off there."""
        self._numbers += 1
        self._reached[self._numbers] = asyncio.get_running_loop().create_future()
        for worker in workers:
            self._send(worker, {"order": self._numbers, "moment": moment.value, "seconds": seconds})
        return self._numbers, self._reached[self._numbers]

    def let_go(self, number: int) -> None:
        for worker in list(self._writers):
            self._send(worker, {"let_go": number})
        self._reached.pop(number, None)

    @property
    def workers(self) -> set[str]:
        return set(self._writers)

    def _send(self, worker: str, message: dict[str, object]) -> None:
        writer = self._writers.get(worker)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = json.loads(await reader.readline())["name"]
        self._writers[name] = writer
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "counts" in message:
                    self.counts[f"{name} {message['pid']}"] = message["counts"]
                    continue
                future = self._reached.get(message["reached"])
                if future is not None and not future.done():
                    future.set_result(Reached(message["reached"], name, message["other"]))
                else:  # another was first
                    self._send(name, {"let_go": message["reached"]})
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            if self._writers.get(name) is writer:
                del self._writers[name]
            writer.close()


class OrderTaker:
    """The worker's end."""

    def __init__(self, path: str, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lock = threading.Lock()
        self.moments = Moments(
            lambda order, other: self._send({"reached": order.number, "other": other})
        )
        self._send({"name": name, "pid": os.getpid()})
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def count(self, counts: dict[str, int]) -> None:
        """Sends the numbers of faults that have taken effect so far."""
        self._send({"counts": counts, "pid": os.getpid()})

    def _send(self, message: dict[str, object]) -> None:
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        for line in self._socket.makefile("r"):
            message = json.loads(line)
            if "order" in message:
                self.moments.order(
                    Order(message["order"], Moment(message["moment"]), message["seconds"])
                )
            else:
                self.moments.let_go(message["let_go"])
