"""Rule 1 for KV of every kind (latents, state beside KV, sliding-window ring buffers, layers that
read the KV of others, images, quantized weights).

32 mixed requests at once, disaggregated, with too few pages, prefix caches and host memory, moved
between two decode workers one of which dies, have the streams of each alone on one mesh without
reuse. All pages and slots of state are free at the end."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.prompt.images import PromptImage
from tests.end_to_end.clusters import golden_copy, golden_greedy, running
from tests.end_to_end.family_storms import LENGTHS, alone_and_crowded, mixed_requests, streams
from tests.end_to_end.two_decoders import TwoDecoders, storm
from tests.golden.images import golden_images
from tests.lanes import first_ci

# In lane ci: layers that read the KV of an earlier layer, and windows beside state.
CASES = (
    ("gemma4_e2b", "", "tp=2", "dp=2"),
    ("lfm3", "", "tp=2", "dp=2"),
    ("bailing_hybrid", "", "tp=2", "dp=2,ep=2"),
    ("deepseek_v3", "", "tp=2,ep=2", "dp=2,ep=2"),
    ("deepseek_v32", "", "tp=2", "dp=2,ep=2"),
    ("glm_moe_dsa_shared", "", "tp=2", "dp=2,ep=2"),
    ("minimax_m3", "", "tp=2", "dp=2,ep=2"),
    ("lfm2", "", "tp=1", "dp=2"),
    ("qwen3_next", "", "tp=2", "dp=2"),
    ("kimi_linear", "", "tp=2", "dp=2,ep=2"),
    ("minimax", "", "tp=2", "dp=2,ep=2"),
    ("qwen3_5_images", "", "tp=2", "dp=2"),
    ("mistral3_images", "", "dp=2", "tp=2"),
    ("gpt_oss", "", "tp=1", "dp=2"),
    ("gemma4", "", "tp=2", "dp=2"),
    ("nemotron_h_moe", "", "tp=1", "dp=2"),
    ("qwen3_moe", "int8", "tp=2,ep=2", "dp=2,ep=2"),
)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "weights", "prefill", "decode"), first_ci(CASES, 2))
async def test_a_storm_changes_no_stream(
    name: str, weights: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    images: tuple[PromptImage, ...] = ()
    if name.endswith("_images"):
        found, images = golden_images(name)
        whole = [*found["prompt"].tolist(), *found["greedy"].tolist()]
    else:
        prompt, greedy = golden_greedy(directory)
        whole = [*prompt, *greedy]
    alone, crowded = (
        replace(one, model=replace(one.model, weights=weights))
        for one in alone_and_crowded(directory, prefill, decode)
    )
    async with running(alone, first_device=4) as run:
        requests = mixed_requests(run, whole, images)
        expected = streams([await run.complete(request) for request in requests])
    if not (weights or images):
        first = expected[0][0][0]  # type: ignore[index]
        assert first == whole[LENGTHS[0] :][: len(first)], "not the tokens of transformers"
    async with running(crowded, kind=TwoDecoders) as run:
        asked = lambda run: mixed_requests(run, whole, images)  # noqa: E731
        cluster = await storm(run, asked, streams, expected)
        hits = [worker.counters["prefix_hit_tokens"] for worker in cluster._workers]
        assert sum(hits) > 0 or images, f"{hits}: nothing was reused"
