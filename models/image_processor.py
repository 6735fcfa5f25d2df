"""Implements the image processors of checkpoints. An image processor resizes an image for the
vision encoder, and lays out the image's tokens in the prompt.

There are two kinds. Qwen's processor resizes to multiples of a token's side, with a bounded area.
Pixtral's (Mistral 3) bounds the longest edge, and ends each row of tokens with a special token."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jdisagg.chat.images import ImageLayout
from jdisagg.errors import CheckpointError, InvalidRequestError
from models import vision_config
from models.generation_config import read_object
from models.image_resize import BICUBIC, BILINEAR, resized

_log = logging.getLogger(__name__)

MAX_ASPECT = 200
_QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")


class Size(NamedTuple):
    height: int
    width: int


class TokenIds(NamedTuple):
    """Token ids of an image: the token that stands for one row of the encoder's output, the token
    at the end of each row of the image, and the token at the end of the last row. `row_end` and
    `last_end` are None for models without such tokens."""

    image: int
    row_end: int | None = None
    last_end: int | None = None


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes images and lays them out in the prompt.

    Attributes:
        placeholder: Text of the token that the chat template writes for an image.
        marks: Texts of all tokens that mark images. In messages of clients, these texts are treated
            as ordinary text.
        patch, merge: Side of a patch in pixels, and number of patches along each side of a token's
            square.
    """

    placeholder: str
    marks: tuple[str, ...]
    tokens: TokenIds
    patch: int
    merge: int
    size: Callable[[int, int], Size]
    filter: int

    @property
    def token(self) -> int:
        return self.tokens.image

    def layout(self, where: str, height: int, width: int) -> ImageLayout:
        """Raises InvalidRequestError, which begins with `where`, for unsupported sizes."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise InvalidRequestError(
                f"{where} has {width} x {height} pixels; one side may be at most {MAX_ASPECT} times"
                " the other; crop it"
            )
        made = self.size(height, width)
        rows, columns = (side // (self.patch * self.merge) for side in made)
        row = [self.tokens.image] * columns
        if self.tokens.row_end is not None:
            row.append(self.tokens.row_end)
        ids = row * rows
        if self.tokens.last_end is not None:
            ids[-1] = self.tokens.last_end
        grid = (1, made.height // self.patch, made.width // self.patch)
        return ImageLayout(made.height, made.width, grid, tuple(ids))

    def resized(self, pixels_HWC: np.ndarray, layout: ImageLayout) -> np.ndarray:
        """Returns the image in the size of its layout, uint8 [height, width, 3]."""
        return resized(pixels_HWC, layout.height, layout.width, self.filter)


def read_image_processor(
    directory: Path, token_text: Callable[[int], str | None], token_id: Callable[[str], int | None]
) -> ImageProcessor | None:
    """Returns the image processor of a checkpoint, or None if the model reads no images. For an
    unsupported processor logs a warning and returns None."""
    try:
        return _read(directory, _Texts(directory, token_text, token_id))
    except CheckpointError as error:
        _log.warning("images are not served: %s", error.message)
        return None


def _read(directory: Path, texts: "_Texts") -> ImageProcessor | None:
    config = read_object(directory / "config.json")
    family, vision = config.get("model_type"), config.get("vision_config")
    if not vision_config.reads_images(family) or not isinstance(vision, dict):
        return None
    whole = read_object(directory / "processor_config.json")
    fields = vision_config.processor_settings(lambda name: read_object(directory / name))
    if not fields:
        raise CheckpointError(
            f"{directory} has no preprocessor_config.json; take it from the published model"
        )
    settings = _Settings(directory, fields)
    settings.check()
    made = _pixtral if family == "mistral3" else _qwen
    return made(settings, config, whole, texts)


@dataclass(frozen=True)
class _Settings:
    directory: Path
    fields: Mapping[str, Any]

    def check(self) -> None:
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if self.fields.get(name, True) is False:
                self._refuse(name, "true")
        if self.fields.get("do_center_crop"):
            self._refuse("do_center_crop", "false")
        if self.filter not in (BILINEAR, BICUBIC):
            self._refuse("resample", "2 or 3")

    @property
    def filter(self) -> int:
        return self.fields.get("resample", BICUBIC)

    def count(self, name: str, usual: int) -> int:
        value = self.fields.get(name, usual)
        if isinstance(value, dict):  # {"height": 16, "width": 16}
            value = value.get("height") if value.get("height") == value.get("width") else None
        return self._positive(name, value)

    def area(self, name: str, older: str, usual: int) -> int:
        size = self.fields.get("size")
        value = self.fields.get(older)
        if value is None:
            value = size.get(name, usual) if isinstance(size, dict) else usual
        return self._positive(f"size.{name}", value)

    def _positive(self, name: str, value: object) -> int:
        if not isinstance(value, int) or value < 1:
            self._refuse(name, "a positive integer")
        return value

    def _refuse(self, name: str, rule: str) -> NoReturn:
        raise CheckpointError(
            f"{self.directory}: {name} of the image processor must be {rule}, got"
            f" {self.fields.get(name.partition('.')[0])!r}; correct preprocessor_config.json"
        )


@dataclass(frozen=True)
class _Texts:
    directory: Path
    text: Callable[[int], str | None]
    id: Callable[[str], int | None]

    def placeholder(self, token_id: object) -> tuple[str, int]:
        text = self.text(token_id) if isinstance(token_id, int) else None
        if not isinstance(token_id, int) or text is None:
            raise CheckpointError(
                f"{self.directory}: the image token of config.json is {token_id!r}, which is no"
                " token of the tokenizer; correct image_token_id"
            )
        return text, token_id

    def of(self, text: str) -> int:
        if (token_id := self.id(text)) is None:
            raise CheckpointError(
                f"{self.directory}: {text!r} is no token of the tokenizer; correct the image tokens"
                " in processor_config.json"
            )
        return token_id


def _qwen(
    settings: _Settings, config: Mapping[str, Any], whole: Mapping[str, Any], texts: _Texts
) -> ImageProcessor:
    placeholder, token = texts.placeholder(config.get("image_token_id"))
    patch, merge = settings.count("patch_size", 14), settings.count("merge_size", 2)
    least = settings.area("shortest_edge", "min_pixels", 56 * 56)
    most = settings.area("longest_edge", "max_pixels", 28 * 28 * 1280)
    # Images that exceed the largest size of the encoder's programs are reduced instead of refused.
    most = min(most, vision_config.MOST_PATCHES * patch**2)
    return ImageProcessor(
        placeholder,
        (placeholder, *_QWEN_MARKS),
        TokenIds(token),
        patch,
        merge,
        lambda height, width: qwen_size(height, width, patch * merge, least, most),
        settings.filter,
    )


def qwen_size(height: int, width: int, side: int, least: int, most: int) -> Size:
    """Returns the size of an image for Qwen's encoders: multiples of `side`, with an area in
    [least, most] pixels and nearly the image's aspect ratio."""
    made = Size(round(height / side) * side, round(width / side) * side)
    if made.height * made.width > most:
        shrink = math.sqrt(height * width / most)
        return Size(
            *(max(side, math.floor(edge / shrink / side) * side) for edge in (height, width))
        )
    if made.height * made.width < least:
        grow = math.sqrt(least / (height * width))
        return Size(*(math.ceil(edge * grow / side) * side for edge in (height, width)))
    return made


