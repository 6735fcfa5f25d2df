"""An observer whose spans tests can read, as events: name, `ts` and `dur` in microseconds since the
epoch (an instant has no `dur`), `process`, and attributes as `args`."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from jdisagg.observe.observer import Observer


class Spans(SpanExporter):
    def __init__(self, process: str = "") -> None:
        self.process = process
        self.kept: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.kept.extend(spans)
        return SpanExportResult.SUCCESS

    def events(self, request: str | None = None) -> list[dict]:
        """Returns the events in order of their start: those of one request, or all."""
        events = [self._event(span) for span in self.kept]
        if request is not None:
            events = [event for event in events if event["args"].get("request") == request]
        return sorted(events, key=lambda event: event["ts"])

    def _event(self, span: ReadableSpan) -> dict:
        args: dict = dict(span.attributes or {})
        started = round((span.start_time or 0) / 1000)
        event = {"name": span.name, "ts": started, "process": self.process, "args": args}
        if not args.pop("instant", False):
            event["dur"] = round((span.end_time or 0) / 1000) - started
        return event


class TracedObserver(Observer):
    """Records the spans of all requests."""

    def __init__(self, process: str, **options: object) -> None:
        self.spans = Spans(process)
        super().__init__(process, [SimpleSpanProcessor(self.spans)], **options)  # type: ignore[arg-type]


def trace_of(observer: Observer, request: str | None = None) -> list[dict]:
    assert isinstance(observer, TracedObserver)
    observer.tracing.flush()
    return observer.spans.events(request)


def starts(events: list[dict], name: str) -> list[int]:
    return [event["ts"] for event in events if event["name"] == name]


def ends(events: list[dict], name: str) -> list[int]:
    return [event["ts"] + event.get("dur", 0) for event in events if event["name"] == name]
