"""Rule 1 for KV of every kind (latents, state beside KV, sliding-window ring buffers, images,
quantized weights).

32 mixed requests at once, disaggregated, with too few pages, prefix caches and host memory, moved
between two decode workers one of which dies, have the streams of each alone on one mesh without
reuse. All pages and slots of state are free at the end."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.prompt.images import PromptImage
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, golden_copy, golden_greedy, running
from tests.end_to_end.two_decoders import LEASES, TwoDecoders, storm
from tests.fakes.cluster import Collected
from tests.golden.images import golden_images, other_image
from tests.shapes import config

LENGTHS = (24, 3, 31, 8, 40, 9, 53, 17)  # prompt lengths; a chunk has 32 tokens


def mixed_requests(
    run: Running, whole: list[int], images: tuple[PromptImage, ...] = ()
) -> list[Request]:
    """Greedy and seeded ones, penalties, bias, minimum lengths, several of a prompt, shorter and
    longer than a window and than a chunk. Prompts have those of the `images` that they have room
    for, or others of the same size."""
    requests = []
    for number in range(32):
        options: dict[str, object] = {
            "max_tokens": (20, 40, 30)[number % 3],
            "seed": number,
            "temperature": 0.7 if number % 2 else 0.0,
            "ignore_eos": number % 4 != 3,
        }
        if number % 5 == 1:
            options["n"] = 2
        if number % 6 == 2:
            options |= {"presence_penalty": 0.4, "repetition_penalty": 1.2}
        if number % 7 == 3:
            options |= {"logit_bias": ((20, 3.0),), "min_tokens": 4, "logprobs": 2}
        if number % 8 == 5:
            options |= {"top_p": 0.9, "top_k": 20}
        prompt = whole[: LENGTHS[number % len(LENGTHS)]]
        seen = [one if number % 4 < 2 else other_image(one) for one in images]
        request = run.request(prompt, f"r{number}", **options)
        seen = [one for one in seen if one.end <= len(prompt)]
        requests.append(replace(request, images=tuple(seen)))
    return requests


def streams(done: list[Collected]) -> list[object]:
    return [(one.tokens, one.finish) for one in done]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weights", "prefill", "decode"),
    [
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
    ],
)
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
    sizes = {"directory": directory, "context": 128, "slots": 6, "chunk": 32}
    alone = config(Mode.UNIFIED, **sizes)  # type: ignore[arg-type]
    crowded = config(
        prefill=prefill, decode=decode, decode_page=4, pages=34, growth=1, limits=LEASES, **sizes
    )  # type: ignore[arg-type]
    alone, crowded = (
        replace(one, model=replace(one.model, weights=weights)) for one in (alone, crowded)
    )
    crowded = replace(crowded, prefix=PrefixConfig(True, 16, host_gib=0.1, restores="always"))
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
