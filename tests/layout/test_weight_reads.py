"""Plans of reads of offered arrays, against the values of numpy."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from jdisagg.layout.reshard_plan import Box
from jdisagg.layout.weight_reads import Source, plan_reads


@st.composite
def offers(draw: st.DrawFn) -> tuple[list[np.ndarray], list[dict[Source, Box]], list]:
    arrays, held, reads = [], [], []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        arrays.append(np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + 1000 * number)
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, shape[axis]))
        copies = draw(st.integers(1, 2))
        boxes: dict[Source, Box] = {}
        for place, bounds in enumerate(((0, cut), (cut, shape[axis]))):
            box = [(0, size) for size in shape]
            box[axis] = bounds
            boxes |= {(process, place): tuple(box) for process in range(copies)}
        held.append(boxes)
        for _ in range(draw(st.integers(0, 3))):
            box = [
                draw(st.tuples(st.integers(0, size - 1), st.integers(1, size))) for size in shape
            ]
            reads.append((number, tuple((low, max(low + 1, high)) for low, high in box)))
    return arrays, held, reads


@given(offers(), st.integers(4, 64))
def test_blocks_hold_each_byte_of_each_read_once_in_order_and_are_small(offer, most) -> None:
    arrays, held, reads = offer
    blocks = plan_reads(held, [4] * len(arrays), reads, most)
    results = [np.full([high - low for low, high in box], -1, np.int32) for _, box in reads]
    for block in blocks:
        assert len({piece.source[0] for piece in block}) == 1
        assert sum(piece.nbytes for piece in block) <= most or len(block) == 1
        for piece in block:
            inside = held[piece.tensor][piece.source]
            assert all(a <= c <= d <= b for (c, d), (a, b) in zip(piece.box, inside, strict=True))
            part = arrays[piece.tensor][tuple(slice(*bounds) for bounds in piece.box)]
            place = results[piece.read][tuple(slice(*bounds) for bounds in piece.place)]
            assert np.all(place == -1) and part.nbytes == piece.nbytes
            place[...] = part
    order = [piece.read for block in blocks for piece in block]
    assert order == sorted(order)
    for (tensor, box), found in zip(reads, results, strict=True):
        assert np.array_equal(found, arrays[tensor][tuple(slice(*bounds) for bounds in box)])