def _pixtral(
    settings: _Settings, config: Mapping[str, Any], whole: Mapping[str, Any], texts: _Texts
) -> ImageProcessor:
    placeholder, token = texts.placeholder(
        config.get("image_token_index", config.get("image_token_id"))
    )
    row_end = str(whole.get("image_break_token", "[IMG_BREAK]"))
    last_end = str(whole.get("image_end_token", "[IMG_END]"))
    shape = _Settings(settings.directory, {**config["vision_config"], **whole})
    patch = shape.count("patch_size", 16)
    merge = _Settings(settings.directory, {**config, **whole}).count("spatial_merge_size", 1)
    # As for Qwen's models, images that exceed the largest size of the encoder's programs are
    # reduced.
    most = math.isqrt(vision_config.MOST_PATCHES) * patch
    longest = min(settings.area("longest_edge", "longest_edge", 1024), most)
    return ImageProcessor(
        placeholder,
        (placeholder, row_end, last_end),
        TokenIds(token, texts.of(row_end), texts.of(last_end)),
        patch,
        merge,
        lambda height, width: pixtral_size(height, width, patch * merge, longest),
        settings.filter,
    )


def pixtral_size(height: int, width: int, side: int, longest: int) -> Size:
    """Returns the size of an image for Pixtral's encoder: both edges at most `longest`, rounded up
    to multiples of `side`."""
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return Size(*((max(edge - 1, 0) // side + 1) * side for edge in (height, width)))
