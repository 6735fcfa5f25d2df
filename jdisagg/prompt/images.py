"""Images in a prompt: their pixels and place in a request, and the positions of their tokens.

An image takes consecutive tokens of the prompt. Among these, each token with the id of the model's
image token is a placeholder for one row of the vision encoder's output, in order.

With rotary positions in three dimensions (mrope), an image token has a time, a row and a column.
The position of the text after an image continues after the largest of these. The positions of later
tokens therefore differ from their indices in the prompt."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Self

import numpy as np

from jdisagg.errors import InvalidRequestError
from jdisagg.plain import plain

DIGEST_BYTES = 32
# Version of the image processor. It changes whenever the processor's pixels for an image change.
PROCESSOR = "1"

Grid = tuple[int, int, int]


def image_digest(pixels: bytes, grid: Grid) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"jdisagg image")
    digest.update(f"{PROCESSOR} {grid[0]} {grid[1]} {grid[2]}\n".encode())
    digest.update(pixels)
    return digest.digest()


@plain
class PromptImage:
    """One image of a prompt.

    Attributes:
        length: Number of tokens of the image, row breaks included.
        grid: Size in patches before they are merged: time, height and width.
        pixels: Bytes of a uint8 array [height, width, 3], row by row.
        digest: Hash of pixels, grid and version of the processor (`image_digest`).
        file: The image file as the client sent it, from which a router can recompute the pixels.
            Workers never receive it.
    """

    start: int
    length: int
    grid: Grid
    pixels: bytes
    digest: bytes
    file: bytes = b""

    @classmethod
    def of(cls, start: int, length: int, grid: Grid, pixels: bytes, file: bytes = b"") -> Self:
        return cls(start, length, grid, pixels, image_digest(pixels, grid), file)

    def without_pixels(self, keep_file: bool = False) -> Self:
        """Returns a copy without the pixels. `keep_file` is whether the copy has the image file."""
        return replace(self, pixels=b"", file=self.file if keep_file else b"")

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@plain
class ImageFormat:
    """How a model represents images in a prompt.

    Attributes:
        patch: Height and width of a patch in pixels.
        merge: Number of patches along each side of the square that forms one token.
        spatial: Whether image tokens have rotary positions in three dimensions (mrope).
    """

    token: int
    patch: int
    merge: int
    spatial: bool
    most_patches: int

    def tokens(self, image: PromptImage) -> int:
        return image.patches // self.merge**2

    def stride(self, image: PromptImage) -> int:
        return image.length // (image.grid[1] // self.merge)

    def shift(self, image: PromptImage) -> int:
        if not self.spatial:
            return 0
        return max(image.grid[0], *(size // self.merge for size in image.grid[1:])) - image.length

    def check(self, image: PromptImage, tokens: Sequence[int], pixels: bool = True) -> None:
        """Checks that an image of a prompt fits the model.

        Raises:
            InvalidRequestError: The grid, the pixels or the image's tokens do not fit.
        """
        time, height, width = image.grid
        if time != 1 or height % self.merge or width % self.merge:
            raise InvalidRequestError(
                f"image at token {image.start}: grid {image.grid} must have one frame, and a height"
                f" and width that {self.merge} divides; resize the image"
            )
        if image.patches > self.most_patches:
            raise InvalidRequestError(
                f"image at token {image.start} has {image.patches} patches; at most"
                f" {self.most_patches} are read; send a smaller image"
            )
        if pixels and len(image.pixels) != 3 * self.patch**2 * image.patches:
            raise InvalidRequestError(
                f"image at token {image.start} has {len(image.pixels)} bytes of pixels, but a grid"
                f" of {image.grid} needs {3 * self.patch**2 * image.patches}; resize the image"
            )
        rows, columns = height // self.merge, width // self.merge
        found = list(tokens[image.start : image.end])
        stride = self.stride(image)
        fits = stride in ((columns,) if self.spatial else (columns, columns + 1))
        fits = fits and image.length == rows * stride
        if not fits or any(
            found[row * stride : row * stride + columns] != [self.token] * columns
            for row in range(rows)
        ):
            raise InvalidRequestError(
                f"image at token {image.start}: its {image.length} tokens must be {rows} rows of"
                f" {columns} image tokens ({self.token}), as its grid {image.grid} states"
            )


def scoped(images: Sequence[PromptImage], *scope: str) -> tuple[PromptImage, ...]:
    """Returns the images with digests that also depend on `scope`, so that cached results of an
    image are not shared between tenants."""
    found = []
    for image in images:
        digest = blake2b(image.digest, digest_size=DIGEST_BYTES, person=b"jdisagg scope")
        for part in scope:
            text = part.encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "little") + text)
        found.append(replace(image, digest=digest.digest()))
    return tuple(found)


def check_images(images: Sequence[PromptImage], tokens: int) -> None:
    """Raises InvalidRequestError if images overlap, are not in order, or exceed the prompt."""
    end = 0
    for image in images:
        if min(image.grid) < 1 or len(image.digest) != DIGEST_BYTES:
            raise InvalidRequestError(
                f"image at token {image.start} needs a grid of positive sizes, got {image.grid},"
                f" and a digest of {DIGEST_BYTES} bytes, got {len(image.digest)}"
            )
        if image.length < 1 or not end <= image.start <= tokens - image.length:
            raise InvalidRequestError(
                f"image at tokens {image.start} to {image.end} must come after the image before it,"
                f" which ends at {end}, and within the prompt's {tokens} tokens"
            )
        end = image.end


def shift_before(index: int, images: Sequence[PromptImage], form: ImageFormat | None) -> int:
    """Returns the position minus the index of a token that is outside of all images. `index` is the
    token's index in the prompt. `form` is None if the model reads no images."""
    if form is None:
        return 0
    return sum([form.shift(image) for image in images if image.end <= index])


