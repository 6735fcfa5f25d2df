"""Events of a router: placement decisions, predictions with measured values, and arrived KV.

`RouterEvents` is the Protocol of listeners. `NoRouterEvents` is a base class for listeners of some
events, and `RouterEventsList` forwards events to several."""

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
        """Placement decided or refused on this snapshot. Deferred requests are decided later."""
        ...

    def measured(self, what: str, predicted: float, actual: float) -> None:
        """Predicted and measured seconds of "ttft" or "tpot"."""
        ...

    def handed_over(self, prefill: str | None, decode: str) -> None:
        """The first token was decoded from KV that `prefill` computed (None: the decode worker).
        Once per attempt."""
        ...


class NoRouterEvents:
    """Ignores all events."""

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
    """Forwards each event to all `listeners`."""

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
