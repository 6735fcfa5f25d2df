"""Storms of golden checkpoints: requests of many kinds, and the meshes that they run on."""

from dataclasses import replace
from pathlib import Path

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.prompt.images import PromptImage
from jdisagg.request import Request
from tests.end_to_end.clusters import Running
from tests.end_to_end.two_decoders import LEASES
from tests.fakes.cluster import Collected
from tests.golden.images import other_image
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


def alone_and_crowded(
    directory: Path, prefill: str, decode: str
) -> tuple[EngineConfig, EngineConfig]:
    """One mesh without reuse, and two with too few pages, prefix caches and host memory."""
    sizes = {"directory": directory, "context": 128, "slots": 6, "chunk": 32}
    crowded = config(
        prefill=prefill, decode=decode, decode_page=4, pages=34, growth=1, limits=LEASES, **sizes
    )  # type: ignore[arg-type]
    kept = PrefixConfig(True, 16, host_gib=0.1, restores="always")
    return config(Mode.UNIFIED, **sizes), replace(crowded, prefix=kept)  # type: ignore[arg-type]
