"""Wraps what assembly code builds, where there is an observer; without one, everything is returned as it is."""

from jdisagg.dispatch.ports import DecodePort, PeerPort, PrefillPort
from jdisagg.observe.mesh import ObservedExecutor
from jdisagg.observe.observer import Observer
from jdisagg.observe.path import ObservedPath, Path
from jdisagg.observe.ports import ObservedDecodePort, ObservedPeerPort, ObservedPrefillPort
from jdisagg.scheduler.commands import Executor


def mesh(worker: str, executor: Executor, observer: Observer | None) -> Executor:
    return ObservedExecutor(worker, executor, observer) if observer else executor


def prefill(worker: str, port: PrefillPort, observer: Observer | None) -> PrefillPort:
    return ObservedPrefillPort(worker, port, observer) if observer else port


def decode(worker: str, port: DecodePort, observer: Observer | None) -> DecodePort:
    return ObservedDecodePort(worker, port, observer) if observer else port


def peer(receiver: str, port: PeerPort, observer: Observer | None) -> PeerPort:
    """`receiver` is the worker that pulls from it."""
    return ObservedPeerPort(receiver, port, observer) if observer else port


def path(whole: Path, observer: Observer | None) -> Path:
    return ObservedPath(whole, observer) if observer else whole
