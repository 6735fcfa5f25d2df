"""Events of a router: placement decisions, predicted and measured times, and received KV."""

from typing import Protocol

from jdisagg.router.decision import PlacementOutcome, PlacementQuery


class RouterEvents(Protocol):
    def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
        """Called when placement has placed or refused a request. A deferred request is reported
        only when it is finally placed or refused."""
        ...

    def measured(self, what: str, predicted: float, actual: float) -> None:
        """Called with the predicted and the measured seconds of `what`: "ttft" or "tpot"."""
        ...

    def handed_over(self, prefill: str | None, decode: str) -> None:
        """Called when an attempt decodes its first token from the KV that `prefill` computed.
        `prefill` is None if `decode` computed the KV itself."""
        ...


class NoRouterEvents:
    """Listener that ignores all events."""

    def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None: ...

    def measured(self, what: str, predicted: float, actual: float) -> None: ...

    def handed_over(self, prefill: str | None, decode: str) -> None: ...


class RouterEventsList:
    def __init__(self, *listeners: RouterEvents) -> None:
        self._listeners = listeners

    def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
        for listener in self._listeners:
            listener.answered(query, now, answer)

    def measured(self, what: str, predicted: float, actual: float) -> None:
        for listener in self._listeners:
            listener.measured(what, predicted, actual)

    def handed_over(self, prefill: str | None, decode: str) -> None:
        for listener in self._listeners:
            listener.handed_over(prefill, decode)


NO_ROUTER_EVENTS = NoRouterEvents()
