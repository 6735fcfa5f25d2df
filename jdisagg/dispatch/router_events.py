"""What a router reports as it happens: placement's decisions, predictions held against what came,
and KV that arrived.

One Protocol, given to whatever makes the events; `NoRouterEvents` is the base of those that want
some of them, `RouterEventsList` passes them on to several."""

from typing import Protocol

from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import PlacementOutcome, PlacementPolicy, PlacementQuery


class RouterEvents(Protocol):
    def answered(
        self,
        state: ClusterState,
        query: PlacementQuery,
        now: float,
        policy: PlacementPolicy,
        answer: PlacementOutcome,
    ) -> None:
        """Placement decided or refused, on this snapshot. What is deferred is asked again."""
        ...

    def measured(self, what: str, predicted: float, actual: float) -> None:
        """Seconds of "ttft" or "tpot", as predicted and as they were."""
        ...

    def handed_over(self, prefill: str | None, decode: str) -> None:
        """KV that `prefill` computed was decoded from (None: the decode worker computed it), once
        an attempt."""
        ...


class NoRouterEvents:
    """Takes no note of any."""

    def answered(
        self,
        state: ClusterState,
        query: PlacementQuery,
        now: float,
        policy: PlacementPolicy,
        answer: PlacementOutcome,
    ) -> None: ...

    def measured(self, what: str, predicted: float, actual: float) -> None: ...

    def handed_over(self, prefill: str | None, decode: str) -> None: ...


class RouterEventsList:
    """Passes each event on to all of `listeners`."""

    def __init__(self, *listeners: RouterEvents) -> None:
        self._listeners = listeners

    def answered(
        self,
        state: ClusterState,
        query: PlacementQuery,
        now: float,
        policy: PlacementPolicy,
        answer: PlacementOutcome,
    ) -> None:
        for listener in self._listeners:
            listener.answered(state, query, now, policy, answer)

    def measured(self, what: str, predicted: float, actual: float) -> None:
        for listener in self._listeners:
            listener.measured(what, predicted, actual)

    def handed_over(self, prefill: str | None, decode: str) -> None:
        for listener in self._listeners:
            listener.handed_over(prefill, decode)


NO_ROUTER_EVENTS = NoRouterEvents()
