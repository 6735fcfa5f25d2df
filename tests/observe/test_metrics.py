"""Metrics say what the cluster did: read back as Prometheus reads them, against the workers' own
counters and the oracle's tokens."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.errors import UnavailableError
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.observe.metrics import Metrics, Traffic
from jdisagg.observe.sources import pages_by_state
from jdisagg.request import AcceptedChild, Resumption
from jdisagg.telemetry import Counters
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import Faults, toy_limits
from tests.observe.observed import ObservedCluster, on_a_cluster
from tests.observe.samples import at, parse, total

PAGES = {"worker": "decode-0", "role": "decode", "rank": "0", "state": "free"}


async def _status() -> WorkerStatus:
    return WorkerStatus(
        name="decode-0",
        role=WorkerRole.DECODE,
        layout="dp=1",
        free_pages=(3,),
        total_pages=(8,),
        running=0,
        waiting=0,
        slots=4,
        page_size=4,
        context_tokens=64,
    )


@on_a_cluster()
async def test_what_is_scraped_equals_what_was_counted_and_delivered(
    cluster: ObservedCluster,
) -> None:
    before = parse(await cluster.observer.metrics.scrape())
    assert not any(name.startswith("jdisagg_generated") for name, _ in before)
    answers = await asyncio.gather(
        *(cluster.collect(toy_request(number, prompt_tokens=20)) for number in range(6))
    )
    samples = parse(await cluster.observer.metrics.scrape())
    tokens = sum(len(answer.tokens[0]) for answer in answers)
    assert at(samples, "generated_tokens_total") == tokens
    assert at(samples, "prompt_tokens_total") == 6 * 20
    assert at(samples, "request_prompt_tokens_sum") == 6 * 20
    assert at(samples, "request_generation_tokens_sum") == tokens
    assert at(samples, "request_generation_tokens_count") == 6
    assert at(samples, "requests_finished_total", result="length") == 6
    completed = cluster.decode.counters["handoffs_completed"]
    assert at(samples, "handoffs_total", owner="decode0", result="completed") == completed == 6
    moved = cluster.decode.counters["kv_bytes_received"]
    assert total(samples, "kv_bytes_total") == moved > 0
    assert at(samples, "compilations_total", worker="decode0") == 7


@on_a_cluster()
async def test_histograms_hold_the_instants_of_the_virtual_clock(cluster: ObservedCluster) -> None:
    answer = await cluster.collect(toy_request(1, prompt_tokens=20))
    samples = parse(await cluster.observer.metrics.scrape())
    timings = answer.timings
    assert timings is not None
    sums = {
        "time_to_first_token": timings.ttft_seconds,
        "time_per_output_token": timings.tpot_seconds,
        "handoff_gap": timings.handoff_gap_seconds,
        "time_between_tokens": timings.total_seconds - timings.ttft_seconds,
    }
    for name, seconds in sums.items():
        assert at(samples, f"{name}_seconds_sum") == pytest.approx(seconds, abs=1e-9), name
    assert at(samples, "time_to_first_token_seconds_count") == 1
    exposed = at(samples, "exposed_transfer_seconds_sum", destination="decode0")
    assert 0 < exposed <= timings.handoff_gap_seconds
    assert at(samples, "exposed_transfer_seconds_count", destination="decode0") == 1
    labels = {"worker": "prefill0", "command": "prefill_chunk"}
    assert at(samples, "step_seconds_count", **labels) >= 2


@on_a_cluster()
async def test_what_was_not_seen_of_a_request_is_not_measured(cluster: ObservedCluster) -> None:
    """The first token of a stream that is resumed came to another door, or to an earlier call; some
    answers have no second one."""

    request = toy_request(1)
    had = cluster.collect(replace(request, request_id="whole"))
    resumption = Resumption(1, (AcceptedChild(tuple((await had).tokens[0][:-1])),))
    assert [
        len(event.token_ids)
        async for event in cluster.observed.stream(replace(request, resumption=resumption))
    ] == [1]
    await cluster.collect(toy_request(2, n=3, max_tokens=1))
    samples = parse(await cluster.observer.metrics.scrape())
    assert at(samples, "requests_finished_total", result="length") == 3
    assert at(samples, "time_to_first_token_seconds_count") == 2
    assert (
        at(samples, "time_per_output_token_seconds_count")
        == at(samples, "handoff_gap_seconds_count")
        == 1
    )


@on_a_cluster(decode_faults=Faults(pull_error=lambda nth: "the wire broke" if nth < 12 else ""))
async def test_retries_are_counted_by_what_ended_the_attempt_before(
    cluster: ObservedCluster,
) -> None:
    request = toy_request(1)
    cluster.check(request, await cluster.collect(request))
    samples = parse(await cluster.observer.metrics.scrape())
    failed = cluster.decode.counters["pulls_failed"]
    assert failed > 0, "the fault took effect"
    assert at(samples, "pull_failures_total", owner="decode0", cause="failed") == failed
    attempts = (
        cluster.path.counters["attempts_failed"] + cluster.decode.counters["sources_replaced"]
    )
    assert total(samples, "retries_total") == attempts > 0
    causes = {dict(labels)["cause"] for name, labels in samples if name == "jdisagg_retries_total"}
    assert causes <= {"HandoffError", "source_lost"}


@on_a_cluster(decode=toy_limits(pages_per_rank=10), growth_tokens=1)
async def test_preemptions_are_a_cause_of_their_own(cluster: ObservedCluster) -> None:
    requests = [toy_request(number, prompt_tokens=8, max_tokens=24) for number in range(3)]
    await asyncio.gather(*(cluster.collect(request) for request in requests))
    samples = parse(await cluster.observer.metrics.scrape())
    preemptions = cluster.path.counters["preemptions"]
    assert preemptions > 0, "pages were too few for all"
    assert at(samples, "retries_total", cause="preempted") == preemptions


@on_a_cluster(mode=Mode.CHUNKED)
async def test_a_client_that_goes_away_is_counted_as_cancelled(cluster: ObservedCluster) -> None:
    events = cluster.observed.stream(toy_request(1))
    await anext(events)
    await events.aclose()
    samples = parse(await cluster.observer.metrics.scrape())
    assert at(samples, "requests_finished_total", result="cancelled") == 1
    await cluster.check_quiet()


async def test_a_worker_that_does_not_answer_is_down_and_hides_nothing_else() -> None:
    async def gone() -> WorkerStatus:
        raise UnavailableError("gone")

    metrics, counters = Metrics("router"), Counters()
    counters.add("leases_expired", 3)
    metrics.watch_worker("decode0", gone, counters)
    samples = parse(await metrics.scrape())
    assert at(samples, "worker_up", worker="decode0") == 0
    assert at(samples, "leases_expired_total", owner="decode0") == 3
    metrics.unwatch("decode0")
    assert not [
        name
        for name, _ in parse(await metrics.scrape())
        if name in ("jdisagg_worker_up", "jdisagg_leases_expired_total")
    ]


async def test_a_worker_exports_nothing_of_requests_and_nobody_exports_when_a_series_began() -> (
    None
):
    metrics = Metrics("decode-0")
    metrics.watch_worker("decode-0", _status)
    metrics.meshes.step_seconds.labels("decode-0", "decode_steps").observe(0.01)
    names = {name for name, _ in parse(await metrics.scrape())}
    assert "jdisagg_worker_running" in names and "jdisagg_step_seconds_bucket" in names
    assert not [name for name in names if "_request" in name or "time_to_first" in name]
    assert not [name for name in names if name.endswith("_created")]


async def test_a_cluster_that_is_scraped_as_a_whole_counts_no_worker_twice() -> None:
    router, worker = Metrics("router"), Metrics("decode-0")

    async def statuses() -> list[WorkerStatus]:
        return [await _status()]

    router.watch_cluster(statuses)
    worker.watch_worker("decode-0", _status)
    exported: list[set] = []
    for metrics in (router, worker):
        samples = parse(await metrics.scrape())
        exported.append({sample for sample in samples if ("worker", "decode-0") in sample[1]})
    assert at(parse(await router.scrape()), "router_pages", **PAGES) == 3
    assert at(parse(await worker.scrape()), "pages", **PAGES) == 3
    assert all(exported) and not exported[0] & exported[1]


async def test_every_series_of_ours_bears_the_models_name_and_the_build_is_told() -> None:
    metrics = Metrics("router", model="llama")
    metrics.requests.ttft.observe(1.0)
    metrics.watch_waiting(lambda: 7)
    samples = parse(await metrics.scrape())
    assert at(samples, "router_waiting", model_name="llama") == 7
    assert at(samples, "time_to_first_token_seconds_count", model_name="llama") == 1
    (build,) = [dict(labels) for name, labels in samples if name == "jdisagg_build_info"]
    assert build["model_name"] == "llama" and build["version"] and build["python"]
    for name, least in (("resident_memory_bytes", 1 << 20), ("cpu_seconds_total", 0)):
        assert samples[(f"process_{name}", frozenset())] > least


@on_a_cluster()
async def test_a_resumption_is_no_retry(cluster: ObservedCluster) -> None:
    whole = await cluster.collect(replace(toy_request(1), request_id="whole"))
    resumption = Resumption(1 << 20, (AcceptedChild(tuple(whole.tokens[0][:2])),))
    resumed = replace(toy_request(1), resumption=resumption)
    assert [event async for event in cluster.observed.stream(resumed)]
    samples = parse(await cluster.observer.metrics.scrape())
    assert at(samples, "resumptions_total") == 1
    assert not [labels for name, labels in samples if name == "jdisagg_retries_total"]


async def test_a_counter_split_by_labels_keeps_its_sum() -> None:
    metrics, counters = Metrics("one"), Counters()
    counters.add("retries_done", 2, cause="checksum")
    counters.add("retries_done", 1, cause="timeout")
    counters.add("retries_done")
    assert (
        counters["retries_done"]
        == counters.snapshot()["retries_done"]
        == sum(counters.labelled().values())
        == 4
    )
    metrics.watch_counters("path", counters)
    samples = parse(await metrics.scrape())
    assert at(samples, "retries_done_total", owner="path", cause="checksum") == 2
    assert at(samples, "retries_done_total", owner="path", cause="") == 1


async def test_predictions_are_held_against_what_came() -> None:
    metrics = Metrics("one")
    for predicted, actual in ((1.0, 1.0), (1.0, 1.5), (0.5, 2.0), (0.0, 0.1)):
        metrics.measured("ttft", predicted, actual)
    samples = parse(await metrics.scrape())
    assert at(samples, "actual_over_predicted_ratio_sum", what="ttft") == 1.0 + 1.5 + 4.0
    assert at(samples, "actual_over_predicted_ratio_count", what="ttft") == 3, (
        "what took no time has no ratio"
    )
    assert at(samples, "prediction_error_seconds_count", what="ttft") == 4
    assert abs(at(samples, "prediction_error_seconds_sum", what="ttft") - 2.1) < 1e-9


def test_reserved_pages_are_told_apart_where_the_worker_says_so() -> None:
    status = WorkerStatus(
        "d", WorkerRole.DECODE, "dp=2", (3, 8), (8, 8), 0, 0, 4, 4, 64, reserved_pages=(4, 0)
    )
    assert list(pages_by_state(status)) == [
        (0, "free", 3),
        (0, "reserved", 4),
        (0, "used", 1),
        (1, "free", 8),
        (1, "reserved", 0),
        (1, "used", 0),
    ]


def test_traffic_is_the_sum_over_all_links_and_unknown_without_any() -> None:
    metrics = Metrics("worker")
    assert metrics.traffic() == Traffic(0.0, 0.0, None)
    metrics.requests.prompt_tokens.inc(300)
    for source, sent in (("a", 4096), ("b", 1024)):
        metrics.transfers.kv_bytes.labels(source, "d", "none").inc(sent)
    assert metrics.traffic() == Traffic(300.0, 0.0, 5120.0)
