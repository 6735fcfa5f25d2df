"""Functions that wrap the parts of a process (ports, meshes, the request path) to measure them. If
the observer is None, each function returns its argument unchanged."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from jdisagg.dispatch.frontend import ServingPath
from jdisagg.dispatch.membership import WorkerPorts
from jdisagg.messages.ports import DecodePort, HandoffSource, PeerPort, PrefillPort
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.registry import WorkerCard
from jdisagg.observe.mesh import ObservedExecutor
from jdisagg.observe.observer import Observer
from jdisagg.observe.path import ObservedPath
from jdisagg.observe.ports import ObservedDecode, ObservedPeer, ObservedPrefill, Served
from jdisagg.observe.request_log import RequestLog
from jdisagg.scheduler.executor import Executor
from jdisagg.worker.worker import Worker

P = TypeVar("P")


def mesh(worker: str, executor: Executor, observer: Observer | None) -> Executor:
    return ObservedExecutor(worker, executor, observer) if observer else executor


def path(whole: ServingPath, observer: Observer | None) -> ServingPath:
    return through(ServingPath, whole, ObservedPath(observer)) if observer else whole


def prefill(worker: str, port: PrefillPort, observer: Observer | None) -> PrefillPort:
    return through(PrefillPort, port, ObservedPrefill(worker, observer)) if observer else port


def decode(worker: str, port: DecodePort, observer: Observer | None) -> DecodePort:
    return through(DecodePort, port, ObservedDecode(worker, observer)) if observer else port


def peer(receiver: str, port: PeerPort, observer: Observer | None) -> PeerPort:
    return through(PeerPort, port, ObservedPeer(receiver, observer)) if observer else port


def calls(worker: Worker, caller: Worker | None, observer: Observer | None) -> tuple[object, ...]:
    if observer is None:
        return ()
    if caller is not None:
        return (ObservedPeer(caller.name, observer),)
    observed = ObservedDecode if worker.role.decodes else ObservedPrefill
    return (observed(worker.name, observer),)


def ports(
    open_ports: Callable[[WorkerCard], WorkerPorts], observer: Observer | None
) -> Callable[[WorkerCard], WorkerPorts]:
    if observer is None:
        return open_ports

    def opened(card: WorkerCard) -> WorkerPorts:
        bare = open_ports(card)
        return replace(
            bare,
            prefill=prefill(card.name, bare.prefill, observer) if bare.prefill else None,
            decode=decode(card.name, bare.decode, observer) if bare.decode else None,
        )

    return opened


def peers(
    receiver: str, resolve: Callable[[HandoffSource], PeerPort], observer: Observer | None
) -> Callable[[HandoffSource], PeerPort]:
    if observer is None:
        return resolve
    return lambda source: peer(receiver, resolve(source), observer)


def request_log(each: bool, observer: Observer | None, waiting: Callable[[], int]) -> RequestLog:
    if observer is None:
        return RequestLog(each, waiting=waiting)
    observer.metrics.watch_waiting(waiting)
    errors = observer.metrics.requests.errors
    return RequestLog(each, lambda code, error: errors.labels(code, error).inc(), waiting)


def served(protocol: type[P], worker: str, port: P, observer: Observer | None) -> P:
    """Wraps a port of a worker in the worker's own process, so that spans in the worker belong to
    the trace of the calling process."""
    if observer is None or not observer.tracing.on:
        return port
    return through(protocol, port, Served(worker, observer))
