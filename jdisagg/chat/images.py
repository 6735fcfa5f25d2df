"""Images of chat messages, in the form in which clients send them.

An image is the content of an image file: its bytes, or the base64 text of a data: URL. The base64
text is decoded in a worker thread, when the image is read (`image_files`). Other URLs are refused.
If the server fetched them, clients could access addresses that only the server can reach."""

import base64
import binascii
import io
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jdisagg.errors import InvalidRequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MEDIA_TYPES = (
    *("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"),
    *("image/*", "application/octet-stream", ""),
)
_HEADER = re.compile(r"data:([\w.+*/-]*)((?:;[\w.+=-]*)*?);base64", re.ASCII | re.IGNORECASE)
_HEADER_CHARACTERS = 256
_SHOWN = 80
_PIECE = 1 << 20  # a multiple of 4
# Modes that PNG stores as they are. Pillow converts the others.
_MODES_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


class _Picture(Protocol):
    @property
    def mode(self) -> str: ...
    def convert(self, mode: str) -> "_Picture": ...
    def save(self, fp: io.BytesIO, format: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ChatImage:
    """One image of a message.

    Attributes:
        data: Content of a PNG, JPEG, WebP or GIF file, or its base64 text.
        mime: Media type that the client stated, or "". The format is detected from the content.
    """

    data: bytes | str = field(repr=False)
    mime: str = ""

    @classmethod
    def of(cls, image: "bytes | str | os.PathLike[str] | _Picture") -> "ChatImage":
        """Creates a `ChatImage` from the content of an image file, from the path of a file on this
        host, or from a `PIL.Image.Image`. Raises InvalidRequestError if the file cannot be read."""
        if isinstance(image, bytes):
            return cls(image)
        if isinstance(image, str | os.PathLike):
            try:
                return cls(Path(image).read_bytes())
            except (OSError, ValueError) as error:
                raise InvalidRequestError(
                    f"image {str(image)[:_SHOWN]!r} cannot be read ({error}); give the path of a"
                    " file, its bytes or a PIL image"
                ) from error
        written = io.BytesIO()
        (image if image.mode in _MODES_OF_PNG else image.convert("RGB")).save(written, "PNG")
        return cls(written.getvalue(), "image/png")

    @property
    def most_bytes(self) -> int:
        """Upper bound on the size of the file in bytes. It is exact for bytes, and at most 3 too
        large for base64 text."""
        return len(self.data) if isinstance(self.data, bytes) else len(self.data) // 4 * 3 + 3

    @property
    def url(self) -> str:
        text = self.data
        if isinstance(text, bytes):
            text = base64.b64encode(text).decode("ascii")
        return f"data:{self.mime};base64,{text}"

    def content(self, where: str) -> bytes:
        """Raises InvalidRequestError for invalid base64."""
        if isinstance(self.data, bytes):
            return self.data
        try:
            return _decoded(self.data)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequestError(
                f"{where} is not valid base64 ({error}); encode the file's bytes as base64"
            ) from None


def _decoded(text: str) -> bytes:
    """The text is decoded in pieces, because each call of the decoder holds the interpreter
    lock."""
    if any(space in text for space in " \t\r\n"):
        text = "".join(text.split())
    text = text.rstrip("=")
    text += "=" * (-len(text) % 4)
    pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])


def image_of_url(where: str, url: str) -> ChatImage:
    """Raises InvalidRequestError for other URLs and for unsupported media types."""
    beginning, comma, text = url[:_HEADER_CHARACTERS].partition(",")
    if not beginning[:5].lower() == "data:":
        raise InvalidRequestError(
            f"{where} must be a data: URL, got {url[:_SHOWN]!r}; the server fetches no URLs: send"
            " the file itself, as data:image/png;base64,..."
        )
    header = _HEADER.fullmatch(beginning)
    if not comma or header is None:
        raise InvalidRequestError(
            f"{where} must begin with data:, a media type and ;base64, such as"
            f" data:image/png;base64,... got {url[:_SHOWN]!r}"
        )
    return stated_image(where, url[len(beginning) + 1 :], header[1])


def stated_image(where: str, data: bytes | str, mime: str) -> ChatImage:
    """Raises InvalidRequestError for an unsupported media type."""
    if mime.lower() not in _MEDIA_TYPES:
        raise InvalidRequestError(
            f"{where}: media type {mime[:_SHOWN]!r} is not supported; send a PNG, JPEG, WebP or GIF"
            " file"
        )
    return ChatImage(data, mime)


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The size of an image for the model, and its tokens in the prompt.

    Attributes:
        height, width: Size in pixels after the image is resized.
        grid: Number of patches in time, height and width, before patches are merged to tokens.
    """

    height: int
    width: int
    grid: tuple[int, int, int]
    token_ids: tuple[int, ...] = field(repr=False)
