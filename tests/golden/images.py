"""The golden fixtures of models that read images, as requests have their images."""

from pathlib import Path
from typing import Any

from jdisagg.prompt.images import PromptImage
from tests.golden.arrays import arrays_of

GOLDEN = Path(__file__).parent
FIXTURES = sorted(path.parent.name for path in GOLDEN.glob("*/images.npz"))


def golden_images(name: str) -> tuple[Any, tuple[PromptImage, ...]]:
    """Returns the arrays of a fixture, and the two images of its prompt."""
    found = arrays_of(GOLDEN / name / "images.npz")
    images = [
        PromptImage.of(
            int(start), int(length), tuple(grid.tolist()), found[f"pixels{at}"].tobytes()
        )
        for at, (start, length, grid) in enumerate(
            zip(found["starts"], found["lengths"], found["grids"], strict=True)
        )
    ]
    return found, tuple(images)


def other_image(image: PromptImage) -> PromptImage:
    """Returns an image of the same size with other pixels."""
    pixels = bytes(255 - value for value in image.pixels)
    return PromptImage.of(image.start, image.length, image.grid, pixels)
