"""Models with recurrent state, and with a window in some layers: conversations whose prompts begin
alike go on from snapshots of the state and from KV that stays, and give the streams of a server
that keeps nothing. Decode workers keep windows alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode, PrefixConfig
from tests.end_to_end.clusters import golden_copy, running
from tests.end_to_end.short_turns import Talk, converse
from tests.shapes import FAMILY, PATIENT, config


@pytest.mark.parametrize(
    ("name", "mode", "prefill", "decode"),
    [
        pytest.param("qwen3_next", Mode.DISAGGREGATED, "tp=2", "dp=2", marks=pytest.mark.ci),
        pytest.param("qwen3_next", Mode.CHUNKED, "tp=1", "dp=2", marks=pytest.mark.slow),
        pytest.param("kimi_linear", Mode.DISAGGREGATED, "tp=2", "dp=2", marks=pytest.mark.slow),
        pytest.param("lfm2", Mode.DISAGGREGATED, "tp=2", "dp=2", marks=pytest.mark.slow),
        pytest.param("minimax", Mode.DISAGGREGATED, "tp=2", "dp=2", marks=pytest.mark.slow),
        pytest.param("qwen3_5", Mode.UNIFIED, "tp=1", "tp=2", marks=pytest.mark.slow),
        pytest.param("granite4_hybrid", Mode.CHUNKED, "tp=1", "dp=2", marks=pytest.mark.slow),
    ],
)
async def test_streams_are_those_of_a_server_that_keeps_nothing(
    name: str, mode: Mode, prefill: str, decode: str, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    engine = config(mode, prefill, decode, directory=directory, **FAMILY)
    alone = replace(engine, prefix=PrefixConfig())
    expected, none, _ = await converse(alone)
    streams, cached, run = await converse(replace(engine, prefix=PrefixConfig(True, 16)))
    assert streams == expected
    assert none == 0 and cached > 0
    kept = [one for worker in run.cluster._workers for one in worker._kept.snapshots]
    assert sum(one.used for one in kept) > 0


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        pytest.param("gpt_oss", "tp=1", "dp=2", marks=pytest.mark.ci),
        pytest.param("gemma3", "tp=2", "tp=2", marks=pytest.mark.slow),
    ],
)
async def test_decode_workers_keep_windows_alone_and_reuse_what_other_layers_keep(
    name: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    """The pages of the prefill worker have room for one long prompt; host memory has the rest."""
    directory = golden_copy(name, tmp_path)
    engine = config(prefill=prefill, decode=decode, directory=directory, **FAMILY)
    expected, none, _ = await converse(engine, waves=5)
    few = replace(engine.prefill, pages_per_rank=11)
    tiers = PrefixConfig(True, 16, host_gib=0.25, restores="always")
    streams, cached, run = await converse(replace(engine, prefill=few, prefix=tiers), waves=5)
    assert streams == expected
    assert none == 0 and cached > 0
    first, second = run.cluster._workers
    limits = run.cluster.decode.executor.limits
    assert limits.ring_pages and second.counters["prefix_hit_tokens"] > 0
    assert first.counters["host_tokens_restored"] > 0
    assert first.counters["host_blocks_broken"] == 0


@pytest.mark.ci
async def test_nothing_is_compiled_for_snapshots_once_it_is_warm(tmp_path: Path) -> None:
    """Neither for a hit in pages, nor for a prefix that comes back from host memory, nor for a
    branch."""
    directory = golden_copy("qwen3_5", tmp_path)
    engine = config(
        prefill="tp=1",
        decode="tp=1",
        directory=directory,
        context=128,
        slots=1,
        chunk=32,
        warm_up=True,
        limits=PATIENT,
    )
    prefix = PrefixConfig(True, 16, host_gib=0.1, restores="always")
    few = replace(engine.prefill, pages_per_rank=8)
    async with running(replace(engine, prefill=few, prefix=prefix)) as run:
        compiled, talk = run.cluster.compilations, Talk(run, 3)
        first, counters = talk.words(60), run.cluster._workers[0].counters
        prompts = (first, first, talk.words(110), (*first, 5), (*first[:40], *talk.words(20)))
        for number, ids in enumerate(prompts):
            run.cluster._workers[1]._kept.clear()
            await run.complete(run.request(ids, f"r{number}", max_tokens=4, ignore_eos=True))
        (kept,) = run.cluster._workers[0]._kept.snapshots
        assert kept.used > 0 and counters["host_snapshots_restored"] > 0
        assert run.cluster.compilations == compiled