def within(images: Sequence[PromptImage], start: int, stop: int) -> tuple[PromptImage, ...]:
    return tuple([image for image in images if image.start < stop and image.end > start])


def spatial_positions(
    start: int, count: int, shift: int, images: Sequence[PromptImage], form: ImageFormat
) -> np.ndarray:
    """Computes the rotary positions of consecutive tokens.

    Args:
        shift: Position minus index of the tokens before the first of `images`.
        images: Images with tokens among the `count` tokens, in order.

    Returns:
        int32 [count, 3]: time, row and column of each token. The three are equal for a text token.
    """
    index_T = np.arange(start, start + count, dtype=np.int32)
    positions_T3 = np.repeat(index_T[:, None], 3, axis=1) + np.int32(shift)
    for image in images:
        first, last = max(image.start, start), min(image.end, start + count)
        width = image.grid[2] // form.merge
        at = np.arange(first - image.start, last - image.start, dtype=np.int32)
        place = np.stack((np.zeros_like(at), at // width, at % width), axis=1)
        begin = image.start + shift
        positions_T3[first - start : last - start] = begin + place
        shift += form.shift(image)
        positions_T3[last - start :] += form.shift(image)
    return positions_T3


def rows_of_image(image: PromptImage, first: int, last: int, form: ImageFormat) -> np.ndarray:
    """Returns the row of the encoder's output that each token of an image is replaced with.

    Args:
        first, last: Indices in the prompt of a range [first, last) of tokens, all within `image`.

    Returns:
        int32 [last - first]: index of the row, or -1 for a row break.
    """
    columns = image.grid[2] // form.merge
    at = np.arange(first - image.start, last - image.start, dtype=np.int32)
    row, column = np.divmod(at, form.stride(image))
    return np.where(column < columns, row * columns + column, -1).astype(np.int32)


def block_content(images: Sequence[PromptImage], start: int, stop: int) -> bytes:
    """Returns the bytes that identify the images among the tokens [start, stop). The hash of a KV
    block must include them in addition to the token ids.

    The bytes contain for each image its offset from `start`, the index within the image of its
    first token in the range, and its digest."""
    parts = []
    for image in within(images, start, stop):
        first = max(image.start, start)
        parts += [
            (first - start).to_bytes(4, "little"),
            (first - image.start).to_bytes(4, "little"),
            image.digest,
        ]
    return b"".join(parts)
