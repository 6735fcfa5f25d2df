"""Image files of clients: which are read and how, and which are refused by a stated rule."""

import io
import struct
import sys
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.ImageFile import ImageFile as PillowFile

from jdisagg.chat.image_files import ImageFile
from jdisagg.chat.images import ChatImage, image_of_url, stated_image
from jdisagg.config import LimitsConfig
from jdisagg.errors import InvalidRequestError
from tests.vision import data_url, file_of, pattern

LIMITS = LimitsConfig()


def pixels_of(file: bytes, limits: LimitsConfig = LIMITS) -> np.ndarray:
    opened = ImageFile("image", ChatImage(file), limits)
    pixels = opened.pixels()
    assert pixels.shape == (opened.height, opened.width, 3) and pixels.dtype == np.uint8
    return pixels


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def test_each_format_is_read() -> None:
    image = pattern(13, 21)
    for form, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {}), ("GIF", {})):
        file = file_of(image, form, **options)
        lossy = form in ("JPEG", "GIF")
        expected = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) if lossy else image
        np.testing.assert_array_equal(pixels_of(file), expected, err_msg=form)
    np.testing.assert_array_equal(pixels_of(file_of(np.full((1, 1, 3), 9, np.uint8))), [[[9] * 3]])


def test_grey_and_one_bit_images_become_three_channels() -> None:
    grey = pattern(5, 6)[:, :, 0]
    np.testing.assert_array_equal(pixels_of(saved(Image.fromarray(grey))), np.dstack([grey] * 3))
    bits = Image.fromarray(grey > 127)
    assert set(np.unique(pixels_of(saved(bits)))) <= {0, 255}


def test_samples_of_16_bits_keep_their_upper_8() -> None:
    deep = np.arange(0, 65536, 997, dtype=np.uint16)[None, :]
    made = pixels_of(saved(Image.fromarray(deep)))
    np.testing.assert_array_equal(made, np.dstack([(deep >> 8).astype(np.uint8)] * 3))


def test_cmyk_is_read() -> None:
    image = Image.new("CMYK", (4, 3), (0, 255, 255, 0))
    red = pixels_of(saved(image, "JPEG", quality=100))
    assert (red[:, :, 0] > 240).all() and (red[:, :, 1:] < 15).all()


def test_transparent_pixels_are_blended_with_white() -> None:
    layered = np.zeros((1, 3, 4), np.uint8)
    layered[0, :, 3] = (0, 255, 128)
    expected = [[[255] * 3, [0] * 3, [127] * 3]]
    np.testing.assert_array_equal(pixels_of(file_of(layered)), expected)
    palette = Image.new("P", (2, 1))
    palette.putpalette([1, 2, 3, 200, 100, 50])
    palette.putdata([0, 1])
    np.testing.assert_array_equal(
        pixels_of(saved(palette, transparency=0)), [[[255] * 3, [200, 100, 50]]]
    )


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_the_exif_orientation_is_applied(orientation: int, form: str) -> None:
    image = pattern(3, 5)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    turned = {
        1: image, 2: image[:, ::-1], 3: image[::-1, ::-1], 4: image[::-1],
        5: image.transpose(1, 0, 2), 6: np.rot90(image, -1), 
        7: np.rot90(image, 2).transpose(1, 0, 2), 8: np.rot90(image),
    }  # fmt: skip
    file = file_of(image, form, exif=exif, **options)
    np.testing.assert_array_equal(pixels_of(file), turned[orientation])


def test_the_first_picture_of_a_jpeg_with_several_is_read() -> None:
    first, second = (Image.fromarray(pattern(8, 8, seed)) for seed in (1, 2))
    file = saved(first, "MPO", save_all=True, append_images=[second], quality=95)
    assert Image.open(io.BytesIO(file)).format == "MPO"
    np.testing.assert_array_equal(pixels_of(file), np.asarray(Image.open(io.BytesIO(file))))


