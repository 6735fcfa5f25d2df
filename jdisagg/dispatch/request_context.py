"""Objects that all requests of a router share (the workers' ports, the placer, the clock, the
limits and the reader of images), and calls that every attempt makes."""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from jdisagg.clock import Clock, limit
from jdisagg.config import LimitsConfig
from jdisagg.dispatch.placer import Placer
from jdisagg.dispatch.request_run import RequestRun
from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.ports import (
    Child,
    DecodePort,
    HandoffSource,
    PrefillPort,
    Reservation,
    ReserveCall,
)
from jdisagg.messages.weights import WeightsPort
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.plain import plain
from jdisagg.prompt.images import PromptImage
from jdisagg.request import Request
from jdisagg.router.accounts import Accounts
from jdisagg.telemetry import Counters

Port = TypeVar("Port")


@dataclass(frozen=True, slots=True)
class ClusterPorts:
    """Access to the workers. The mappings may be live views of a changing membership.

    Args:
        address: Function that returns the address at which a worker listens for its peers, or "" if
            peers find the worker by its name.
        statuses: Function that returns the last status of each worker. None means that statuses are
            requested from the workers.
        accounts: Snapshot of the workers that a `Membership` maintains. None means that the request
            path requests statuses before each placement.
    """

    prefill: Mapping[str, PrefillPort]
    decode: Mapping[str, DecodePort]
    address: Callable[[str], str] = lambda name: ""
    boot_id: Callable[[str], int] = lambda name: 0
    statuses: Callable[[], tuple[WorkerStatus, ...]] | None = None
    accounts: Accounts | None = None
    weights: Mapping[str, WeightsPort] = field(default_factory=dict)
    reported: Callable[[WorkerStatus], object] = lambda status: None

    def prefill_port(self, name: str) -> PrefillPort:
        """Returns the port of a prefill worker. Raises UnavailableError if the worker is gone."""
        return _port(self.prefill, name)

    def decode_port(self, name: str) -> DecodePort:
        """Returns the port of a decode worker. Raises UnavailableError if the worker is gone."""
        return _port(self.decode, name)


async def _not_read(image: PromptImage) -> bytes:
    raise UnavailableError(f"image at token {image.start} has no pixels; send them with the image")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Objects that all attempts of all requests share. `new_id` generates ids of hand-offs.
    `pixels` decodes the file of a request's image to pixels."""

    cluster: ClusterPorts
    placer: Placer
    limits: LimitsConfig
    clock: Clock
    new_id: Callable[[], int]
    counters: Counters
    pixels: Callable[[PromptImage], Awaitable[bytes]] = _not_read

    async def with_pixels(self, request: Request) -> Request:
        if not request.images:
            return request
        images = [
            replace(image, pixels=image.pixels or await self.pixels(image), file=b"")
            for image in request.images
        ]
        return replace(request, images=tuple(images))


@plain
class ReservationHandle:
    worker: str
    port: DecodePort
    reservation: Reservation
    attempt: int

    @property
    def key(self) -> int:
        return self.reservation.reservation_id


async def reserve(
    context: RequestContext,
    run: RequestRun,
    worker: str,
    children: tuple[Child, ...],
    attempt: int,
    whole: bool = False,
    computes: bool = False,
    peer: tuple[HandoffSource | None, int] = (None, 0),
) -> ReservationHandle:
    """Reserves pages for `children` at a decode worker and returns the reservation.

    Args:
        whole: Whether the worker receives all KV of the children, even KV that it has cached.
        computes: Whether the worker itself computes the part of the prompt that it has not cached.
        peer: Another worker that has the prompt cached (or None), and the number of cached tokens.

    Raises:
        JdisaggError: The worker refused, or did not answer.
    """
    port = context.cluster.decode_port(worker)
    request = run.request
    request = await context.with_pixels(request) if computes else request.without_pixels()
    remaining, age = run.remaining_seconds(), run.age_seconds()
    aside = run.children[children[0].index].aside(context.clock.now())
    call = ReserveCall(request, attempt, children, remaining, age, whole, computes, *peer, aside)
    return ReservationHandle(worker, port, await port.reserve(call), attempt)


async def quietly(call: Awaitable[None], seconds: float) -> None:
    """Ignores a failure, because the worker frees its resources anyway when their lease expires."""
    with contextlib.suppress(JdisaggError, TimeoutError), limit(seconds):
        await call


def _port(ports: Mapping[str, Port], name: str) -> Port:
    port = ports.get(name)
    if port is None:
        raise UnavailableError(
            f"worker {name!r} has left since it was chosen; the next attempt uses another"
        )
    return port
