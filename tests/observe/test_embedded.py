"""The real meshes, observed: one engine serves a few requests, and its metrics and spans say
so."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from jdisagg.config import EngineConfig, InstanceConfig, LimitsConfig, ModelConfig, PrefixConfig
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.layout.axes import Layout
from jdisagg.observe.observer import Observer
from jdisagg.request import Request, SamplingParams, StreamEvent
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import LoadedModel, load_model
from models.tokenizer import Tokenizer
from tests.observe.samples import Samples, at, parse, total
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


async def test_bytes_to_and_from_each_tier_are_those_of_blocks_and_files(tmp_path: Path) -> None:
    """A prompt of five blocks, twice, so that it is written to disk; another that takes pages
    of it, and it again, some from host memory; then of a second cluster on the same disk."""
    grain, tokens = 16, 81
    small = InstanceConfig(
        page_size=grain, pages_per_rank=8, slots_per_rank=1, chunk_tokens=32, min_chunk_tokens=32
    )
    config = EngineConfig(
        ModelConfig(SHIPPED_MODEL, context_tokens=128),
        limits=PATIENT,
        prefill=small,
        decode=small,
        prefix=PrefixConfig(
            True,
            grain,
            host_gib=1 / 64,
            restores="always",
            disk_dir=str(tmp_path / "kv"),
            disk_gib=1 / 64,
        ),
        warm_up=False,
    )

    async def run(firsts: Sequence[int]) -> tuple[Samples, EmbeddedCluster]:
        observer = Observer("embedded")
        cluster = cluster_of(config, observer)
        await cluster.start()
        try:
            for number, first in enumerate(firsts):
                prompt = tuple(range(first, first + tokens))
                sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
                request = Request(f"r{number}", prompt, sampling, deadline_seconds=120.0)
                assert [event async for event in cluster.stream(request)]
                while any(one.in_use and one.tier != "pages" for one in cluster.kept_blocks()):
                    await asyncio.sleep(0.01)
            return parse(await observer.metrics.scrape()), cluster
        finally:
            await cluster.stop()

    def moved(samples: Samples, tier: str, way: str, worker: str = "prefill-0") -> float:
        labels = {"worker": worker, "tier": tier, "way": way}
        return at(samples, "kept_bytes_moved_total", **labels)

    samples, cluster = await run((5, 5, 200, 5))
    counters, block = cluster._workers[0].counters, grain * cluster.kv_spec.bytes_per_token
    assert counters["host_blocks_written"] >= 5 and counters["host_blocks_restored"] > 0
    assert moved(samples, "host", "written") == counters["host_blocks_written"] * block
    assert moved(samples, "host", "restored") == counters["host_blocks_restored"] * block
    assert counters["disk_blocks_written"] == 5
    files = sum(file.stat().st_size for file in (tmp_path / "kv").rglob("*.kv"))
    own = moved(samples, "disk", "written")  # the decode worker has a folder of its own
    assert own + moved(samples, "disk", "written", "decode-0") == files and own > 5 * block
    samples, cluster = await run((5,))
    assert moved(samples, "disk", "restored") == own
    assert at(samples, "cached_tokens_total", tier="disk") == 5 * grain
    kept = at(samples, "kept_blocks", worker="prefill-0", role="prefill", tier="disk")
    assert kept == 5