def test_an_animation_and_a_file_that_is_cut_off_are_refused() -> None:
    frames = [Image.fromarray(pattern(8, 8, seed)) for seed in (1, 2)]
    for form in ("GIF", "WEBP", "PNG"):
        file = saved(frames[0], form, save_all=True, append_images=frames[1:])
        with pytest.raises(InvalidRequestError, match="image is animated; send one frame"):
            pixels_of(file)
    for form in ("GIF", "WEBP", "PNG", "JPEG"):
        file = file_of(pattern(40, 40), form)
        for end in (0, 1, 4, 20, len(file) // 2, len(file) * 3 // 4):
            with pytest.raises(InvalidRequestError, match="image is not a readable image"):
                pixels_of(file[:end])


def test_bytes_at_random_are_refused_or_read_and_nothing_else_happens() -> None:
    random = np.random.default_rng(3)
    files = [file_of(pattern(12, 12), form) for form in ("PNG", "JPEG", "GIF", "WEBP")]
    refused = 0
    for trial in range(200):
        file = bytearray(files[trial % 4])
        for at in random.integers(0, len(file), 3):
            file[at] = random.integers(256)
        try:
            pixels_of(bytes(file))
        except InvalidRequestError:
            refused += 1
    assert refused > 20


def test_another_format_is_refused() -> None:
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    for file in (b"", b"%PDF-1.7", svg, b"\x00" * 1000, b"BM" + b"\0" * 99):
        with pytest.raises(InvalidRequestError, match="a complete PNG, JPEG, WebP or GIF file"):
            pixels_of(file)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header states a size that its content, a few bytes, unpacks to."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content
            + struct.pack(">I", zlib.crc32(name + content))
        )  # fmt: skip

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packed = zlib.compressobj(9)
    rows = packed.compress(b"\0" * 1_000_000) + packed.flush()
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(6325, 6325), (20_000, 20_000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_by_its_header(monkeypatch: Any, size: tuple[int, int]) -> None:
    monkeypatch.setattr(
        Image.Image, "load", lambda self: pytest.fail("the pixels must not be decoded")
    )
    with pytest.raises(InvalidRequestError, match="limits.max_image_pixels|DecompressionBomb"):
        ImageFile("image", ChatImage(bomb(*size)), LIMITS)


def test_no_pixels_are_decoded_before_all_limits_are_checked(monkeypatch: Any) -> None:
    """Pillow decodes a PNG when it is asked for the orientation."""
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        file = file_of(pattern(10, 20), kind)
        with monkeypatch.context() as patch:
            patch.setattr(PillowFile, "load", lambda self: pytest.fail("decoded"))
            read = ImageFile("image", ChatImage(file), LIMITS)
        assert read.pixels().shape == (read.height, read.width, 3)


def test_limits_apply_to_pixels_and_bytes() -> None:
    file = file_of(pattern(10, 10))
    pixels_of(file, replace(LIMITS, max_image_pixels=100, max_image_bytes=len(file)))
    with pytest.raises(InvalidRequestError, match="10 x 10 pixels; at most 99 are taken"):
        pixels_of(file, replace(LIMITS, max_image_pixels=99))
    with pytest.raises(InvalidRequestError, match="bytes; at most 50 are taken"):
        pixels_of(file, replace(LIMITS, max_image_bytes=50))


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    """Each scan costs a pass over all pixels, and may be a few bytes long."""
    file = file_of(pattern(16, 16), "JPEG", progressive=True)
    begin = file.rindex(b"\xff\xda")
    scan, end = file[begin:-2], file[-2:]
    with pytest.raises(InvalidRequestError, match="scans; at most 100 are taken"):
        pixels_of(file[:-2] + scan * 100 + end)


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InvalidRequestError, match=r"install jdisagg\[images\]"):
        ImageFile("image", ChatImage(b"x"), LIMITS)


def test_a_data_url_has_the_file_with_or_without_padding_and_spaces() -> None:
    file = file_of(pattern(3, 3))
    url = data_url(file)
    spaced = url[:60] + "\n" + url[60:]
    for each in (url, url.rstrip("="), spaced, url.replace("image/png", "IMAGE/PNG"),
                 url.replace("data:image/png", "data:"),
                 url.replace("image/png", "image/png;charset=utf-8")):  # fmt: skip
        assert image_of_url("u", each).content("u") == file


URLS = {
    "https://example.com/cat.png": "the server fetches no URLs: send the file itself",
    "http://169.254.169.254/latest": "the server fetches no URLs",
    "file:///etc/passwd": "the server fetches no URLs",
    "/etc/passwd": "the server fetches no URLs",
    "": "must be a data: URL, got ''",
    "data:image/png,abc": "must begin with data:, a media type and ;base64",
    "data:image/png;base64": "must begin with data:, a media type and ;base64",
    "data:application/pdf;base64,AAAA": "media type 'application/pdf' is not supported",
    "data:image/svg+xml;base64,AAAA": "media type 'image/svg\\+xml' is not supported",
}


def test_other_urls_and_text_that_is_not_base64_are_refused_by_name() -> None:
    for url, words in URLS.items():
        with pytest.raises(InvalidRequestError, match=f"^part.url.*{words}"):
            image_of_url("part.url", url)
    for text in ("a*b=", "abcde", "é" * 8):
        with pytest.raises(InvalidRequestError, match="part is not valid base64"):
            stated_image("part", text, "image/png").content("part")


def test_an_image_is_made_of_bytes_a_path_or_a_picture(tmp_path: Any) -> None:
    image = pattern(4, 6)
    file = file_of(image)
    (tmp_path / "a.png").write_bytes(file)
    for given in (file, tmp_path / "a.png", str(tmp_path / "a.png"), Image.fromarray(image)):
        np.testing.assert_array_equal(pixels_of(bytes(ChatImage.of(given).content("x"))), image)
    assert pixels_of(ChatImage.of(Image.new("CMYK", (2, 2))).content("x")).shape == (2, 2, 3)
    with pytest.raises(InvalidRequestError, match="cannot be read .*give the path of a file"):
        ChatImage.of(tmp_path / "missing.png")
