"""Rule 1 with quantized weights: one mesh and two meshes give the same streams, for any layouts."""

from dataclasses import replace

import pytest

from jdisagg.config import EngineConfig, Mode
from tests.end_to_end.clusters import running
from tests.shapes import LLAMA, MOE, config

PROMPTS = ("Once upon a time", "One day a girl went to the park and", "Tom and his mother")


async def _streams(engine: EngineConfig, weights: str) -> list[list[int]]:
    engine = replace(engine, model=replace(engine.model, weights=weights))
    async with running(engine) as run:
        requests = [
            run.request(prompt, f"{prompt} {heat}", temperature=heat, seed=3, ignore_eos=True)
            for prompt in PROMPTS
            for heat in (0.0, 0.8)
        ]
        return [done.tokens[0] for done in await run.complete_all(requests)]


@pytest.mark.parametrize(
    ("directory", "weights", "pairs"),
    [
        pytest.param(MOE, "int4", [("dp=2,tp=2,ep=4", "tp=2")], marks=pytest.mark.ci),
        pytest.param(LLAMA, "int8", [("tp=2", "dp=2")], marks=pytest.mark.slow),
    ],
)
async def test_streams_do_not_depend_on_placement(directory, weights, pairs) -> None:
    one = await _streams(config(Mode.UNIFIED, directory=directory), weights)
    assert all(len(stream) == 32 for stream in one)
    for prefill, decode in pairs:
        engine = config(prefill=prefill, decode=decode, directory=directory)
        assert await _streams(engine, weights) == one
