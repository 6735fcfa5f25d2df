"""A server that was warm on this machine before serves at once when it is started again."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.engine import replica
from jdisagg.executor import mesh_executor
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.executor.programs import Programs
from jdisagg.executor.warm_up import WarmUpStep, warm_up_steps
from jdisagg.node.deployment import Deployment
from jdisagg.request import Request, SamplingParams
from launch.model import deployment
from tests import time_scale
from tests.end_to_end.clusters import collect, config, dense_greedy, golden_copy
from tests.fakes.cluster import Collected

pytestmark = pytest.mark.ci


def small_engine(directory: Path, cache: Path, *, two_meshes: bool = False) -> EngineConfig:
    sizes = config(
        Mode.DISAGGREGATED if two_meshes else Mode.UNIFIED,
        prefill="tp=1",
        decode="tp=1",
        directory=directory,
        chunk=64,
        slots=1,
        pages=16,
        context=128,
        warm_up=True,
        speculate="auto",
    )
    prefix = PrefixConfig(grain_tokens=16, append_tokens=32 if two_meshes else None, host_gib=0.01)
    return replace(sizes, compilation_cache=str(cache), prefix=prefix)


def steps_of(served: Deployment) -> list[WarmUpStep]:
    return [step for one in served.cluster.replicas for step in warm_up_steps(one.executor)]


async def all_loaded(served: Deployment) -> None:
    assert served._loading is not None
    async with asyncio.timeout(time_scale.seconds(240)):
        await served._loading
    assert not any(one.readiness.missing for one in served.cluster.replicas)


async def completed(served: Deployment, name: str, prompt: tuple[int, ...]) -> Collected:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    stream = served.cluster.stream(Request(name, prompt, sampling, ()))
    return collect([event async for event in stream])


async def first_tokens(served: Deployment) -> list[int]:
    return (await completed(served, "r", (5, 6, 7, 8))).tokens[0]


async def test_programs_are_loaded_while_it_serves_and_every_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = golden_copy("llama_tied", tmp_path)  # of two layers: all of it is compiled twice
    engine = small_engine(directory, tmp_path)
    expected = dense_greedy(directory, (5, 6, 7, 8), 8)
    first = deployment(engine)
    await first.start(at_once=True)
    await all_loaded(first)
    everything = first.cluster.compilations
    assert everything > 4
    await first.stop()
    compile_, go_on = Programs.compile, threading.Event()

    def held(*args: Any, **named: Any) -> Callable[..., Any]:
        assert go_on.wait(time_scale.seconds(60))
        return compile_(*args, **named)

    monkeypatch.setattr(Programs, "compile", held)
    again = deployment(engine)
    await again.start(at_once=True)
    assert again.cluster.compilations < everything, "it serves before all are loaded"
    go_on.set()
    assert await first_tokens(again) == expected
    while again.cluster.compilations < everything:
        await asyncio.sleep(0.05)
    await again.stop()
    stopped = deployment(engine)
    await stopped.start(at_once=True)
    await stopped.stop()  # in the middle of it
    another = deployment(replace(engine, decode=replace(engine.decode, slots_per_rank=2)))
    await another.start(at_once=True)
    common = sum([step.capability is None for step in steps_of(another)])
    assert another.cluster.compilations >= common, "one of other sizes was never warm"
    await another.stop()


async def test_a_stream_waits_for_no_program_that_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of a large model takes seconds to load: between the tokens of a stream there is no
    time for those of others."""
    directory = golden_copy("llama_tied", tmp_path)
    engine = small_engine(directory, tmp_path)
    expected = dense_greedy(directory, (5, 6, 7, 8), 8)
    first = deployment(engine)
    await first.start(at_once=True)
    await all_loaded(first)
    await first.stop()
    loaded = set[Callable[[], object]]()

    def watched(executor: MeshExecutor) -> list[WarmUpStep]:
        def run(load: Callable[[], object]) -> None:
            loaded.add(load)
            load()

        return [replace(step, run=partial(run, step.run)) for step in warm_up_steps(executor)]

    monkeypatch.setattr(replica, "warm_up_steps", watched)
    monkeypatch.setattr(replica, "BUSY_SECONDS", time_scale.seconds(60))
    # on a busy machine commands of one stream lie further apart than the server's own 0.2 s
    monkeypatch.setattr(mesh_executor, "QUIET_SECONDS", time_scale.seconds(4))
    again = deployment(engine)
    await again.start(at_once=True)
    before = len(loaded)
    for _ in range(3):
        assert await first_tokens(again) == expected
    assert len(loaded) <= before + 1, "loaded between the commands of a stream"  # one had begun
    monkeypatch.setattr(mesh_executor, "QUIET_SECONDS", 0.05)
    await all_loaded(again)
    assert len(loaded) == len(steps_of(again))
    await again.stop()


async def test_a_server_without_compiled_programs_answers_before_the_optional_ones_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are compiled beside the threads that run the steps. Until then nothing is appended or
    copied to host memory; blocks are cached from the start."""
    directory = golden_copy("llama_tied", tmp_path)
    engine = small_engine(directory, tmp_path, two_meshes=True)
    served, go_on, beside = deployment(engine), threading.Event(), list[str]()
    compile_ = Programs.compile

    def held(*args: Any, **named: Any) -> Callable[..., Any]:
        if "dispatch" not in (name := threading.current_thread().name):
            beside.append(name)
            assert go_on.wait(time_scale.seconds(240))
        return compile_(*args, **named)

    monkeypatch.setattr(Programs, "compile", held)
    await served.start(at_once=True)
    prefill, decode = served.cluster._workers
    prompt = tuple(range(5, 45))
    answers = [await completed(served, f"early {number}", prompt) for number in range(2)]
    missing, early = (await prefill.status()).not_ready, await decode.status()
    go_on.set()  # before what may fail, because the threads wait
    assert [one.tokens[0] for one in answers] == [dense_greedy(directory, prompt, 8)] * 2
    assert answers[0].usage.cached_tokens == 0 and answers[1].usage.cached_tokens == 32
    assert missing == ("grammars", "reuse", "tiers")
    assert early.not_ready == ("grammars", "append", "tiers", "drafts") and not early.can_prefill
    assert early.times is not None and early.times.steps and not early.times.chunks
    await all_loaded(served)
    late = await decode.status()
    assert late.can_prefill and not late.not_ready
    assert late.times is not None and late.times.chunks and late.times.steps == early.times.steps
    assert beside and not any("dispatch" in name for name in beside)
    everything = served.cluster.compilations
    for tokens in (7, 20, 40, 60, 100):
        prompt = tuple(range(5, 5 + tokens))
        for number in range(2):
            answer = await completed(served, f"late {tokens} {number}", prompt)
            assert answer.tokens[0] == dense_greedy(directory, prompt, 8)
    assert served.cluster.compilations == everything
    await served.stop()
