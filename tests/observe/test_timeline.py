"""Timelines: a request's phases in order, across processes and clocks, in a format that viewers
read."""

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.observe.observer import Observer
from jdisagg.observe.trace_events import (
    FILE_SUFFIX,
    TraceEventExporter,
    merge,
    read_timelines,
    slowest,
)
from jdisagg.observe.tracing import Tracing, handoff_key, of_request, offer_key, tracer_provider
from jdisagg.trace_context import incoming, within
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import Faults, toy_limits
from tests.fakes.virtual_time import VirtualClock, run_virtually
from tests.observe.observed import ObservedCluster
from tests.observe.trace_format import check

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def trace_of(observer: Observer, folder: Path, request: str | None = None) -> list[dict]:
    assert observer.timeline is not None
    observer.tracing.flush()
    check(json.loads(observer.timeline.write(folder).read_text()))  # a trace as it is
    return merged(folder, request)


def merged(folder: Path, *requests: str | None) -> list[dict]:
    wanted = None if requests in ((), (None,)) else {str(request) for request in requests}
    return check(msgspec.json.decode(msgspec.json.encode(merge(read_timelines(folder), wanted))))


def tracing_of(
    name: str, now: float, wall: float, capacity: int = 1000
) -> tuple[Tracing, TraceEventExporter]:
    exporter = TraceEventExporter(name, capacity)
    provider = tracer_provider(name, [SimpleSpanProcessor(exporter)])
    return Tracing(provider, lambda: now, lambda: wall), exporter


def starts(events: list[dict], name: str) -> list[int]:
    return [event["ts"] for event in events if event["name"] == name]


def ends(events: list[dict], name: str) -> list[int]:
    return [event["ts"] + event.get("dur", 0) for event in events if event["name"] == name]


def test_a_disaggregated_request_shows_all_its_phases_in_order(tmp_path: Path) -> None:
    async def main() -> list[dict]:
        async with ObservedCluster(prefill=toy_limits(chunk_buckets=(8,))) as cluster:
            await asyncio.gather(
                *(cluster.collect(toy_request(number, prompt_tokens=30)) for number in range(3))
            )
            return trace_of(cluster.observer, tmp_path, request="r1")

    events = run_virtually(main)
    assert {event["args"]["request"] for event in events} == {"r1"}
    assert len(starts(events, "request")) == 1
    (started,), (ended,) = starts(events, "request"), ends(events, "request")
    assert all(
        started <= event["ts"] and event["ts"] + event.get("dur", 0) <= ended for event in events
    )
    assert (
        ends(events, "reserve")[0]
        <= starts(events, "prefill wait")[0]
        <= starts(events, "prefill compute")[0]
    )
    chunks, chunk_ends = starts(events, "prefill chunk"), ends(events, "prefill chunk")
    assert len(chunks) == 4, "30 tokens in chunks of 8"
    assert all(end <= start for end, start in zip(chunk_ends, chunks[1:], strict=False)), (
        "chunks of one request follow each other"
    )
    offers, pulls, inserts, verified = (
        starts(events, name) for name in ("offer", "pull", "insert", "verified")
    )
    assert len(offers) == len(pulls) == len(inserts) == len(verified) >= 8, (
        "four chunks of two layer groups"
    )
    for offer, pull, arrived, inserted, good in zip(
        offers,
        pulls,
        sorted(ends(events, "pull")),
        sorted(ends(events, "insert")),
        sorted(verified),
        strict=True,
    ):
        assert offer <= pull <= arrived <= inserted <= good
    assert min(starts(events, "pull")) < chunk_ends[-1], "transfers overlap the prefill"
    (exposed_end,) = ends(events, "exposed transfer")
    assert exposed_end == max(verified)
    (admitted,) = starts(events, "admit")
    (handed,) = ends(events, "hand-off to first span")
    assert starts(events, "first token")[0] <= exposed_end <= min(admitted, handed)
    decodes = starts(events, "decode")
    assert len(decodes) >= 5 and min(decodes) >= handed and min(ends(events, "decode")) > admitted


