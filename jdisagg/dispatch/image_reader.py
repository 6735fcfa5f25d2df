"""Reads the images of prompts in separate threads, so that they delay no stream.

A request contains the files of its images instead of their pixels, which may be far larger. The
pixels of a new request are kept in memory of bounded size until the prompt is sent to a worker."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from jdisagg.chat.image_files import ImageFile
from jdisagg.chat.images import ChatImage, ImageLayout
from jdisagg.config import LimitsConfig
from jdisagg.dispatch.client_limits import to_its_end
from jdisagg.errors import OverloadedError
from jdisagg.prompt.images import PromptImage

IMAGE_THREADS = 4  # bounds the memory of decoded images
MAX_IMAGES_AT_WORK = 64  # requests whose images are read or wait for a thread
IMAGE_RETRY_SECONDS = 1.0
# Limit for all images of a request after their resize, because a request is one message to a
# worker.
MAX_PIXEL_BYTES = 96 << 20
WAITING_PIXEL_BYTES = 2 * MAX_PIXEL_BYTES

Result = TypeVar("Result")


class ChatImageProcessor(Protocol):
    """The model's image processor (`models/image_processor.py`).

    Attributes:
    token: Id of the token that the chat template writes for an image.
    marks: Texts of the tokens that mark images.
    """

    @property
    def token(self) -> int: ...
    @property
    def marks(self) -> Sequence[str]: ...
    def layout(self, where: str, height: int, width: int) -> ImageLayout: ...
    def resized(self, pixels_HWC: np.ndarray, layout: ImageLayout) -> np.ndarray: ...


class PlacedImage(NamedTuple):
    """An image whose header was read. `start` is the index of its first token in the prompt."""

    start: int
    layout: ImageLayout
    file: ImageFile


class ImageReader:
    """Decodes and resizes images."""

    def __init__(
        self, processor: Callable[[], ChatImageProcessor | None], limits: LimitsConfig
    ) -> None:
        self._processor, self._limits = processor, limits
        self._threads = ThreadPoolExecutor(IMAGE_THREADS, "images")
        self._at_work = 0
        self._waiting: OrderedDict[bytes, bytes] = OrderedDict()  # pixels by digest, oldest first

    @property
    def waiting_bytes(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, work: Callable[..., Result], *args: object) -> Result:
        """Runs work on images in a thread and returns its result. Raises OverloadedError if too
        many calls wait for a thread."""
        if self._at_work >= MAX_IMAGES_AT_WORK:
            raise OverloadedError(
                f"{self._at_work} requests have images that are being read, and at most"
                f" {MAX_IMAGES_AT_WORK} are taken; try again later",
                retry_after_seconds=IMAGE_RETRY_SECONDS,
            )
        self._at_work += 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        return await to_its_end(working, self._done)

    async def read(self, placed: Sequence[PlacedImage]) -> tuple[PromptImage, ...]:
        """Decodes the images of a prompt, which checks their files. The returned images have their
        files but no pixels, because `pixels` provides these later. Raises InvalidRequestError for a
        damaged file."""
        return tuple([await self._read(one) for one in placed])

    async def pixels(self, image: PromptImage) -> bytes:
        waiting = self._waiting.pop(image.digest, None)
        return await self.run(self._again, image) if waiting is None else waiting

    async def _read(self, placed: PlacedImage) -> PromptImage:
        pixels = await self.run(self._resized, placed.file, placed.layout)
        length, grid, file = len(placed.layout.token_ids), placed.layout.grid, placed.file.data
        image = PromptImage.of(placed.start, length, grid, pixels, file)
        self._waiting[image.digest] = pixels
        while self.waiting_bytes > WAITING_PIXEL_BYTES:
            self._waiting.popitem(last=False)
        return image.without_pixels(keep_file=True)

    def _again(self, image: PromptImage) -> bytes:
        processor = self._processor()
        assert processor is not None, "images were read before"
        file = ImageFile("image", ChatImage(image.file), self._limits)
        return self._resized(file, processor.layout("image", file.height, file.width))

    def _resized(self, file: ImageFile, layout: ImageLayout) -> bytes:
        processor = self._processor()
        assert processor is not None, "checked before"
        return processor.resized(file.pixels(), layout).tobytes()

    def _done(self) -> None:
        self._at_work -= 1
