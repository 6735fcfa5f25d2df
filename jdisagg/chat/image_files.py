"""Reads image files of clients with Pillow, which is an optional dependency (`jdisagg[images]`).

The files may be hostile. The header is read first, and limits on the image size apply before pixels
are decoded. This module defines the pixels of a file:

- The EXIF orientation is applied. Colour profiles are not.
- Transparent pixels are blended with white.
- Samples of 16 bits are reduced to their upper 8.
- Animations are refused. If a JPEG file has several pictures, the first is read.

Calls take up to seconds for large files, so they run in worker threads."""

import contextlib
import importlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jdisagg.chat.images import FORMATS, ChatImage
from jdisagg.config import LimitsConfig
from jdisagg.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

# Limit on the scans of a progressive JPEG. The file is decoded once per scan, and a scan may have
# only a few bytes. Encoders write about 10.
MAX_SCANS = 100
_SCAN = b"\xff\xda"
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
# The value of `PIL.Image.Transpose` that makes an image upright, by orientation.
_TRANSPOSES = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


class ImageFile:
    """An image file whose header was read.

    Attributes:
        height, width: Pixels, after the EXIF orientation is applied.

    Raises:
        InvalidRequestError: The file is too large, not of a supported format, damaged or animated,
            or the server has no Pillow.
    """

    def __init__(self, where: str, image: ChatImage, limits: LimitsConfig) -> None:
        self.where = where
        library = _pillow(where)
        check_bytes(where, image, limits)
        data = self.data = image.content(where)
        with _reading(where):
            self._opened: Image = library.open(io.BytesIO(data), formats=FORMATS)
        width, height = self._opened.size
        if width * height > limits.max_image_pixels:
            raise InvalidRequestError(
                f"{where} has {width} x {height} pixels; at most {limits.max_image_pixels} are"
                " taken (limits.max_image_pixels); send a smaller image"
            )
        if self._opened.format != "MPO" and getattr(self._opened, "is_animated", False):
            raise InvalidRequestError(f"{where} is animated; send one frame as an image")
        if self._opened.format in ("JPEG", "MPO") and data.count(_SCAN) > MAX_SCANS:
            raise InvalidRequestError(
                f"{where} has {data.count(_SCAN)} scans; at most {MAX_SCANS} are taken; save it as"
                " a baseline JPEG"
            )
        with _reading(where):
            # `PngImageFile.getexif` decodes the file.
            exif = library.Image.getexif(self._opened)
            self._orientation = exif.get(_ORIENTATION)
        turned = self._orientation in _TURNED
        self.height, self.width = (width, height) if turned else (height, width)

    def pixels(self) -> np.ndarray:
        """Decodes the image to RGB pixels, uint8 [height, width, 3]. May be called only once.
        Raises InvalidRequestError if the file is damaged."""
        with _reading(self.where), contextlib.closing(self._opened):
            self._opened.load()
            decoded = _rgb(self._upright())
        assert decoded.shape == (self.height, self.width, 3)
        return decoded

    def _upright(self) -> "Image":
        number = _TRANSPOSES.get(self._orientation)
        if number is None:
            return self._opened
        methods = importlib.import_module("PIL.Image").Transpose
        return self._opened.transpose(methods(number))


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Context manager that converts any error of Pillow to an InvalidRequestError, because damaged
    files raise errors of many types."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        reason = "" if name == "UnidentifiedImageError" else f" ({name}: {error!s:.120})"
        raise InvalidRequestError(
            f"{where} is not a readable image{reason}; send a complete PNG, JPEG, WebP or GIF file"
        ) from None


def check_bytes(where: str, image: ChatImage, limits: LimitsConfig) -> None:
    if image.most_bytes > limits.max_image_bytes + 3:
        raise InvalidRequestError(
            f"{where} has {image.most_bytes} bytes; at most {limits.max_image_bytes} are taken"
            " (limits.max_image_bytes); send a smaller file"
        )


def _rgb(image: "Image") -> np.ndarray:
    if image.mode.startswith("I"):
        grey = (np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        library = importlib.import_module("PIL.Image")
        white = library.new("RGBA", image.size, (255, 255, 255, 255))
        image = library.alpha_composite(white, image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def _pillow(where: str) -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise InvalidRequestError(
            f"{where} is an image, and the server cannot read images, because Pillow is not"
            " installed there; install jdisagg[images], or send text only"
        ) from None
