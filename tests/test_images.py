"""Positions, rows and checks of images in a prompt, against a token by token oracle."""

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jdisagg.errors import InvalidRequestError
from jdisagg.prompt.images import (
    Grid,
    ImageFormat,
    PromptImage,
    image_digest,
    rows_of_image,
    shift_before,
    spatial_positions,
    within,
)
from jdisagg.request import Request

TOKEN = 7
SPATIAL = ImageFormat(TOKEN, 1, 2, True, 64)
FLAT = replace(SPATIAL, spatial=False)


def image_tokens(grid: Grid, breaks: bool) -> list[int]:
    row = [TOKEN] * (grid[2] // 2) + [8] * breaks
    return row * (grid[1] // 2)


def a_prompt(
    parts: Sequence[tuple[int, tuple[int, int]]], last: int, breaks: bool = False
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Text of given lengths before images of given sizes in tokens, and text at the end."""
    tokens: list[int] = []
    images = []
    for text, (rows, columns) in parts:
        tokens += [9] * text
        grid = (1, 2 * rows, 2 * columns)
        own = image_tokens(grid, breaks)
        pixels = bytes([len(images)]) * (3 * grid[1] * grid[2])
        images.append(PromptImage.of(len(tokens), len(own), grid, pixels))
        tokens += own
    return tokens + [9] * last, tuple(images)


def positions_by_token(tokens: int, images: Sequence[PromptImage]) -> np.ndarray:
    """Walks over the prompt: text counts on, an image counts rows and columns from where it begins,
    and text after it continues behind the largest of them."""
    found, position, at = [], 0, 0
    while at < tokens:
        image = next((one for one in images if one.start == at), None)
        if image is None:
            found.append((position,) * 3)
            position, at = position + 1, at + 1
            continue
        rows, columns = image.grid[1] // 2, image.grid[2] // 2
        for row in range(rows):
            for column in range(columns):
                found.append((position, position + row, position + column))
        position, at = position + max(rows, columns), image.end
    return np.array(found, np.int32)


PARTS = st.lists(
    st.tuples(st.integers(0, 4), st.tuples(st.integers(1, 3), st.integers(1, 4))), max_size=3
)


@given(PARTS, st.integers(1, 5), st.data())
def test_spatial_positions_do_not_depend_on_where_a_prompt_is_cut(
    parts: list[tuple[int, tuple[int, int]]], last: int, data: st.DataObject
) -> None:
    tokens, images = a_prompt(parts, last)
    whole = positions_by_token(len(tokens), images)
    start = data.draw(st.integers(0, len(tokens) - 1))
    stop = data.draw(st.integers(start + 1, len(tokens)))
    part = spatial_positions(
        start,
        stop - start,
        shift_before(start, images, SPATIAL),
        within(images, start, stop),
        SPATIAL,
    )
    np.testing.assert_array_equal(part, whole[start:stop])
    after = len(tokens) + shift_before(len(tokens), images, SPATIAL)
    assert after == whole[-1].max() + 1  # the first answer token's position


def test_positions_of_a_model_without_spatial_ones_are_indices() -> None:
    tokens, images = a_prompt([(3, (2, 2)), (1, (1, 3))], 4, breaks=True)
    assert shift_before(len(tokens), images, FLAT) == 0


@pytest.mark.parametrize("breaks", [False, True])
def test_each_image_token_stands_for_the_next_row(breaks: bool) -> None:
    tokens, (image,) = a_prompt([(3, (2, 3))], 2, breaks)
    rows = rows_of_image(image, image.start, image.end, FLAT)
    ids = np.array(tokens[image.start : image.end])
    assert rows[ids == TOKEN].tolist() == list(range(6))
    assert (rows[ids != TOKEN] == -1).all()
    cut = rows_of_image(image, image.start + 2, image.end - 1, FLAT)
    assert cut.tolist() == rows[2:-1].tolist()


def test_an_image_is_identified_by_its_pixels_and_its_grid() -> None:
    digests = {
        image_digest(pixels, grid)
        for pixels in (b"abcabc", b"abcabd")
        for grid in ((1, 2, 4), (1, 4, 2))
    }
    assert len(digests) == 4
    assert image_digest(b"abcabc", (1, 2, 4)) in digests


def test_a_request_refuses_images_that_overlap_or_lie_outside_of_its_prompt() -> None:
    tokens, images = a_prompt([(1, (1, 2)), (0, (1, 2))], 1)
    assert Request("r", tuple(tokens), images=images).images == images
    for wrong in (images[::-1], (replace(images[0], start=5),), (replace(images[0], length=0),)):
        with pytest.raises(InvalidRequestError, match="image at token"):
            Request("r", tuple(tokens), images=wrong)
    with pytest.raises(InvalidRequestError, match="digest"):
        Request("r", tuple(tokens), images=(replace(images[0], digest=b"short"),))


def test_a_worker_refuses_images_that_are_not_of_the_models_form() -> None:
    tokens, (image,) = a_prompt([(1, (2, 2))], 1)
    SPATIAL.check(image, tokens)
    small = replace(SPATIAL, most_patches=8)
    for form, wrong, ids, text in (
        (small, image, tokens, "at most 8"),
        (SPATIAL, replace(image, grid=(1, 3, 4)), tokens, "divides"),
        (SPATIAL, replace(image, grid=(2, 4, 2)), tokens, "one frame"),
        (SPATIAL, replace(image, pixels=b"xyz"), tokens, "bytes of pixels"),
        (SPATIAL, replace(image, length=3), tokens, "image tokens"),
        (SPATIAL, image, [9] * len(tokens), "image tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            form.check(wrong, ids)
    broken, (image,) = a_prompt([(1, (2, 2))], 1, breaks=True)
    FLAT.check(image, broken)
    with pytest.raises(InvalidRequestError, match="image tokens"):
        SPATIAL.check(image, broken)  # its tokens have no row breaks
