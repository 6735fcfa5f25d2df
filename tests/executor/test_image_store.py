"""Which encoded images a rank keeps."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from jdisagg.executor.image_programs import ImageStore, patches_of
from jdisagg.prompt.images import ImageFormat, PromptImage

SIZES = {b"a": 2, b"b": 3, b"c": 3, b"d": 5}
ROWS = 8


@given(st.lists(st.sampled_from(sorted(SIZES)), max_size=30))
def test_rows_of_kept_images_never_overlap_and_the_oldest_go_first(names: list[bytes]) -> None:
    store, recent = ImageStore(ROWS), list[bytes]()
    for name in names:
        fresh = store.take(name, SIZES[name], {name})
        assert fresh == (name not in recent)
        recent = [other for other in recent if other != name] + [name]
        while sum(SIZES[other] for other in recent) > ROWS:
            recent.pop(0)
        assert [name for name in SIZES if name in store] == sorted(recent)
        held = [row for other in recent for row in store.rows(other).tolist()]
        assert len(set(held)) == len(held) and set(held) <= set(range(ROWS))
        assert len(store.rows(name)) == SIZES[name]
    store.clear()
    assert not any(name in store for name in SIZES)
    assert store.take(b"whole", ROWS, {b"whole"})


def test_images_of_the_same_pass_keep_their_rows() -> None:
    store = ImageStore(ROWS)
    store.take(b"a", 2, {b"a"})
    store.take(b"b", 3, {b"b"})
    used = {b"a", b"d"}
    assert not store.take(b"a", 2, used) and store.take(b"d", 5, used)
    assert b"a" in store and b"b" not in store


def test_patches_of_a_token_are_neighbours_and_know_their_place() -> None:
    form = ImageFormat(0, 2, 2, True, 64)
    image = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3)
    pixels, place = patches_of(PromptImage.of(0, 6, (1, 4, 6), image.tobytes()), form)
    assert len(pixels) == 24
    for patch, (row, column) in zip(pixels, place.tolist(), strict=True):
        own = image[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        np.testing.assert_array_equal(patch, own.reshape(-1))
    blocks = [[(r // 2, c // 2) for r, c in place[at : at + 4].tolist()] for at in range(0, 24, 4)]
    assert [block[0] for block in blocks] == [(r, c) for r in range(2) for c in range(3)]
    assert all(len(set(block)) == 1 for block in blocks)
