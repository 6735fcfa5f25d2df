"""Models with a window in some layers: KV of these layers is transferred apart, as far as the
window reaches, into a sliding-window ring buffer on the decode side. The tokens are those of
transformers, however many windows long the sequence. Pages, ring buffers and transferred bytes are
those of the KV spec."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import PrefixConfig
from jdisagg.engine.embedded import PREFILL
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import HandoffSource
from jdisagg.worker.kv_sources import RestoreQuery
from models.checkpoint import load_config
from tests import time_scale
from tests.end_to_end.clusters import check_bytes, dense_greedy, golden_copy, golden_greedy, running
from tests.end_to_end.conversations import decode_forgets
from tests.end_to_end.fetching import fetches_from
from tests.end_to_end.two_prefills import SECOND, TwoPrefills
from tests.shapes import config

WINDOW = 9  # of all of these models
PAGE = 4


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        pytest.param("gpt_oss", "tp=1", "tp=2", marks=pytest.mark.ci),
        pytest.param("gemma4", "tp=2", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("gemma4_e2b", "tp=2", "dp=2,tp=2", marks=pytest.mark.slow),
    ],
)
async def test_a_sequence_many_windows_long_holds_no_more_than_one(
    name: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    whole = [*prompt, *greedy]
    sizes = config(
        prefill=prefill,
        decode=decode,
        directory=directory,
        context=128,
        slots=1,
        chunk=32,
        decode_page=PAGE,
    )
    spec, layout = load_config(directory).kv_spec("float32"), Layout.parse(decode)
    short = prompt[:5]
    async with running(sizes) as run:
        for tokens, expected in (
            (short, dense_greedy(directory, short, 30)),
            (whole[:24], whole[24:]),
            (whole[:50], whole[50:]),
        ):
            await check_bytes(run, tokens, expected)
        executor = run.cluster.decode.executor
    limits = executor.limits
    assert limits.ring_pages * PAGE == WINDOW - 1 + PAGE
    # Pages, and room for padding rows of a batch of one and of forced tokens beside it.
    padding = -(-(1 + limits.extra_rows(1)) // PAGE)
    held = (limits.pages_per_rank + padding) * spec.unwindowed.bytes_per_token
    ring_pages = limits.state_slots_per_rank * limits.ring_pages + padding
    rings = ring_pages * spec.windowed.bytes_per_token
    assert executor.pool_bytes == layout.dp * PAGE * (held + rings)


@pytest.mark.ci
async def test_a_kept_window_comes_back_from_host_memory_from_disk_and_from_a_peer(
    tmp_path: Path,
) -> None:
    """A prompt is asked again and again; each time another tier alone has its KV."""
    engine = config(
        prefill="tp=1",
        decode="tp=2",
        directory=golden_copy("gpt_oss", tmp_path),
        context=256,
        slots=2,
        chunk=16,
        prefill_page=8,
    )
    prefix = PrefixConfig(
        True, 16, host_gib=0.1, restores="always", disk_dir=str(tmp_path / "kv"), disk_gib=0.1
    )
    few = replace(engine.prefill, pages_per_rank=24)
    rng = random.Random(4)
    prompt, others = ([rng.randrange(3, 130) for _ in range(length)] for length in (100, 180))
    async with running(replace(engine, prefill=few, prefix=prefix), kind=TwoPrefills) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoPrefills)
        workers = {worker.name: worker for worker in cluster._workers}
        first, second = workers[PREFILL], workers[SECOND]
        second._draining = True
        streams: list[object] = []

        async def ask(ids: list[int], name: str) -> tuple[int, ...]:
            """Cached tokens: all, from host memory, from disk."""
            decode_forgets(run)
            done = await run.complete(run.request(ids, name, max_tokens=6, ignore_eos=True))
            if ids is prompt:
                streams.append(done.tokens)
            assert done.usage is not None and (found := done.usage.cached_by_tier) is not None
            async with asyncio.timeout(time_scale.seconds(60)):
                while not first._sources.quiet:
                    await asyncio.sleep(0.01)
            return found.total, found.host, found.disk

        assert await ask(prompt, "first") == (0, 0, 0)
        assert await ask(prompt, "pages") == (96, 0, 0)
        await ask(others, "others")
        assert await ask(prompt, "host") == (96, 96, 0)
        assert first.counters["host_snapshots_restored"] == 1
        await ask(others, "others again")
        for of_tier in (first._host.blocks, first._host.snapshots):
            first._host._release(of_tier.clear())
        assert await ask(prompt, "disk") == (96, 0, 96)
        assert first.counters["disk_snapshots_restored"] == 1
        broken = ("host_snapshots_broken", "disk_snapshots_broken", "host_blocks_broken")
        assert not [name for name in broken if first.counters[name]]

        fetches_from(second, first)
        chain = first._kept.chain(run.request(prompt, "named"), prompt)
        peer = HandoffSource(PREFILL, cluster.local.new_id())
        plan = second._sources.best(RestoreQuery(chain, (0,), peer=peer, peer_tokens=96))
        assert plan is not None
        await second._sources.restore(plan)
        assert second.counters["peer_snapshots_fetched"] == 1
        second._draining = False
        cluster.crashes[PREFILL].dead.set()
        decode_forgets(run)
        done = await run.complete(run.request(prompt, "peer", max_tokens=6, ignore_eos=True))
        streams.append(done.tokens)
        assert done.usage is not None and done.usage.cached_tokens == 96
    assert streams == streams[:1] * 5
