"""Spans: a request's phases in order, across processes and clocks."""

import asyncio
import threading

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from jdisagg.config import Mode
from jdisagg.messages.trace_context import incoming, within
from jdisagg.observe.observer import Observer
from jdisagg.observe.tracing import Tracing, handoff_key, of_request, offer_key, tracer_provider
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import Faults, toy_limits
from tests.fakes.virtual_time import VirtualClock, run_virtually
from tests.observe.observed import ObservedCluster
from tests.observe.spans import Spans, TracedObserver, ends, starts, trace_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def tracing_of(name: str, now: float, wall: float) -> tuple[Tracing, Spans]:
    spans = Spans(name)
    provider = tracer_provider(name, [SimpleSpanProcessor(spans)])
    return Tracing(provider, lambda: now, lambda: wall), spans


def test_a_disaggregated_request_shows_all_its_phases_in_order() -> None:
    async def main() -> list[dict]:
        async with ObservedCluster(prefill=toy_limits(chunk_buckets=(8,))) as cluster:
            await asyncio.gather(
                *(cluster.collect(toy_request(number, prompt_tokens=30)) for number in range(3))
            )
            return trace_of(cluster.observer, "r1")

    events = run_virtually(main)
    assert {event["args"]["request"] for event in events} == {"r1"}
    assert len(starts(events, "request")) == 1
    (started,), (ended,) = starts(events, "request"), ends(events, "request")
    for event in events:
        assert started <= event["ts"] and event["ts"] + event.get("dur", 0) <= ended
    reserved, waited = ends(events, "reserve")[0], starts(events, "prefill wait")[0]
    assert reserved <= waited <= starts(events, "prefill compute")[0]
    chunks, chunk_ends = starts(events, "prefill chunk"), ends(events, "prefill chunk")
    assert len(chunks) == 4, "30 tokens in chunks of 8"
    follow = zip(chunk_ends, chunks[1:], strict=False)
    assert all(end <= start for end, start in follow), "chunks of one request follow each other"
    offers, pulls, inserts, verified = (
        starts(events, name) for name in ("offer", "pull", "insert", "verified")
    )
    assert len(offers) == len(pulls) == len(inserts) == len(verified) >= 8, (
        "four chunks of two layer groups"
    )
    arrived, inserted = sorted(ends(events, "pull")), sorted(ends(events, "insert"))
    for steps in zip(offers, pulls, arrived, inserted, sorted(verified), strict=True):
        assert list(steps) == sorted(steps)
    assert min(starts(events, "pull")) < chunk_ends[-1], "transfers overlap the prefill"
    (exposed_end,) = ends(events, "exposed transfer")
    assert exposed_end == max(verified)
    (admitted,) = starts(events, "admit")
    (handed,) = ends(events, "hand-off to first span")
    assert starts(events, "first token")[0] <= exposed_end <= min(admitted, handed)
    decodes = starts(events, "decode")
    assert len(decodes) >= 5 and min(decodes) >= handed and min(ends(events, "decode")) > admitted


def test_a_local_prefill_is_found_by_its_reservation() -> None:
    async def main() -> list[dict]:
        async with ObservedCluster(mode=Mode.CHUNKED) as cluster:
            await cluster.collect(toy_request(4, prompt_tokens=30))
            return trace_of(cluster.observer, "r4")

    events = run_virtually(main)
    for name in ("prefill chunk", "first span", "decode", "admit"):
        assert starts(events, name), name


def test_every_child_of_every_request_is_admitted_in_its_own_row() -> None:
    async def main() -> list[dict]:
        async with ObservedCluster(decode=toy_limits(ranks=2)) as cluster:
            await asyncio.gather(
                *(
                    cluster.collect(
                        toy_request(number, prompt_tokens=1 + 3 * number, n=1 + number % 3)
                    )
                    for number in range(8)
                )
            )
            return trace_of(cluster.observer)

    admits = [
        (event["args"].get("request"), event["args"]["child"])
        for event in run_virtually(main)
        if event["name"] == "admit"
    ]
    assert sorted(admits) == [
        (f"r{number}", child) for number in range(8) for child in range(1 + number % 3)
    ]


