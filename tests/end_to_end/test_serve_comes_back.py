"""A server that was warm on this machine before serves at once when it is started again."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jdisagg.config import EngineConfig, Mode
from jdisagg.engine import embedded
from jdisagg.executor import mesh_executor
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.executor.programs import Programs
from jdisagg.request import Request, SamplingParams
from launch.model import deployment
from tests import time_scale
from tests.end_to_end.clusters import collect, config, dense_greedy, golden_copy

pytestmark = pytest.mark.ci


def small_engine(directory: Path, cache: Path) -> EngineConfig:
    sizes = config(
        Mode.UNIFIED,
        decode="tp=1",
        directory=directory,
        chunk=64,
        slots=1,
        pages=16,
        context=128,
        warm_up=True,
    )
    return replace(sizes, compilation_cache=str(cache))


async def first_tokens(served: object) -> list[int]:
    prompt = (5, 6, 7, 8)
    request = Request(
        "r", prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), ()
    )
    stream = served.cluster.stream(request)  # type: ignore[attr-defined]
    return collect([event async for event in stream]).tokens[0]


async def test_programs_are_loaded_while_it_serves_and_every_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = golden_copy("llama_tied", tmp_path)  # of two layers: all of it is compiled twice
    engine = small_engine(directory, tmp_path)
    expected = dense_greedy(directory, (5, 6, 7, 8), 8)
    first = deployment(engine)
    await first.start(at_once=True)
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
    assert another.cluster.compilations >= everything, "one of other sizes was never warm"
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
    await first.stop()
    loaded = list[Callable[[], None]]()
    steps_of = embedded.warm_up_steps

    def watched(executor: MeshExecutor) -> list[Callable[[], None]]:
        def step(load: Callable[[], None]) -> None:
            loaded.append(load)
            load()

        return [partial(step, load) for load in steps_of(executor)]

    monkeypatch.setattr(embedded, "warm_up_steps", watched)
    # on a busy machine commands of one stream lie further apart than the server's own 0.2 s
    monkeypatch.setattr(mesh_executor, "QUIET_SECONDS", time_scale.seconds(4))
    again = deployment(engine)
    await again.start(at_once=True)
    before = len(loaded)
    for _ in range(3):
        assert await first_tokens(again) == expected
    assert len(loaded) <= before + 1, "loaded between the commands of a stream"  # one had begun
    monkeypatch.setattr(mesh_executor, "QUIET_SECONDS", 0.05)
    while len(loaded) < len(steps_of(again.cluster.replicas[0].executor)):
        await asyncio.sleep(0.05)
    await again.stop()
