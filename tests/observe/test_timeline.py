"""Timelines: a request's phases in order, across processes and clocks, in a format that viewers read."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.observe.observer import Observer
from jdisagg.observe.timeline import OFF, Timeline, handoff_ref, offer_ref, request_ref
from jdisagg.observe.trace_events import merge, read_timelines
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import Faults, toy_limits
from tests.fakes.virtual_time import VirtualClock, run_virtually
from tests.observe.observed import ObservedCluster
from tests.observe.trace_format import check


def trace_of(cluster: ObservedCluster, folder: Path, request: str | None = None) -> list[dict]:
    cluster.observer.write_timeline(folder)
    return check(merge(read_timelines(folder), request))


def starts(events: list[dict], name: str) -> list[int]:
    return [event["ts"] for event in events if event["name"] == name]


def ends(events: list[dict], name: str) -> list[int]:
    return [event["ts"] + event.get("dur", 0) for event in events if event["name"] == name]


def test_a_disaggregated_request_shows_all_its_phases_in_order(tmp_path: Path) -> None:
    async def main() -> list[dict]:
        async with ObservedCluster(prefill=toy_limits(chunk_buckets=(8,))) as cluster:
            await asyncio.gather(*(cluster.collect(toy_request(number, prompt_tokens=30)) for number in range(3)))
            return trace_of(cluster, tmp_path, request="r1")

    events = run_virtually(main)
    assert {event["args"]["request"] for event in events} == {"r1"}
    assert len(starts(events, "request")) == 1
    (started,), (ended,) = starts(events, "request"), ends(events, "request")
    assert all(started <= event["ts"] and event["ts"] + event.get("dur", 0) <= ended for event in events)
    assert ends(events, "reserve")[0] <= starts(events, "prefill wait")[0] <= starts(events, "prefill compute")[0]
    chunks, chunk_ends = starts(events, "prefill chunk"), ends(events, "prefill chunk")
    assert len(chunks) == 4, "30 tokens in chunks of 8"
    assert all(end <= start for end, start in zip(chunk_ends, chunks[1:], strict=False)), "chunks of one request follow each other"
    offers, pulls, inserts, verified = (starts(events, name) for name in ("offer", "pull", "insert", "verified"))
    assert len(offers) == len(pulls) == len(inserts) == len(verified) >= 8, "four chunks of two layer groups"
    for offer, pull, arrived, inserted, good in zip(
        offers, pulls, sorted(ends(events, "pull")), sorted(ends(events, "insert")), sorted(verified), strict=True
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
            await asyncio.gather(*(cluster.collect(toy_request(number, prompt_tokens=20)) for number in range(3)))
            return trace_of(cluster, tmp_path)

    mesh = [event for event in run_virtually(main) if "request" not in event["args"]]
    assert {"prefill chunk", "decode steps", "insert"} <= {event["name"] for event in mesh}
    assert sum(event["args"].get("admits", 0) for event in mesh) == 3


def test_a_local_prefill_is_found_by_its_reservation(tmp_path: Path) -> None:
    async def main() -> list[dict]:
        async with ObservedCluster(mode=Mode.CHUNKED) as cluster:
            await cluster.collect(toy_request(4, prompt_tokens=30))
            return trace_of(cluster, tmp_path, request="r4")

    events = run_virtually(main)
    assert starts(events, "prefill chunk") and starts(events, "first span") and starts(events, "decode") and starts(events, "admit")


def test_every_child_of_every_request_is_admitted_in_its_own_row(tmp_path: Path) -> None:
    async def main() -> list[dict]:
        async with ObservedCluster(decode=toy_limits(ranks=2)) as cluster:
            await asyncio.gather(
                *(cluster.collect(toy_request(number, prompt_tokens=1 + 3 * number, n=1 + number % 3)) for number in range(8))
            )
            return trace_of(cluster, tmp_path)

    admits = [(event["args"].get("request"), event["args"]["child"]) for event in run_virtually(main) if event["name"] == "admit"]
    assert sorted(admits) == [(f"r{number}", child) for number in range(8) for child in range(1 + number % 3)]


def test_a_retry_shows_its_cause_and_its_attempt(tmp_path: Path) -> None:
    async def main() -> list[dict]:
        faults = Faults(pull_error=lambda nth: "the wire broke" if nth < 12 else "")
        async with ObservedCluster(decode_faults=faults) as cluster:
            await cluster.collect(toy_request(1))
            again = cluster.path.counters["legs_failed"] + cluster.decode.counters["sources_replaced"]
            assert again > 0, "the fault took effect"
            return trace_of(cluster, tmp_path, request="r1")

    events = run_virtually(main)
    retries = [event for event in events if event["name"] == "retry"]
    assert retries and retries[0]["args"]["attempt"] >= 1 and retries[0]["args"]["cause"] in ("HandoffError", "source_lost")
    assert [event for event in events if event["name"] == "pull" and event["args"].get("error") == "the wire broke"]
    assert min(starts(events, "failed") + starts(events, "source lost")) <= retries[0]["ts"]


def test_processes_are_aligned_by_their_wall_clocks(tmp_path: Path) -> None:
    def process(name: str, monotonic: float) -> Timeline:
        return Timeline(name, now=lambda: monotonic, wall=lambda: 5000.0)

    router, worker = process("router", 100.0), process("worker", 9.0)
    router.span("request", 98.0, 100.0, request_ref("a"))
    worker.link(offer_ref(2**63 + 1), handoff_ref(2**64 - 1))
    router.link(handoff_ref(2**64 - 1), request_ref("a"))
    worker.span("prefill chunk", 7.5, 8.0, offer_ref(2**63 + 1))
    router.write(tmp_path)
    worker.write(tmp_path)
    events = check(merge(read_timelines(tmp_path), "a"))
    at = {event["name"]: (event["ts"], event["dur"]) for event in events}
    assert at == {"request": (0, 2_000_000), "prefill chunk": (500_000, 500_000)}
    assert len({event["pid"] for event in events}) == 2, "two processes, though one pid wrote both files"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5), st.sampled_from(["a", "b", ""])), max_size=30))
def test_whatever_overlaps_the_rows_nest(spans: list[tuple[float, float, str]]) -> None:
    import tempfile

    timeline = Timeline("p", now=lambda: 0.0, wall=lambda: 1.7e9)
    for started, seconds, request in spans:
        timeline.span("x", started, started + seconds, request_ref(request) if request else None)
    with tempfile.TemporaryDirectory() as folder:
        timeline.write(folder)
        assert len(check(merge(read_timelines(folder)))) == len(spans)


def test_the_ring_keeps_the_newest() -> None:
    timeline = Timeline("p", capacity_events=10)
    for number in range(100):
        timeline.instant(str(number), float(number))
    assert len(timeline) == 10


def test_what_is_off_records_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        observer = Observer("p", now=VirtualClock().now)
        assert observer.timeline is OFF
        async with ObservedCluster(observer) as cluster:
            request = toy_request(1)
            cluster.check_against_oracle(request, await cluster.collect(request))
        assert observer.write_timeline(tmp_path) is None

    run_virtually(main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"anchor": 3}', json.dumps({"anchor": {"wall": 1, "monotonic": 1}, "events": [1]})])
def test_a_broken_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "x-1.timeline.json").write_text(content)
    with pytest.raises(ConfigError, match="x-1.timeline.json"):
        read_timelines(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        read_timelines(tmp_path)