def test_a_retry_shows_its_cause_and_its_attempt() -> None:
    async def main() -> list[dict]:
        faults = Faults(pull_error=lambda nth: "the wire broke" if nth < 12 else "")
        async with ObservedCluster(decode_faults=faults) as cluster:
            await cluster.collect(toy_request(1))
            again = (
                cluster.path.counters["attempts_failed"]
                + cluster.decode.counters["sources_replaced"]
            )
            assert again > 0, "the fault took effect"
            return trace_of(cluster.observer, "r1")

    events = run_virtually(main)
    retries = [event for event in events if event["name"] == "retry"]
    assert retries and retries[0]["args"]["attempt"] >= 1
    assert retries[0]["args"]["cause"] in ("HandoffError", "source_lost")
    errors = [event["args"].get("error") for event in events if event["name"] == "pull"]
    assert "the wire broke" in errors
    assert min(starts(events, "failed") + starts(events, "source lost")) <= retries[0]["ts"]


def test_processes_are_aligned_by_their_wall_clocks() -> None:
    router, router_spans = tracing_of("router", 100.0, 5000.0)
    worker, worker_spans = tracing_of("worker", 9.0, 5000.0)
    span, context = router.start("request", 98.0, Context(), "a")
    worker.span("prefill chunk", 7.5, 8.0, offer_key(2**63 + 1))
    worker.own(handoff_key(2**64 - 1), context)
    worker.own(offer_key(2**63 + 1), handoff_key(2**64 - 1))
    router.end(span, 100.0)
    events = [*router_spans.events("a"), *worker_spans.events("a")]
    at = {event["name"]: (event["ts"] - events[0]["ts"], event["dur"]) for event in events}
    assert at == {"request": (0, 2_000_000), "prefill chunk": (500_000, 500_000)}


def test_a_span_waits_for_the_one_who_knows_whose_it_is_and_is_not_lost_without() -> None:
    tracing, spans = tracing_of("p", 0.0, 5000.0)
    tracing.span("early", 1.0, 2.0, offer_key(1))
    tracing.span("nobody's", 1.0, 2.0, offer_key(2))
    assert not spans.kept
    tracing.own(offer_key(1), of_request(Context(), "r"))
    tracing.flush()
    owners = {event["name"]: event["args"].get("request") for event in spans.events()}
    assert owners == {"early": "r", "nobody's": None}


def test_a_process_ends_without_its_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.observe.tracing.OTLP_SECONDS", 0.05)
    ended, answered = threading.Event(), threading.Event()

    class Unanswered(SpanProcessor):
        def shutdown(self) -> None:
            answered.wait(20)
            ended.set()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return answered.wait(20)

    Tracing(tracer_provider("p", [Unanswered()])).close()
    assert not ended.is_set(), "it still waits, and the process ends"
    answered.set()


def test_the_parts_of_a_request_hang_under_it_and_it_under_its_clients_span() -> None:
    async def main() -> list[ReadableSpan]:
        observer = TracedObserver("test", now=VirtualClock().now)
        client = incoming({"traceparent": f"{TRACEPARENT}01"})
        async with ObservedCluster(observer) as cluster:
            with within(client):
                await cluster.collect(toy_request(1))
        return observer.spans.kept

    spans = run_virtually(main)
    root = next(span for span in spans if span.name == "request")
    assert root.parent is not None and f"{root.parent.span_id:x}" == "b7ad6b7169203331"
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {
        "0af7651916cd43dd8448eb211c80319c"
    }
    names = {span.name for span in spans}
    assert {"reserve", "prefill", "prefill chunk", "pull", "insert", "admit", "decode"} <= names


def test_a_client_that_records_no_trace_has_none_recorded() -> None:
    async def main() -> None:
        client = incoming({"traceparent": f"{TRACEPARENT}00"})
        async with ObservedCluster() as cluster:
            with within(client):
                await cluster.collect(toy_request(1))
            assert not trace_of(cluster.observer, "r1")

    run_virtually(main)


def test_what_is_off_records_nothing() -> None:
    async def main() -> None:
        observer = Observer("p", now=VirtualClock().now)
        assert not observer.tracing.on
        async with ObservedCluster(observer) as cluster:
            request = toy_request(1)
            cluster.check(request, await cluster.collect(request))

    run_virtually(main)
