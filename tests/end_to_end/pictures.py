"""Requests with images, of the golden checkpoints that have an encoder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.messages.step_commands import PrefillChunk, PrefillRow
from jdisagg.prompt.images import PromptImage
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, golden_copy
from tests.shapes import config
from tests.vision import file_of

QWEN, PIXTRAL, DEEP = "qwen3_5_images", "mistral3_images", "qwen3_vl_images"


SEEING: dict[str, Any] = {
    "prefill": "tp=1",
    "decode": "tp=1",
    "context": 256,
    "slots": 4,
    "chunk": 16,
}


def engine(folder: Path, name: str, mode: Mode, **more: object) -> EngineConfig:
    directory = golden_copy(name, folder)
    made = config(mode, directory=directory, **(SEEING | more))
    return replace(made, prefix=PrefixConfig(True, 16, host_gib=0))


def asked(
    run: Running,
    prompt: Sequence[int],
    images: tuple[PromptImage, ...],
    name: str = "r",
    **sampling: object,
) -> Request:
    options = {"max_tokens": 12, "ignore_eos": True, **sampling}
    return replace(run.request(prompt, name, **options), images=images)


def rows(run: Running) -> list[PrefillRow]:
    commands = [*run.recording.prefill, *run.recording.decode]
    chunks = [getattr(one, "chunk", one) for one in commands]
    return [row for one in chunks if isinstance(one, PrefillChunk) for row in one.rows]


def file(image: PromptImage, patch: int = 2) -> bytes:
    """A PNG file of an image that needs no resize."""
    height, width = (size * patch for size in image.grid[1:])
    return file_of(np.frombuffer(image.pixels, np.uint8).reshape(height, width, 3))
