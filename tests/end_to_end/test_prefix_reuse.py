"""KV that stays, with real programs: conversations whose prompts begin alike give the streams of a
server that keeps nothing.

The requests of a conversation come in waves, a turn each, so that later turns find what earlier
ones left; within a wave they are mixed."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.prompt.hints import Hints, Retention
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, running
from tests.end_to_end.conversations import (
    Conversations,
    converse,
    on_disk_alone,
    one_after_the_other,
    reference,
    with_reuse,
)
from tests.lanes import first_ci
from tests.shapes import PREFILL, config


@pytest.mark.ci
@pytest.mark.parametrize(
    ("engine",),
    first_ci(
        [(config(),), (config(Mode.CHUNKED),), (config(prefill="pp=2", decode="pp=2,tp=2"),)], ci=2
    ),
    ids=("two meshes", "one mesh", "stages"),
)
async def test_streams_are_those_of_a_server_that_keeps_nothing(engine: EngineConfig) -> None:
    streams, run, cached = await converse(with_reuse(engine))
    assert streams == await reference()
    assert cached > 0
    workers = run.cluster._workers
    assert all(worker.counters["prefix_hit_tokens"] > 0 for worker in workers)


@pytest.mark.ci
@pytest.mark.parametrize(("prefill",), first_ci([(PREFILL,), ("dp=2,tp=2",), ("pp=2,tp=2",)]))
async def test_streams_are_the_same_when_the_prefill_mesh_keeps_them_in_host_memory(
    prefill: str,
) -> None:
    """Its pages have room for one long prompt, and the decode worker forgets."""
    engine = config(prefill=prefill)
    engine = replace(
        engine,
        prefill=replace(engine.prefill, pages_per_rank=32),
        prefix=PrefixConfig(True, 16, host_gib=0.25, restores="always"),
    )
    streams, run, cached = await converse(engine, pushed_out=True)
    assert streams == await reference()
    assert cached > 0
    counters = run.cluster._workers[0].counters
    assert counters["host_blocks_written"] > 0
    assert counters["host_tokens_restored"] > 0
    assert counters["host_blocks_broken"] == counters["host_restores_failed"] == 0
    stored = run.cluster.prefill.executor.host  # type: ignore[union-attr]
    assert stored.bytes == 0  # closed


@pytest.mark.ci
async def test_hints_and_pauses_change_no_token_of_prompts_kept_in_pages_and_host_memory() -> None:
    """Retained and other prompts share pages for one long prompt, with host memory behind them."""
    engine = replace(
        config(),
        prefill=replace(config().prefill, pages_per_rank=32),
        prefix=PrefixConfig(True, 16, host_gib=0.25, restores="always"),
    )
    long, short = Retention(4.0, 3600.0), Retention(1.0, 0.05)
    hints = (
        *(Hints("a", long, pause_seconds=0.5), None),
        *(Hints("b", short, 40, 30, 60.0), Hints("", long, 16, 1)),
    )
    streams, run, cached = await converse(engine, hints=hints)
    assert streams == await reference()
    assert cached > 0
    for worker in run.cluster._workers:
        assert worker._kept.retained and len(worker._kept.sessions) == 2


@pytest.mark.ci
async def test_usage_tells_the_tokens_that_were_cached_because_the_request_asked_for_it() -> None:
    async with running(with_reuse(config())) as run:
        ids = Conversations(run, seed=1).words(150)
        request = run.request(ids, "plain", max_tokens=2, ignore_eos=True)
        hinted = replace(request, hints=Hints(retention=Retention(1.0, 60.0), retained_tokens=150))
        seen = []
        for number, one in enumerate((replace(hinted, request_id="first"), hinted, request)):
            usage = (await run.complete(replace(one, request_id=f"{number}"))).usage
            assert usage is not None
            seen.append((usage.cached_tokens, usage.created_tokens))
        assert seen == [(0, 144), (144, 0), (144, 0)]


@pytest.mark.ci
@pytest.mark.parametrize(("mode",), first_ci([(Mode.DISAGGREGATED,), (Mode.CHUNKED,)]))
async def test_on_a_grid_of_whole_chunks_a_hit_gives_the_bits_of_a_miss(mode: Mode) -> None:
    """In bfloat16, log-probabilities and all: one after the other, so that batches are alike."""
    engine = config(mode, dtype="bfloat16")
    heard: list[list[object]] = []
    for reuse in (False, True):
        how = with_reuse(engine, grid=64) if reuse else engine
        async with running(how) as run:
            said, cached = await one_after_the_other(run, Conversations(run, seed=5), (150, 30))
        assert (cached > 0) == reuse
        heard.append(said)
    assert heard[0] == heard[1]


def on_disk(folder: Path, prefill: str) -> EngineConfig:
    """Pages for one long prompt, and a disk behind host memory."""
    engine = config(prefill=prefill)
    prefix = PrefixConfig(
        True, 16, host_gib=0.25, restores="always", disk_dir=str(folder), disk_gib=0.25
    )
    return replace(engine, prefill=replace(engine.prefill, pages_per_rank=32), prefix=prefix)


@pytest.mark.ci
@pytest.mark.parametrize("prefill", ["tp=2", pytest.param("pp=2", marks=pytest.mark.slow)])
async def test_streams_are_the_same_when_they_come_back_from_disk_and_after_a_restart(
    prefill: str, tmp_path: Path
) -> None:
    """What was asked is asked again, which brings it to disk, and once more of the same server and
    of one that is started anew on the folder."""
    engine, waves, cached = on_disk(tmp_path / "kv", prefill), list[list[Request]](), list[int]()
    from_disk: list[int] = []

    async def ask_again(run: Running, name: str) -> int:
        """How many tokens were not computed; streams are those of before."""
        streams, known = [], 0
        for asked in waves[2:]:
            await on_disk_alone(run)
            # one by one: of two that come at once one may not find what the other brings back
            for request in asked:
                one = await run.complete(
                    replace(request, request_id=f"{name} {request.request_id}")
                )
                streams.append((one.tokens, one.text, one.finish))
                assert (usage := one.usage) is not None
                known += usage.cached_tokens
                assert usage.cached_by_tier is not None
                assert usage.cached_by_tier.total == usage.cached_tokens
                from_disk.append(usage.cached_by_tier.disk)
        await on_disk_alone(run)
        assert streams == (await reference())[8:]
        counters = run.cluster._workers[0].counters
        assert counters["disk_errors"] == counters["host_blocks_broken"] == 0
        return known

    async with running(engine) as run:
        talk = Conversations(run, seed=11)
        for _ in range(4):
            waves.append(talk.wave(4))
            talk.heard(waves[-1], await run.complete_all(waves[-1]))
        await ask_again(run, "second")
        counters = run.cluster._workers[0].counters
        before = counters["disk_tokens_restored"]
        cached.append(await ask_again(run, "third"))
        assert counters["disk_tokens_restored"] > before
        told = (await run.cluster._workers[0].status()).kept
        kept = [block for block in run.cluster.kept_blocks() if block.worker == "prefill-0"]
        assert {tier.tier: tier.blocks for tier in told} == {
            tier: sum(block.tier == tier for block in kept) for tier in ("pages", "host", "disk")
        }
        assert any(block.tier == "disk" for block in kept)
    async with running(engine) as run:
        from_disk.clear()
        cached.append(await ask_again(run, "anew"))
        counters = run.cluster._workers[0].counters
        assert 0 < sum(from_disk) <= counters["disk_tokens_restored"]
        assert counters["disk_blocks_found"] > 0 and counters["disk_tokens_restored"] > 0
    assert cached[1] >= 0.9 * cached[0] > 0
