"""Logits of prompts with images against Hugging Face transformers (tests/golden/make_images.py)."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jdisagg.executor.image_programs import patches_of
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.dense_recurrence import recur_from_the_beginning
from jdisagg.prompt.images import ImageFormat, PromptImage, rows_of_image, spatial_positions
from models.checkpoint import load_model
from models.inspection import inspect
from tests.golden.images import FIXTURES, GOLDEN, golden_images
from tests.lanes import first_quick


def encoded(
    model: Any, image: PromptImage, form: ImageFormat, padding: int = 0
) -> tuple[np.ndarray, ...]:
    """Embeddings of the image's tokens, and what is added after the first layers."""
    vision, shards = model.vision, Shards()

    @jax.jit
    def run(pixels: jax.Array, place: jax.Array, size: jax.Array, count: jax.Array):
        x = vision.patches(pixels, place, size, shards)
        deep, after = [], vision.deep_after
        for number, block in enumerate(vision.blocks):
            x = block(x, place, count, shards)
            if number in after:
                deep.append(vision.deep_mergers[after.index(number)](x, shards))
        return vision.merger(x, shards), *deep

    pixels, place = (np.pad(each, ((0, padding), (0, 0))) for each in patches_of(image, form))
    found = run(pixels, place, np.array(image.grid[1:]), np.int32(image.patches))
    return tuple(np.asarray(each)[: form.tokens(image)] for each in found)


@pytest.mark.parametrize(("name",), first_quick(((name,) for name in FIXTURES), ci=2))
def test_logits_of_a_prompt_with_images_equal_transformers(name: str) -> None:
    expected, images = golden_images(name)
    model = load_model(GOLDEN / name, Layout(), jax.devices()[:1], images=True).model
    assert model.vision is not None
    form, tokens = model.vision.format, np.concatenate((expected["prompt"], expected["greedy"]))
    for image in images:
        form.check(image, tokens.tolist())
    index = np.arange(len(tokens), dtype=np.int32)
    positions = spatial_positions(0, len(tokens), 0, images, form) if form.spatial else index
    x_TD = model.stem.embed(jnp.asarray(tokens), Shards())
    deep = [jnp.zeros_like(x_TD) for _ in model.vision.deep_after]
    for image in images:
        rows = rows_of_image(image, image.start, image.end, form)
        at = image.start + np.flatnonzero(rows >= 0)
        own, *added = encoded(model, image, form)
        x_TD = x_TD.at[at].set(own)
        deep = [one.at[at].set(more) for one, more in zip(deep, added, strict=True)]
    logits_TV = np.asarray(_logits(nnx.graphdef(model), nnx.state(model), x_TD, positions, deep))
    count = len(expected["prompt"])
    assert np.abs(logits_TV[:count] - expected["logits"]).max() < 1e-4
    np.testing.assert_array_equal(logits_TV[count - 1 : -1].argmax(1), expected["greedy"])


@partial(jax.jit, static_argnums=0)
def _logits(
    graphdef: Any, state: Any, x_TD: jax.Array, positions: jax.Array, deep: list[jax.Array]
) -> jax.Array:
    model, shards = nnx.merge(graphdef, state), Shards()
    for number, (layer, kept) in enumerate(zip(model.layers, model.kv_spec.layers, strict=True)):
        recur = recur_from_the_beginning(kept.state, "float32", x_TD.shape[0], shards)
        x_TD = layer(x_TD, positions, dense_causal_attend, shards, recur=recur)
        x_TD = x_TD + deep[number] if number < len(deep) else x_TD
    return model.head.logits(x_TD, shards)


# Whose text parts have other experts alone.
DENSE = [name for name in FIXTURES if "_moe" not in name]


@pytest.mark.parametrize(("name",), first_quick(((name,) for name in DENSE), quick=0))
def test_padding_of_an_image_changes_nothing(name: str) -> None:
    _, (image, _) = golden_images(name)
    model = load_model(GOLDEN / name, Layout(), jax.devices()[:1], images=True).model
    assert model.vision is not None
    form = model.vision.format
    (padded, *_), (plain, *_) = (encoded(model, image, form, rows) for rows in (40, 0))
    np.testing.assert_allclose(padded, plain, atol=1e-5)


@pytest.mark.parametrize(("name",), first_quick((name,) for name in DENSE))
def test_a_checkpoint_without_the_encoders_tensors_serves_text(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    tensors = load_file(folder / "model.safetensors")
    eyes = ("visual", "vision_tower", "multi_modal")
    kept = {key: value for key, value in tensors.items() if not any(part in key for part in eyes)}
    assert 0 < len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors")
    assert load_model(folder, Layout(), jax.devices()[:1], images=True).model.vision is None
    found = inspect(folder)
    assert found.config is not None
    assert (found.config.vision, found.missing) == (None, [])


def test_an_encoder_that_is_not_supported_leaves_the_text_part(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "qwen3_5_images", tmp_path / "other"))
    fields = json.loads((folder / "config.json").read_text())
    fields["vision_config"]["hidden_act"] = "tanh"
    (folder / "config.json").write_text(json.dumps(fields))
    assert load_model(folder, Layout(), jax.devices()[:1], images=True).model.vision is None


def test_pixels_are_normalised_as_the_processors_file_states(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "qwen3_5_images", tmp_path / "other"))
    stated = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    config = load_model(folder, Layout(), jax.devices()[:1], images=True).model.config.vision
    assert config is not None
    assert (list(config.mean), list(config.std)) == (stated["image_mean"], stated["image_std"])
