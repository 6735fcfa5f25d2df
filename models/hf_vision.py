"""Maps each parameter of a vision encoder to its tensors in a Hugging Face checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.hf_sources import Index, ReadTensor, SomeRows, Source, Whole
from models.parameter_tree import ParameterShape
from models.vision_config import VisionConfig

# Tensor names of the parameters in a block, and of the parameters outside of the blocks.
_BLOCK = {
    "qwen": {
        "attention_norm": "norm1",
        "o": "attn.proj",
        "mlp_norm": "norm2",
        "up": "mlp.linear_fc1",
        "down": "mlp.linear_fc2",
    },
    "pixtral": {
        "attention_norm": "attention_norm",
        "q": "attention.q_proj",
        "k": "attention.k_proj",
        "v": "attention.v_proj",
        "o": "attention.o_proj",
        "mlp_norm": "ffn_norm",
        "gate": "feed_forward.gate_proj",
        "up": "feed_forward.up_proj",
        "down": "feed_forward.down_proj",
    },
}
_BLOCKS = {"qwen": "visual.blocks.", "pixtral": "vision_tower.transformer.layers."}
_REST = {
    "qwen": {
        "patches.project": "visual.patch_embed.proj",
        "merger.norm": "visual.merger.norm",
        "merger.up": "visual.merger.linear_fc1",
        "merger.out": "visual.merger.linear_fc2",
    },
    "pixtral": {
        "patches.project": "vision_tower.patch_conv",
        "patches.norm": "vision_tower.ln_pre",
        "merger.norm": "multi_modal_projector.norm",
        "merger.merge": "multi_modal_projector.patch_merger.merging_layer",
        "merger.up": "multi_modal_projector.linear_1",
        "merger.out": "multi_modal_projector.linear_2",
    },
}


@dataclass(frozen=True, slots=True)
class Arranged:
    """A parameter [in, out] that the function `arrange` computes from one whole tensor.
    `transposed` means that the parameter is [out, in]."""

    name: str
    shape: tuple[int, ...]
    arrange: Callable[[np.ndarray], np.ndarray]
    transposed: bool

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        found = self.arrange(tensor(self.name, (slice(None),) * len(self.shape)))
        return (found.T if self.transposed else found)[index]


@dataclass(frozen=True, slots=True)
class OfVision:
    """A parameter of the vision encoder. `tensor` reads the encoder's tensors, which are not among
    the tensors of the text part."""

    source: Source
    tensor: ReadTensor

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        return self.source.read(self.tensor, index)


def vision_source(parameter: ParameterShape, config: VisionConfig) -> Source:
    """The path begins with "vision"."""
    _, first, *rest = parameter.path
    kind, shape = config.kind, parameter.shape
    if first == "blocks":
        number, part, end = rest
        if kind == "qwen" and part in ("q", "k", "v"):
            return _fused(f"{_BLOCKS[kind]}{number}.attn.qkv", str(part), str(end), parameter)
        name = f"{_BLOCKS[kind]}{number}.{_BLOCK[kind][str(part)]}"
    elif first == "deep_mergers":
        number, part, end = rest
        name = _REST[kind][f"merger.{part}"].replace(
            "visual.merger", f"visual.deepstack_merger_list.{number}"
        )
    elif rest == ["positions"]:
        return Whole("visual.pos_embed.weight", shape)
    else:
        part, end = rest
        name = _REST[kind][f"{first}.{part}"]
    if end != "kernel":
        return Whole(f"{name}.{end}", shape)
    if (first, part) == ("patches", "project"):
        frames = (config.frames,) if kind == "qwen" else ()
        stored = (config.width, 3, *frames, config.patch, config.patch)
        return Arranged(f"{name}.weight", stored, _by_pixel, parameter.transposed)
    if (first, part) == ("merger", "merge"):
        merged = config.merge**2

        def by_patch(found: np.ndarray) -> np.ndarray:
            parts = found.reshape(found.shape[0], -1, merged)
            return parts.transpose(2, 1, 0).reshape(-1, found.shape[0])

        stored = (config.width, config.width * merged)
        return Arranged(f"{name}.weight", stored, by_patch, parameter.transposed)
    if parameter.transposed:
        return Whole(f"{name}.weight", shape)
    return Whole(f"{name}.weight", shape[::-1], flipped=True)


def _fused(name: str, part: str, end: str, parameter: ParameterShape) -> Source:
    size = parameter.shape[0]
    stored = (3 * size,) if end == "bias" else (3 * size, size)
    first = "qkv".index(part) * size
    rows = tuple(range(first, first + size))
    name += ".bias" if end == "bias" else ".weight"
    return SomeRows(name, stored, rows, end == "kernel" and not parameter.transposed)


def _by_pixel(found: np.ndarray) -> np.ndarray:
    """The matrices of the frames are added, because all frames of an image are equal."""
    wide = found.astype(np.float32)
    if wide.ndim == 5:
        wide = wide.sum(axis=2)
    return wide.transpose(2, 3, 1, 0).reshape(-1, wide.shape[0])
