"""Makes the golden fixtures of models that read images: tiny random checkpoints with images.npz, a
prompt with two images, its logits and greedy tokens by Hugging Face transformers.

Run like `make.py`: `python tests/golden/make_images.py`, with names of fixtures as arguments to
make those alone."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from make import BESIDE_EYES, EYES, HERE, LEAST_MARGIN, TABLES, Variant, random_model

LINEAR, FULL = "linear_attention", "full_attention"
DELTA, MOE, MROPE = (TABLES[name] for name in ("delta", "moe", "mrope"))
GREEDY, IMAGE, BREAK, END = 12, 7, 8, 9
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Pictured:
    """A fixture: text part, vision encoder, and the grids of its two images in patches. Each image
    begins where text of the given length before it ends."""

    variant: Variant
    eyes: Mapping[str, object]
    beside: Mapping[str, object] = field(default_factory=dict)
    patch: int = 2
    grids: tuple[tuple[int, int], ...] = ((4, 6), (8, 4))
    text: tuple[int, ...] = (12, 9, 7)
    breaks: bool = False


QWEN_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
QWEN_EYES = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 9, "patch_size": 2,
}  # fmt: skip
QWEN_TEXT = DELTA | {"head_dim": 32, "rope_parameters": QWEN_ROPE, "linear_conv_kernel_dim": 3}
FIXTURES = {
    "qwen3_5_images": Pictured(
        Variant("qwen3_5", QWEN_TEXT | {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, FULL]}),  # noqa: E501
        QWEN_EYES,
        {"image_token_id": IMAGE},
    ),
    "qwen3_5_moe_images": Pictured(
        Variant("qwen3_5_moe", MOE | QWEN_TEXT | {"shared_expert_intermediate_size": 20, "num_hidden_layers": 3,  # noqa: E501
                                                  "layer_types": [LINEAR, FULL, FULL]}),
        QWEN_EYES,
        {"image_token_id": IMAGE},
    ),
    "qwen3_vl_images": Pictured(
        Variant("qwen3_vl", {"head_dim": 12, "rope_parameters": MROPE}),
        QWEN_EYES | {"depth": 3, "deepstack_visual_indexes": [0, 1]},
        {"image_token_id": IMAGE},
    ),
    "mistral3_images": Pictured(
        Variant("mistral3", {"model_type": "mistral", "head_dim": 12, "sliding_window": None}),
        {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,  # noqa: E501
         "num_attention_heads": 2, "image_size": 16, "patch_size": 2},
        {"image_token_index": IMAGE},
        breaks=True,
    ),
}  # fmt: skip


def make(name: str, pictured: Pictured) -> None:
    """Writes one fixture's folder anew."""
    family = pictured.variant.family
    EYES[family], BESIDE_EYES[family] = dict(pictured.eyes), dict(pictured.beside)
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    for seed in range(200):
        model = random_model(pictured.variant, seed)
        found, margin, apart = reference(model, pictured, seed)
        if margin >= LEAST_MARGIN and len(set(found["greedy"].tolist())) >= 6 and apart > 1:
            break
    else:
        raise SystemExit(f"{name}: no seed gives margins of {LEAST_MARGIN}")
    model.to(pictured.variant.dtype).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(directory / "images.npz", **found)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{name}: seed {seed}, smallest margin {margin:.3f}, other image {apart:.2f}, {size} bytes"
    )


@torch.no_grad()
def reference(
    model: torch.nn.Module, pictured: Pictured, seed: int
) -> tuple[dict[str, np.ndarray], float, float]:
    """Returns the arrays of images.npz, the smallest margin of a greedy token, and the largest
    difference of the last logits if the first image is another one."""
    random = np.random.default_rng(seed)
    prompt: list[int] = []
    starts, lengths, images = [], [], []
    for (height, width), text in zip(pictured.grids, pictured.text, strict=False):
        prompt += random.integers(10, 131, text).tolist()
        starts.append(len(prompt))
        rows, columns = height // 2, width // 2
        for row in range(rows):
            prompt += [IMAGE] * columns
            prompt += [END if row == rows - 1 else BREAK] * pictured.breaks
        lengths.append(len(prompt) - starts[-1])
        shape = (height * pictured.patch, width * pictured.patch, 3)
        images.append(random.integers(0, 256, shape, dtype=np.uint8))
    prompt += random.integers(10, 131, pictured.text[-1]).tolist()
    other = [random.integers(0, 256, images[0].shape, dtype=np.uint8), *images[1:]]
    logits = forward(model, pictured, prompt, images)
    apart = np.abs(forward(model, pictured, prompt, other)[-1] - logits[-1]).max()
    tokens, margin, last = list(prompt), float("inf"), logits[-1]
    for _ in range(GREEDY):
        best = np.sort(last)[-2:]
        margin = min(margin, float(best[1] - best[0]))
        tokens.append(int(last.argmax()))
        last = forward(model, pictured, tokens, images)[-1]
    arrays = {
        "prompt": np.array(prompt, np.int32),
        "starts": np.array(starts, np.int32),
        "lengths": np.array(lengths, np.int32),
        "grids": np.array([(1, *grid) for grid in pictured.grids], np.int32),
        "logits": logits,
        "greedy": np.array(tokens[len(prompt) :], np.int32),
    }
    arrays |= {f"pixels{number}": image for number, image in enumerate(images)}
    return arrays, margin, float(apart)


def forward(
    model: torch.nn.Module, pictured: Pictured, tokens: list[int], images: list[np.ndarray]
) -> np.ndarray:
    """Returns the logits of all tokens, computed without a cache."""
    ids = torch.tensor([tokens])
    if pictured.variant.family == "mistral3":
        sizes = torch.tensor([image.shape[:2] for image in images])
        pixels = torch.zeros((len(images), 3, *sizes.max(0).values.tolist()))
        for number, image in enumerate(images):
            one = torch.tensor(normal(image, CLIP_MEAN, CLIP_STD)).permute(2, 0, 1)
            pixels[number, :, : image.shape[0], : image.shape[1]] = one
        return model(ids, pixel_values=pixels, image_sizes=sizes).logits[0].numpy()
    grids = torch.tensor([(1, *grid) for grid in pictured.grids])
    pixels = torch.tensor(
        np.concatenate([patches(normal(one, HALF, HALF), pictured.patch) for one in images])
    )
    kinds = (ids == IMAGE).int()
    out = model(ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds)
    return out.logits[0].numpy()


def normal(image: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    wide = image.astype(np.float32) / 255
    return ((wide - np.float32(mean)) / np.float32(std)).astype(np.float32)


def patches(image: np.ndarray, patch: int) -> np.ndarray:
    """Returns the patches as Qwen's processor does: [patches, channels x frames x rows x
    columns]."""
    height, width = image.shape[0] // patch, image.shape[1] // patch
    parts = image.reshape(height // 2, 2, patch, width // 2, 2, patch, 3)
    parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)  # blocks, patches of a block, channels, pixels
    frames = np.repeat(parts[:, :, :, :, :, None], 2, axis=5)
    return frames.reshape(height * width, -1)


if __name__ == "__main__":
    for fixture in sys.argv[1:] or FIXTURES:
        make(fixture, FIXTURES[fixture])