def test_chunks_and_steps_also_show_on_the_mesh_that_ran_them(tmp_path: Path) -> None:
    async def main() -> list[dict]:
        async with ObservedCluster() as cluster:
            await asyncio.gather(
                *(cluster.collect(toy_request(number, prompt_tokens=20)) for number in range(3))
            )
            return trace_of(cluster.observer, tmp_path)

    mesh = [event for event in run_virtually(main) if "request" not in event["args"]]
    assert {"prefill chunk", "decode steps", "insert"} <= {event["name"] for event in mesh}
    assert sum(event["args"].get("admits", 0) for event in mesh) == 3


def test_a_local_prefill_is_found_by_its_reservation(tmp_path: Path) -> None:
    async def main() -> list[dict]:
        async with ObservedCluster(mode=Mode.CHUNKED) as cluster:
            await cluster.collect(toy_request(4, prompt_tokens=30))
            return trace_of(cluster.observer, tmp_path, request="r4")

    events = run_virtually(main)
    assert (
        starts(events, "prefill chunk")
        and starts(events, "first span")
        and starts(events, "decode")
        and starts(events, "admit")
    )


def test_every_child_of_every_request_is_admitted_in_its_own_row(tmp_path: Path) -> None:
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
            return trace_of(cluster.observer, tmp_path)

    admits = [
        (event["args"].get("request"), event["args"]["child"])
        for event in run_virtually(main)
        if event["name"] == "admit"
    ]
    assert sorted(admits) == [
        (f"r{number}", child) for number in range(8) for child in range(1 + number % 3)
    ]


def test_a_retry_shows_its_cause_and_its_attempt(tmp_path: Path) -> None:
    async def main() -> list[dict]:
        faults = Faults(pull_error=lambda nth: "the wire broke" if nth < 12 else "")
        async with ObservedCluster(decode_faults=faults) as cluster:
            await cluster.collect(toy_request(1))
            again = (
                cluster.path.counters["attempts_failed"]
                + cluster.decode.counters["sources_replaced"]
            )
            assert again > 0, "the fault took effect"
            return trace_of(cluster.observer, tmp_path, request="r1")

    events = run_virtually(main)
    retries = [event for event in events if event["name"] == "retry"]
    assert (
        retries
        and retries[0]["args"]["attempt"] >= 1
        and retries[0]["args"]["cause"] in ("HandoffError", "source_lost")
    )
    assert [
        event
        for event in events
        if event["name"] == "pull" and event["args"].get("error") == "the wire broke"
    ]
    assert min(starts(events, "failed") + starts(events, "source lost")) <= retries[0]["ts"]


def test_processes_are_aligned_by_their_wall_clocks(tmp_path: Path) -> None:
    router, router_file = tracing_of("router", 100.0, 5000.0)
    worker, worker_file = tracing_of("worker", 9.0, 5000.0)
    span, context = router.start("request", 98.0, Context(), "a")
    worker.span("prefill chunk", 7.5, 8.0, offer_key(2**63 + 1))
    worker.own(handoff_key(2**64 - 1), context)
    worker.own(offer_key(2**63 + 1), handoff_key(2**64 - 1))
    router.end(span, 100.0)
    router_file.write(tmp_path)
    worker_file.write(tmp_path)
    events = merged(tmp_path, "a")
    at = {event["name"]: (event["ts"], event["dur"]) for event in events}
    assert at == {"request": (0, 2_000_000), "prefill chunk": (500_000, 500_000)}
    assert len({event["pid"] for event in events}) == 2, (
        "two processes, though one pid wrote both files"
    )


def test_a_span_waits_for_the_one_who_knows_whose_it_is_and_is_not_lost_without(
    tmp_path: Path,
) -> None:
    tracing, file = tracing_of("p", 0.0, 5000.0)
    tracing.span("early", 1.0, 2.0, offer_key(1))
    tracing.span("nobody's", 1.0, 2.0, offer_key(2))
    assert len(file) == 0
    tracing.own(offer_key(1), of_request(Context(), "r"))
    tracing.flush()
    file.write(tmp_path)
    owners = {event["name"]: event["args"].get("request") for event in merged(tmp_path)}
    assert owners == {"early": "r", "nobody's": None}


