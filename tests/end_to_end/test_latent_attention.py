"""A model with latent attention (DeepSeek's form), or an indexer's keys beside keys and values:
what is cached serves later requests, and a sequence moves midway. `test_layouts.py` holds its
tokens and bytes under every mode and layout."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.engine.research.face import DecoderLayout, Engine, MeshSizes, PrefillLayout
from jdisagg.layout.axes import Layout
from models.checkpoint import LoadedModel, load_model
from tests.end_to_end.clusters import golden_copy, golden_greedy, running
from tests.end_to_end.conversations import push_out
from tests.lanes import first_ci
from tests.shapes import FAMILY, GOLDEN, config

# The second one has an indexer, whose keys are cached beside the latents.
NAMES = ("deepseek_v3", "deepseek_v32")
CACHED, INDEX, LAYERS = 20 + 6, 10, 3  # values of a token, in each layer


@pytest.fixture(params=[*NAMES, pytest.param("minimax_m3", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return golden_copy(request.param, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "host_gib"),
    first_ci([(Mode.DISAGGREGATED, 0.1), (Mode.DISAGGREGATED, 0.0), (Mode.CHUNKED, 0.0)]),
)
async def test_what_stays_serves_later_requests(model: Path, mode: Mode, host_gib: float) -> None:
    """In pages, or in host memory when these have no room."""
    prompt, greedy = golden_greedy(model)
    whole = [*prompt, *greedy]
    sizes = config(mode, directory=model, **FAMILY)
    cached = []
    sizes = replace(
        sizes,
        prefill=replace(sizes.prefill, pages_per_rank=8),
        prefix=PrefixConfig(True, 16, host_gib=host_gib, restores="always"),
    )
    async with running(sizes) as run:
        for index, start in enumerate((40, 40, 70)):
            request = run.request(
                whole[:start], f"r{index}", max_tokens=len(whole) - start, ignore_eos=True
            )
            done = await run.complete(request)
            assert done.tokens[0] == whole[start:]
            assert done.usage is not None
            cached.append(done.usage.cached_tokens)
            if host_gib:
                await push_out(run, tokens=120)
        if host_gib:
            assert run.cluster._workers[0].counters["host_tokens_restored"] > 0
    assert cached[0] == 0
    assert all(count >= 16 for count in cached[1:])


@pytest.mark.ci
@pytest.mark.parametrize(("name",), first_ci((name,) for name in NAMES[::-1]))
def test_a_sequence_that_is_moved_midway_goes_on_as_if_it_had_not_been(name: str) -> None:
    prompt, greedy = golden_greedy(GOLDEN / name)
    kept = {"latent": CACHED} | ({"index": INDEX} if name == "deepseek_v32" else {})

    def load(layout: Layout, devices: Sequence[jax.Device]) -> LoadedModel:
        return load_model(GOLDEN / name, layout, devices)

    sizes = MeshSizes(page_size=8, chunk_tokens=16, context_tokens=112)
    with Engine(load, sizes=sizes) as engine:
        kv = engine.prefill(prompt, layout=PrefillLayout(tp=4))
        with engine.create_session("s", layout=DecoderLayout(dp=2)) as session:
            session.push(kv)
            found = engine.generate_tokens(session, 20).token_ids
            move = session.push(engine.pull("s"), target_layout=DecoderLayout(dp=2, tp=2))
            assert move.bytes == 48 * LAYERS * sum(kept.values()) * 4 * 2
            found += engine.generate_tokens(session, 20).token_ids
            held = session.pull()
    assert found == tuple(greedy[:40])
    for part, width in kept.items():
        values = held.layer(0).components[part]
        assert values.shape == (1, len(prompt) + 40, width)
        assert values.sharding.is_fully_replicated
        np.testing.assert_allclose(
            np.asarray(values)[:, : len(prompt)],
            np.asarray(kv.layer(0).components[part]),
            atol=1e-6,
        )
