"""Resized pixels, sizes and tokens of images equal those of transformers' processors
(tests/golden/make_pixels.py)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jdisagg.errors import InvalidRequestError
from models import vision_config
from models.image_processor import ImageProcessor, read_image_processor
from models.image_resize import BICUBIC, BILINEAR, resized
from models.vision import normalised
from tests.vision import IDS, SETTINGS, backend, pattern, processor, write_settings

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "golden" / "pixels.json").read_text()
)
FRAMES = {"qwen": 2, "qwen14": 2, "pixtral": 1}


def _read(folder: Path, **settings: Any) -> ImageProcessor | None:
    """The processor of a folder, with other settings."""
    path, made = folder / "preprocessor_config.json", backend()
    if settings:
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return read_image_processor(folder, made.id_to_token, made.token_to_id)


@pytest.mark.parametrize("kind", SETTINGS)
def test_pixels_of_odd_sizes_equal_transformers(tmp_path: Path, kind: str) -> None:
    ours = processor(tmp_path, kind)
    assert len(GOLDEN[kind]) == 20
    for expected in GOLDEN[kind]:
        height, width = expected["size"]
        layout = ours.layout("image", height, width)
        assert list(layout.grid) == expected["grid"], expected["size"]
        pixels = ours.resized(pattern(height, width), layout)
        assert pixels.shape == (layout.height, layout.width, 3) and pixels.dtype == np.uint8
        patches = patched(ours, pixels, kind != "pixtral", FRAMES[kind])
        assert hashlib.sha256(patches.tobytes()).hexdigest() == expected["digest"], expected["size"]
        rows, columns, values = zip(*expected["values"], strict=True)
        # [sampled patches, pixels and frames, channels]
        sampled = patches[list(rows)].transpose(0, 2, 3, 4, 1)
        made = normalised(jnp.asarray(sampled.reshape(len(rows), -1)), *normalisation(kind))
        made = np.asarray(made).reshape(sampled.shape).transpose(0, 4, 1, 2, 3)
        made = made.reshape(len(rows), -1)[np.arange(len(rows)), list(columns)]
        assert np.abs(made - np.asarray(values)).max() < 1e-6


@pytest.mark.parametrize("kind", SETTINGS)
def test_tokens_of_a_prompt_with_an_image_equal_transformers(tmp_path: Path, kind: str) -> None:
    ours, codec = processor(tmp_path, kind), backend()
    before, after = {"pixtral": ("[INST]", "What?[/INST]")}.get(
        kind,
        (
            "<|im_start|>user\n<|vision_start|>",
            "<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n",
        ),
    )
    for expected in GOLDEN[kind]:
        layout = ours.layout("image", *expected["size"])
        ids = [*codec.encode(before).ids, *layout.token_ids, *codec.encode(after).ids]
        assert len(ids) == expected["count"]
        assert hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest() == expected["tokens"]


def normalisation(kind: str) -> Any:
    settings = SETTINGS[kind]["preprocessor_config.json"]
    return (
        settings.get("image_mean", vision_config.CLIP_MEAN),
        settings.get("image_std", vision_config.CLIP_STD),
    )


def patched(processor: ImageProcessor, pixels: np.ndarray, blocks: bool, frames: int) -> np.ndarray:
    """Patches [patches, channels, frames, side, side] in the order of the encoder: in blocks of
    merged patches, or row by row."""
    side, merge = processor.patch, processor.merge if blocks else 1
    height, width = (size // (side * merge) for size in pixels.shape[:2])
    cut = pixels.reshape(height, merge, side, width, merge, side, 3)
    cut = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, side, side)
    return np.repeat(cut, frames, axis=2)


@pytest.mark.parametrize(("filter", "pillow"), [(BICUBIC, "BICUBIC"), (BILINEAR, "BILINEAR")])
def test_a_resized_image_differs_from_pillows_by_rounding_alone(filter: int, pillow: str) -> None:
    """Pillow has the same filters with weights of more bits."""
    for before, after in (((37, 53), (56, 56)), ((101, 120), (64, 97)), ((50, 50), (50, 80))):
        image = pattern(*before)
        size = (after[1], after[0])
        expected = Image.fromarray(image).resize(size, getattr(Image.Resampling, pillow))
        difference = np.abs(resized(image, *after, filter).astype(int) - np.asarray(expected))
        assert difference.max() <= 1


def test_an_image_of_the_wanted_size_stays_as_it_is() -> None:
    image = pattern(32, 64)
    np.testing.assert_array_equal(resized(image, 32, 64, BICUBIC), image)


def test_a_long_strip_is_refused(tmp_path: Path) -> None:
    ours = processor(tmp_path, "qwen")
    ours.layout("image", 2, 400)
    with pytest.raises(InvalidRequestError, match="x has 402 x 2 pixels; one side .* 200 times"):
        ours.layout("x", 2, 402)


def test_an_image_larger_than_the_encoder_reads_is_reduced(tmp_path: Path) -> None:
    write_settings(tmp_path, "qwen")
    ours = _read(tmp_path, size={"shortest_edge": 65536, "longest_edge": 16777216})
    assert ours is not None
    time, height, width = ours.layout("image", 2160, 3840).grid
    assert 0.95 * vision_config.MOST_PATCHES < time * height * width <= vision_config.MOST_PATCHES


def test_rows_of_pixtral_end_with_tokens_of_their_own(tmp_path: Path) -> None:
    layout = processor(tmp_path, "pixtral").layout("image", 56, 84)
    image, row_end, end = (IDS[f"[IMG{name}]"] for name in ("", "_BREAK", "_END"))
    assert layout.token_ids == (image, image, image, row_end, image, image, image, end)
    assert layout.grid == (1, 4, 6)


def test_a_model_without_a_vision_encoder_has_no_processor(tmp_path: Path) -> None:
    write_settings(tmp_path, "qwen")
    for config in (
        {"model_type": "qwen3_5_text"},
        {"model_type": "gemma3", "vision_config": {}},
        {"model_type": "qwen3_5", "image_token_id": 1},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert _read(tmp_path) is None, config


def test_a_folder_without_the_processors_settings_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_settings(tmp_path, "qwen")
    (tmp_path / "preprocessor_config.json").unlink()
    assert _read(tmp_path) is None
    assert "has no preprocessor_config.json; take it from the published model" in caplog.text


def test_settings_that_are_not_supported_are_logged_and_images_are_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for changed, words in (
        ({"resample": 1}, "resample of the image processor must be 2 or 3, got 1"),
        ({"do_rescale": False}, "do_rescale of the image processor must be true"),
        ({"patch_size": 0}, "patch_size of the image processor must be a positive integer"),
        ({"size": {"longest_edge": "x"}}, "size.longest_edge of the image processor"),
    ):
        write_settings(tmp_path, "qwen")
        assert _read(tmp_path, **changed) is None
        assert words in caplog.text


def test_settings_in_processor_config_take_precedence(tmp_path: Path) -> None:
    ours = processor(tmp_path, "qwen")
    settings = SETTINGS["qwen"]["preprocessor_config.json"] | {
        "size": {"shortest_edge": 65536, "longest_edge": 131072}
    }
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    larger = _read(tmp_path)
    assert larger is not None
    assert ours.layout("image", 64, 64).grid == (1, 4, 4)
    assert larger.layout("image", 64, 64).grid == (1, 16, 16)
