"""A server is ready when everything is compiled: no request waits for a program, after the first
start and after a start that finds its programs in the cache."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.node.deployment import Deployment
from jdisagg.request import Request, SamplingParams
from launch.model import deployment
from tests.end_to_end.clusters import collect, dense_greedy, golden_copy
from tests.fakes.cluster import Collected
from tests.shapes import config

pytestmark = pytest.mark.ci


def small_engine(directory: Path, cache: Path) -> EngineConfig:
    sizes = config(
        Mode.DISAGGREGATED,
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
    prefix = PrefixConfig(grain_tokens=16, append_tokens=32, host_gib=0.01)
    return replace(sizes, compilation_cache=str(cache), prefix=prefix)


async def completed(served: Deployment, name: str, prompt: tuple[int, ...]) -> Collected:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    stream = served.cluster.stream(Request(name, prompt, sampling, ()))
    return collect([event async for event in stream])


async def test_no_request_waits_for_a_program(tmp_path: Path) -> None:
    directory = golden_copy("llama_tied", tmp_path)
    engine = small_engine(directory, tmp_path)
    for start in range(2):
        served = deployment(engine)
        await served.start()
        everything = served.cluster.compilations
        decode = await served.cluster._workers[1].status()
        assert decode.can_prefill and decode.times and decode.times.chunks and decode.times.steps
        for tokens in (7, 20, 40, 60, 100):
            prompt = tuple(range(5, 5 + tokens))
            for number in range(2):
                answer = await completed(served, f"{start} {tokens} {number}", prompt)
                assert answer.tokens[0] == dense_greedy(directory, prompt, 8)
        assert served.cluster.compilations == everything
        await served.stop()
