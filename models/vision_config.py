"""Configuration of a model's vision encoder as frozen plain data, read from the `vision_config` of
a multimodal config.json. Holds no JAX arrays.

An unsupported vision encoder is not an error. `read_vision` then returns None, the text part is
served, and requests with images are refused."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from jdisagg.costs.model_geometry import ImageEncoder
from jdisagg.prompt.images import ImageFormat
from models.hf_config import HfConfig

# Largest number of patches of an image that programs are compiled for: 2,048 x 2,048 pixels with
# patches of 16.
MOST_PATCHES = 16384
# Number of images of the largest size whose encoded activations an instance keeps on each device.
KEPT_IMAGES = 4
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of a vision encoder.

    Attributes:
        kind: "qwen" (Qwen3-VL, Qwen3.5): LayerNorm, biases, learned positions. "pixtral"
            (Mistral 3): RMSNorm, gated feed-forward blocks.
        side: Height and width of the table of learned positions; 0 without one.
        frames: Number of equal frames that the patch embedding reads.
        spatial: Whether image tokens have rotary positions in three dimensions.
        deepstack: Numbers of encoder blocks. The projected activations of the n-th of these blocks
            are added to the image tokens after the n-th layer of the text model.
    """

    kind: Literal["qwen", "pixtral"]
    width: int
    ffn: int
    heads: int
    layers: int
    patch: int
    merge: int
    out_width: int
    image_token: int
    theta: float
    activation: Literal["gelu_tanh", "gelu", "silu"]
    side: int = 0
    frames: int = 1
    spatial: bool = False
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    biased: bool = True
    out_epsilon: float = 1e-6
    deepstack: tuple[int, ...] = ()

    @property
    def format(self) -> ImageFormat:
        return ImageFormat(self.image_token, self.patch, self.merge, self.spatial, MOST_PATCHES)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kept_rows(self) -> int:
        return KEPT_IMAGES * MOST_PATCHES // self.merge**2

    @property
    def parameters(self) -> int:
        merged = self.width * self.merge**2
        gates = 3 if self.kind == "pixtral" else 2
        block = 4 * self.width**2 + gates * self.width * self.ffn
        stem = 3 * self.patch**2 * self.width + self.side**2 * self.width
        if self.kind == "pixtral":
            head = merged * self.width + self.width * self.out_width + self.out_width**2
        else:
            head = (1 + len(self.deepstack)) * (merged**2 + merged * self.out_width)
        return stem + self.layers * block + head

    @property
    def costs(self) -> ImageEncoder:
        block = 6 * self.width + 2 * self.ffn + 3 * self.patch**2
        kept = self.kept_rows * (1 + len(self.deepstack))
        return ImageEncoder(self.parameters, block, MOST_PATCHES, kept)


ACTIVATIONS: dict[object, Literal["gelu_tanh", "gelu", "silu"]] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
}


def read_vision(hf: HfConfig, width: int, vocabulary: int) -> VisionConfig | None:
    fields = hf.whole.get("vision_config")
    reader = _READERS.get(str(hf.whole.get("model_type")))
    if reader is None or not isinstance(fields, Mapping):
        return None
    try:
        config = reader(hf, fields, width)
        _check(config, vocabulary)
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("%s: images are not read: vision_config: %s", hf.where, error)
        return None
    return config


def _qwen(hf: HfConfig, fields: Mapping[str, object], width: int) -> VisionConfig:
    mean, std = _normalisation(hf, HALF, HALF)
    return VisionConfig(
        kind="qwen",
        width=_count(fields, "hidden_size", 1152),
        ffn=_count(fields, "intermediate_size", 4304),
        heads=_count(fields, "num_heads", 16),
        layers=_count(fields, "depth", 27),
        patch=_count(fields, "patch_size", 16),
        merge=_count(fields, "spatial_merge_size", 2),
        out_width=_same(_count(fields, "out_hidden_size", 3584), width, "out_hidden_size"),
        image_token=_count(hf.whole, "image_token_id", 248056),
        theta=_theta(fields),
        activation=_activation(fields.get("hidden_act", "gelu_pytorch_tanh")),
        side=math.isqrt(_count(fields, "num_position_embeddings", 2304)),
        frames=_count(fields, "temporal_patch_size", 2),
        spatial=True,
        mean=mean,
        std=std,
    )


def _qwen_vl(hf: HfConfig, fields: Mapping[str, object], width: int) -> VisionConfig:
    given = fields.get("deepstack_visual_indexes", [8, 16, 24])
    if not isinstance(given, list) or sorted(set(given)) != given:
        raise ValueError(f"deepstack_visual_indexes must ascend, got {given!r}")
    config = _qwen(hf, fields, width)
    if given and not 0 <= given[0] <= given[-1] < config.layers:
        raise ValueError(f"deepstack_visual_indexes={given} exceed {config.layers} blocks")
    token = _count(hf.whole, "image_token_id", 151655)
    return replace(config, deepstack=tuple(given), image_token=token)


