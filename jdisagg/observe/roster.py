"""The ports of workers that come and go, observed as they are opened: for a roster's factory and a worker's resolver of peers."""

from collections.abc import Callable
from dataclasses import replace

from jdisagg.dispatch.ports import HandoffSource, PeerPort
from jdisagg.dispatch.roster import WorkerCard, WorkerPorts
from jdisagg.observe.observer import Observer
from jdisagg.observe.ports import ObservedDecodePort, ObservedPeerPort, ObservedPrefillPort


def observe_ports(open_ports: Callable[[WorkerCard], WorkerPorts], observer: Observer) -> Callable[[WorkerCard], WorkerPorts]:
    """A factory for `Roster` that gives observed ports."""

    def opened(card: WorkerCard) -> WorkerPorts:
        ports = open_ports(card)
        return replace(
            ports,
            prefill=ObservedPrefillPort(card.name, ports.prefill, observer) if ports.prefill else None,
            decode=ObservedDecodePort(card.name, ports.decode, observer) if ports.decode else None,
        )

    return opened


def observe_peers(receiver: str, resolve: Callable[[HandoffSource], PeerPort], observer: Observer) -> Callable[[HandoffSource], PeerPort]:
    """A resolver for `receiver` that gives observed peers."""
    return lambda source: ObservedPeerPort(receiver, resolve(source), observer)