def test_the_parts_of_a_request_hang_under_it_and_it_under_its_clients_span(tmp_path: Path) -> None:
    exported: list[ReadableSpan] = []

    class Kept(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            exported.extend(spans)
            return SpanExportResult.SUCCESS

    async def main() -> None:
        observer = Observer("test", timelines=True, now=VirtualClock().now)
        provider = tracer_provider("test", [SimpleSpanProcessor(Kept())])
        observer.tracing = Tracing(provider, VirtualClock().now)
        client = incoming(
            {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        )
        async with ObservedCluster(observer) as cluster:
            with within(client):
                await cluster.collect(toy_request(1))

    run_virtually(main)
    spans = [span for span in exported if "track" not in (span.attributes or {})]
    root = next(span for span in spans if span.name == "request")
    assert root.parent is not None and f"{root.parent.span_id:x}" == "b7ad6b7169203331"
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {
        "0af7651916cd43dd8448eb211c80319c"
    }
    names = {span.name for span in spans}
    assert {"reserve", "prefill", "prefill chunk", "pull", "insert", "admit", "decode"} <= names


def test_a_client_that_records_no_trace_has_none_recorded() -> None:
    async def main() -> None:
        client = incoming(
            {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
        )
        async with ObservedCluster() as cluster:
            with within(client):
                await cluster.collect(toy_request(1))
            assert cluster.observer.timeline is not None
            folder = Path(tempfile.mkdtemp())
            trace_of(cluster.observer, folder)
            assert not [event for event in merged(folder) if event["args"].get("request") == "r1"]

    run_virtually(main)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 5), st.sampled_from(["a", "b", ""])), max_size=30
    )
)
def test_whatever_overlaps_the_rows_nest(spans: list[tuple[float, float, str]]) -> None:
    tracing, file = tracing_of("p", 0.0, 1.7e9)
    for started, seconds, request in spans:
        owner = of_request(Context(), request) if request else None
        tracing.span("x", started, started + seconds, owner)
    with tempfile.TemporaryDirectory() as folder:
        file.write(folder)
        assert len(merged(Path(folder))) == len(spans)


def test_the_ring_keeps_the_newest(tmp_path: Path) -> None:
    tracing, file = tracing_of("p", 0.0, 1.7e9, capacity=10)
    for number in range(100):
        tracing.instant(str(number), float(number))
    file.write(tmp_path)
    assert {event["name"] for event in merged(tmp_path)} == {str(n) for n in range(90, 100)}


def test_the_slowest_requests_are_picked_by_how_long_they_took(tmp_path: Path) -> None:
    tracing, file = tracing_of("p", 0.0, 1.7e9)
    for name, seconds in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        span, context = tracing.start("request", 0.0, Context(), name)
        tracing.span("decode", 0.0, 9.0, context)
        tracing.end(span, seconds)
    file.write(tmp_path)
    files = read_timelines(tmp_path)
    assert slowest(files, 2) == ("b", "c")
    shown = merged(tmp_path, *slowest(files, 2))
    assert {event["args"]["request"] for event in shown} == {"b", "c"} and len(shown) == 4


def test_a_file_is_whole_when_spans_come_while_it_is_written(tmp_path: Path) -> None:
    tracing, file = tracing_of("p", 0.0, 1.7e9, capacity=20_000)
    for number in range(20_000):
        tracing.instant("x", float(number))
    writing = threading.Thread(target=file.write, args=(tmp_path,))
    writing.start()
    for number in range(2_000):
        tracing.instant("y", float(number))
    writing.join()
    assert len(merged(tmp_path)) == 20_000
    assert [path.name for path in tmp_path.iterdir()] == [f"p-{os.getpid()}{FILE_SUFFIX}"]


def test_what_is_off_records_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        observer = Observer("p", now=VirtualClock().now)
        assert observer.timeline is None and not observer.tracing.on
        async with ObservedCluster(observer) as cluster:
            request = toy_request(1)
            cluster.check(request, await cluster.collect(request))

    run_virtually(main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"anchor": 3}',
        json.dumps({"anchor": {"wall": 1, "monotonic": 1}, "events": [1]}),
    ],
)
def test_a_broken_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "x-1.timeline.json").write_text(content)
    with pytest.raises(ConfigError, match="x-1.timeline.json"):
        read_timelines(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no"):
        read_timelines(tmp_path)