def _pixtral(hf: HfConfig, fields: Mapping[str, object], width: int) -> VisionConfig:
    if fields.get("model_type", "pixtral") != "pixtral":
        raise ValueError(f"model_type must be 'pixtral', got {fields.get('model_type')!r}")
    if hf.whole.get("vision_feature_layer", -1) not in (-1, [-1]):
        raise ValueError("vision_feature_layer must be -1")
    if hf.whole.get("projector_hidden_act", "gelu") != "gelu":
        raise ValueError("projector_hidden_act must be 'gelu'")
    token = hf.whole.get("image_token_id")
    mean, std = _normalisation(hf, CLIP_MEAN, CLIP_STD)
    text = hf.whole.get("text_config")
    epsilon = text.get("rms_norm_eps", 1e-5) if isinstance(text, Mapping) else 1e-5
    return VisionConfig(
        kind="pixtral",
        width=_count(fields, "hidden_size", 1024),
        ffn=_count(fields, "intermediate_size", 4096),
        heads=_count(fields, "num_attention_heads", 16),
        layers=_count(fields, "num_hidden_layers", 24),
        patch=_count(fields, "patch_size", 14),
        merge=_count(hf.whole, "spatial_merge_size", 2),
        out_width=width,
        image_token=_count(hf.whole, "image_token_index", 10) if token is None else int(str(token)),
        theta=_theta(fields),
        activation=_activation(fields.get("hidden_act", "gelu")),
        mean=mean,
        std=std,
        biased=hf.whole.get("multimodal_projector_bias") is True,
        out_epsilon=float(epsilon),
    )


_READERS = {
    "qwen3_vl": _qwen_vl,
    "qwen3_vl_moe": _qwen_vl,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "mistral3": _pixtral,
}


def spatial_sections(hf: HfConfig) -> tuple[int, int, int]:
    for field in ("rope_scaling", "rope_parameters"):
        given = hf.fields.get(field)
        found = given.get("mrope_section") if isinstance(given, Mapping) else None
        if isinstance(found, list) and len(found) == 3:
            time, row, column = map(int, found)
            return time, row, column
    return (24, 20, 20) if str(hf.whole.get("model_type")).startswith("qwen3_vl") else (11, 11, 10)


def _check(config: VisionConfig, vocabulary: int) -> None:
    if config.width % config.heads or config.head_dim % 4:
        raise ValueError(f"heads of {config.width} / {config.heads} values are not supported")
    if not 0 <= config.image_token < vocabulary:
        raise ValueError(
            f"the image token {config.image_token} is beyond the vocabulary of {vocabulary}"
        )


def _same(found: int, wanted: int, name: str) -> int:
    if found != wanted:
        raise ValueError(f"{name} must equal the text model's {wanted}, got {found}")
    return found


def _count(fields: Mapping[str, object], name: str, default: int) -> int:
    value = fields.get(name, default)
    if isinstance(value, list | tuple) and value and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _activation(name: object) -> Literal["gelu_tanh", "gelu", "silu"]:
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act={name!r} is not supported")
    return ACTIVATIONS[name]


def _theta(fields: Mapping[str, object]) -> float:
    given = fields.get("rope_parameters")
    theta = given.get("rope_theta") if isinstance(given, Mapping) else None
    return float(theta or fields.get("rope_theta") or 10000.0)  # type: ignore[arg-type]


def reads_images(model_type: object) -> bool:
    return str(model_type) in _READERS


def processor_settings(read: Callable[[str], Mapping[str, object]]) -> Mapping[str, object]:
    """Settings in processor_config.json take precedence, as in transformers. `read` returns the
    fields of a JSON file of the folder."""
    nested = read("processor_config.json").get("image_processor")
    if isinstance(nested, Mapping) and nested:
        return nested
    return read("preprocessor_config.json")


def _normalisation(
    hf: HfConfig, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    found = processor_settings(hf.beside)
    given = [found.get("image_mean"), found.get("image_std")]
    for name, value in zip(("image_mean", "image_std"), given, strict=True):
        if value is not None and (not isinstance(value, list) or len(value) != 3):
            raise ValueError(f"the image processor's {name} must be three numbers")
    of_mean, of_std = given
    return (
        tuple(map(float, of_mean)) if isinstance(of_mean, list) else mean,
        tuple(map(float, of_std)) if isinstance(of_std, list) else std,
    )
