"""Spans of the latest traced requests, which the web page draws as timelines.

`RecentRequests` is an OpenTelemetry exporter that stores spans by trace id. A client that has
chosen the trace id of its request can read the request's spans while the request runs. When the
store is full, the oldest trace is dropped."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

KEPT_TRACES = 256
KEPT_SPANS = 4096
ROOT = "request"

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class RecentSpan:
    """A span with its attributes. Times are in seconds since the epoch. `ended` is None for an
    instant, which has no duration."""

    name: str
    started: float
    ended: float | None
    args: dict[str, Value]


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A traced request that has ended. `trace` is its trace id, in 32 hexadecimal digits."""

    trace: str
    request: str
    started: float
    seconds: float
    result: str
    prompt_tokens: int


class RecentRequests(SpanExporter):
    """Stores the spans of the latest traced requests. Use it on one event loop only."""

    def __init__(self, traces: int = KEPT_TRACES, spans: int = KEPT_SPANS) -> None:
        self._most_traces = traces
        self._most_spans = spans
        self._traces: OrderedDict[str, list[RecentSpan]] = OrderedDict()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            args: dict = dict(span.attributes or {})
            if "request" in args and span.context is not None:
                self._keep(f"{span.context.trace_id:032x}", span, args)
        return SpanExportResult.SUCCESS

    def spans(self, trace: str) -> tuple[RecentSpan, ...]:
        return tuple(sorted(self._traces.get(trace, ()), key=lambda span: span.started))

    def requests(self) -> tuple[RecentRequest, ...]:
        return tuple(
            _request(name, span)
            for name, spans in reversed(self._traces.items())
            for span in spans
            if span.name == ROOT
        )

    def _keep(self, name: str, span: ReadableSpan, args: dict[str, Value]) -> None:
        spans = self._traces.get(name)
        if spans is None:
            spans = self._traces[name] = []
            if len(self._traces) > self._most_traces:
                self._traces.popitem(last=False)
        # The root span is always stored. It ends last and has the result.
        if len(spans) >= self._most_spans and span.name != ROOT:
            return
        instant = args.pop("instant", False)
        started, ended = (span.start_time or 0) / 1e9, (span.end_time or 0) / 1e9
        spans.append(RecentSpan(span.name, started, None if instant else ended, args))


def _request(trace: str, root: RecentSpan) -> RecentRequest:
    ended = root.started if root.ended is None else root.ended
    return RecentRequest(
        trace,
        str(root.args.get("request", "")),
        root.started,
        ended - root.started,
        str(root.args.get("result", "")),
        int(root.args.get("prompt_tokens", 0)),
    )
