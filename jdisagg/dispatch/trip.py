"""What the parts of a leg share: the facts that they post, the workers' ports, a reservation, and the request's own circumstances.

Plain data and small helpers; decides nothing.
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from jdisagg.clock import limit
from jdisagg.dispatch.ports import Child, DecodePort, PrefillPort, Reservation, ReserveCall
from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.plain import plain
from jdisagg.request import Request, TokenLogprobs

CLOSE_SECONDS = 5.0
# What is owed to a worker that has just failed us; another waits to take over.
FAILED_CLOSE_SECONDS = 0.5

Port = TypeVar("Port")


@plain
class Tokens:
    child: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    kv_bytes_moved: int = 0
    exposed_transfer_seconds: float = 0.0


@plain
class Waited:
    """Time spent in queues before any token."""

    seconds: float


@plain
class Preempted:
    child: int


@plain
class Retried:
    """Something failed inside the leg and was made up for: `cause` is the name of its counter."""

    cause: str


@plain
class LegEnded:
    """The leg is over; `error` is None when every child came to its own end."""

    leg: object
    error: Exception | None


@plain
class DeadlinePassed:
    """The request's time is over; posted once, by the journey's own timer."""


Fact = Tokens | Waited | Preempted | Retried | LegEnded | DeadlinePassed


@plain
class Cluster:
    """The ports of all workers, by name; the mappings may be live. `address`: where a worker listens, for its peers; empty where
    they know it by name. `boot_id`: of its process; 0 where that is not known."""

    prefill: Mapping[str, PrefillPort]
    decode: Mapping[str, DecodePort]
    address: Callable[[str], str] = lambda name: ""
    boot_id: Callable[[str], int] = lambda name: 0

    def prefill_port(self, name: str) -> PrefillPort:
        """Raises UnavailableError when the worker has gone since it was chosen."""
        return _port(self.prefill, name)

    def decode_port(self, name: str) -> DecodePort:
        """Raises UnavailableError when the worker has gone since it was chosen."""
        return _port(self.decode, name)


class Notes(Protocol):
    """Who keeps account of what a leg has its workers do. Each may be said more than once."""

    def prefill_sent(self) -> None: ...
    def prefilled(self) -> None: ...
    def handed_over(self, prefill: str | None, decode: str) -> None: ...


class Unheard:
    """Nobody does."""

    def prefill_sent(self) -> None: ...
    def prefilled(self) -> None: ...
    def handed_over(self, prefill: str | None, decode: str) -> None: ...


@plain
class Hold:
    """A reservation at a decode worker, made under `attempt`."""

    worker: str
    port: DecodePort
    reservation: Reservation
    attempt: int

    @property
    def key(self) -> int:
        return self.reservation.reservation_id


@plain
class Trip:
    """What all parts of a leg know of its request. `next_attempt` draws attempt numbers; `choose_prefill` and `choose_decode` name another
    worker than these, or raise UnavailableError."""

    cluster: Cluster
    request: Request
    new_id: Callable[[], int]
    now: Callable[[], float]
    arrived_at: float
    deadline: float
    post: Callable[[Fact], None]
    next_attempt: Callable[[], int]
    choose_prefill: Callable[[frozenset[str]], Awaitable[str]]
    choose_decode: Callable[[frozenset[str]], Awaitable[str]]

    def remaining(self) -> float:
        return max(1e-3, self.deadline - self.now())

    def age(self) -> float:
        return self.now() - self.arrived_at

    async def reserve(self, worker: str, children: tuple[Child, ...], attempt: int) -> Hold:
        port = self.cluster.decode_port(worker)
        call = ReserveCall(self.request, attempt, children, self.remaining(), self.age())
        return Hold(worker, port, await port.reserve(call), attempt)


async def quietly(call: Awaitable[None], seconds: float = CLOSE_SECONDS) -> None:
    """A clean-up call whose failure changes nothing: the worker's lease frees what it missed."""
    with contextlib.suppress(JdisaggError, TimeoutError), limit(seconds):
        await call


def _port(ports: Mapping[str, Port], name: str) -> Port:
    port = ports.get(name)
    if port is None:
        raise UnavailableError(f"worker {name!r} has left since it was chosen; another attempt goes elsewhere")
    return port
