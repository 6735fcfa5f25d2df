"""Writes pixels.json: what transformers' processors make of images of odd sizes.

    PYTHONPATH=. python -m tests.golden.make_pixels

Needs torch, torchvision and transformers. Of each image the file has the grid, a digest of the
resized uint8 pixels, some patched pixel values, and a digest of the tokens of a prompt with it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor
from transformers.models.pixtral.processing_pixtral import PixtralProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from tests.vision import SETTINGS, TEMPLATES, backend, pattern

SIZES = (
    *((1, 1), (2, 3), (301, 7), (28, 28), (27, 29), (55, 57), (56, 56), (63, 200), (37, 111)),
    *((127, 255), (224, 224), (240, 320), (333, 333), (480, 271), (511, 512), (40, 600)),
    *((719, 91), (603, 801), (33, 1025), (957, 640)),
)
SAMPLES = 24
TARGET = Path(__file__).parent / "pixels.json"


def main() -> None:
    made = {kind: [_image(kind, height, width) for height, width in SIZES] for kind in SETTINGS}
    about = f"transformers {transformers.__version__}, torch {torch.__version__}"
    TARGET.write_text(json.dumps({"about": about, **made}, indent=None, separators=(",", ":")))


def _image(kind: str, height: int, width: int) -> dict[str, Any]:
    processor = _processor(kind)
    image = torch.from_numpy(pattern(height, width)).permute(2, 0, 1)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    whole = processor(text=[text], images=[image], return_tensors="pt")
    values, grid = _patches(kind, whole)
    mean, std = (np.asarray(one) for one in _normalisation(processor))
    side = processor.image_processor.patch_size
    patch = side["height"] if not isinstance(side, int) else side
    count = values.shape[1] // (3 * patch * patch)
    shaped = values.reshape(len(values), 3, count, patch, patch)
    pixels = np.rint((shaped * std[:, None, None, None] + mean[:, None, None, None]) * 255)
    random = np.random.default_rng(height * 10_007 + width)
    at = [
        (int(random.integers(values.shape[0])), int(random.integers(values.shape[1])))
        for _ in range(SAMPLES)
    ]
    return {
        "size": [height, width],
        "grid": grid,
        "digest": hashlib.sha256(pixels.astype(np.uint8).tobytes()).hexdigest(),
        "values": [[row, column, float(values[row, column])] for row, column in at],
        "tokens": hashlib.sha256(np.asarray(whole["input_ids"][0], np.int32).tobytes()).hexdigest(),
        "count": int(whole["input_ids"].shape[1]),
    }


def _processor(kind: str) -> Any:
    settings = SETTINGS[kind]
    fields = dict(settings["preprocessor_config.json"])
    fields.pop("image_processor_type")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend())
    if kind == "pixtral":
        return PixtralProcessor(
            PixtralImageProcessor(**fields),
            tokenizer,
            patch_size=14,
            spatial_merge_size=2,
            chat_template=TEMPLATES["pixtral"],
        )
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**fields),
        tokenizer,
        Qwen3VLVideoProcessor(),
        chat_template=TEMPLATES["qwen"],
    )


def _patches(kind: str, whole: Any) -> tuple[np.ndarray, list[int]]:
    """Patched values [patches, values] and the grid. Those of Pixtral are patched here, row by
    row, as its encoder's convolution reads them."""
    values = whole["pixel_values"].numpy()
    if kind != "pixtral":
        return values, whole["image_grid_thw"][0].tolist()
    height, width = (int(size) for size in whole["image_sizes"][0])
    assert values.shape == (1, 3, height, width)
    grid = [1, height // 14, width // 14]
    cut = values[0].reshape(3, grid[1], 14, grid[2], 14).transpose(1, 3, 0, 2, 4)
    return cut.reshape(grid[1] * grid[2], -1), grid


def _normalisation(processor: Any) -> tuple[list[float], list[float]]:
    return processor.image_processor.image_mean, processor.image_processor.image_std


if __name__ == "__main__":
    main()
