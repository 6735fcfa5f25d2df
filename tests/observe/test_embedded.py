"""The real meshes, observed: one engine serves a few requests, and its metrics and spans say
so."""

import asyncio

import jax
import pytest

from jdisagg.config import EngineConfig, InstanceConfig, LimitsConfig, ModelConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.layout.axes import Layout
from jdisagg.observe.observer import Observer
from jdisagg.request import Request, SamplingParams, StreamEvent
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import LoadedModel, load_model
from models.tokenizer import Tokenizer
from tests.observe.samples import at, parse, total
from tests.observe.spans import TracedObserver, ends, starts, trace_of

pytestmark = pytest.mark.ci


# Programs are compiled on the way: nothing that waits for one is given up and tried again.
PATIENT = LimitsConfig(
    pull_seconds=120.0, handoff_lease_seconds=120.0, reservation_lease_seconds=120.0
)


def cluster_of(config: EngineConfig, observer: Observer) -> EmbeddedCluster:
    def load(layout: Layout, devices: list[jax.Device]) -> LoadedModel:
        return load_model(SHIPPED_MODEL, layout, devices, dtype="float32")

    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    return EmbeddedCluster(config, load, tokenizer, jax.devices(), observer)  # type: ignore[arg-type]


async def test_an_embedded_cluster_is_seen_from_the_first_token_to_the_last() -> None:
    small = InstanceConfig(
        layout=Layout(dp=1, tp=1),
        page_size=16,
        pages_per_rank=64,
        slots_per_rank=4,
        chunk_tokens=32,
        min_chunk_tokens=32,
    )
    config = EngineConfig(
        ModelConfig(SHIPPED_MODEL, context_tokens=256),
        limits=PATIENT,
        prefill=small,
        decode=small,
        warm_up=False,
    )

    observer = TracedObserver("embedded")
    cluster = cluster_of(config, observer)

    async def ask(name: str) -> list[StreamEvent]:
        request = Request(
            name,
            tuple(range(5, 75)),
            SamplingParams(max_tokens=6, temperature=0.0),
            deadline_seconds=120.0,
        )
        return [event async for event in cluster.stream(request)]

    await cluster.start()
    try:
        answers = await asyncio.gather(ask("a"), ask("b"))
        samples = parse(await observer.metrics.scrape())
    finally:
        await cluster.stop()
    tokens = sum(len(event.token_ids) for answer in answers for event in answer)
    moved = sum(answer[-1].timings.kv_bytes_moved for answer in answers if answer[-1].timings)
    assert at(samples, "generated_tokens_total") == tokens == 12
    assert total(samples, "kv_bytes_total") == moved > 0
    compiled = cluster.decode.executor.programs.compilations
    assert at(samples, "compilations_total", worker="decode-0") == compiled > 0
    events = trace_of(observer, "a")
    assert len(starts(events, "prefill chunk")) == 3, "70 tokens in chunks of 32"
    counts = {len(starts(events, name)) for name in ("pull", "insert", "verified")}
    assert len(counts) == 1
    order = (starts(events, "prefill chunk")[0], starts(events, "admit")[0])
    assert ends(events, "reserve")[0] <= order[0] <= order[1] <= ends(events, "decode")[0]
