"""A plan executed with numpy against gather-then-scatter, over random shardings with uneven
replication."""

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.errors import LayoutError
from jdisagg.layout.reshard_plan import Box, Piece, Placement, plan_reshard, volume
from tests.lanes import given_examples
from tests.layout.plans import bytes_per_pair, elements

ITEMSIZE = 4


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def execute(
    plan: tuple[Piece, ...], shards: dict[int, np.ndarray], destination: Placement
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Returns the received shards, and how often each element was written."""
    received = {
        device: np.full([stop - start for start, stop in box], -1)
        for device, box in destination.items()
    }
    writes = {device: np.zeros_like(shard) for device, shard in received.items()}
    for piece in plan:
        received[piece.destination][slices(piece.destination_slice)] = shards[piece.source][
            slices(piece.source_slice)
        ]
        writes[piece.destination][slices(piece.destination_slice)] += 1
    return received, writes


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Cuts each dimension at random places and returns the cells of the grid."""
    edges = []
    for size in shape:
        cuts = draw(st.lists(st.integers(1, size - 1), max_size=2, unique=True)) if size > 1 else []
        edges.append(list(pairwise([0, *sorted(cuts), size])))
    return list(product(*edges))


@st.composite
def partial_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((low, high) for low, high in ends)


@st.composite
def reshards(draw: st.DrawFn) -> tuple[tuple[int, ...], Placement, Placement]:
    """Returns a shape, a source that covers it (each cell on one to three devices, with odd extra
    boxes), and any destination."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    held = [box for box in draw(grids(shape)) for _ in range(draw(st.integers(1, 3)))]
    held += draw(st.lists(partial_boxes(shape), max_size=2))
    wanted = [box for box in draw(grids(shape)) for _ in range(draw(st.integers(1, 2)))]
    wanted += draw(st.lists(partial_boxes(shape), max_size=2))
    # the last `shared` source devices are destinations too
    shared = draw(st.integers(0, len(held)))
    ids = draw(st.permutations(range(len(held))))
    source = {ids[index]: box for index, box in enumerate(held)}
    return shape, source, {len(held) - shared + index: box for index, box in enumerate(wanted)}


@given_examples(80, 300, reshards(), st.integers(0, 3))
def test_a_plan_does_what_gather_then_scatter_does_and_writes_each_byte_once(
    case: tuple[tuple[int, ...], Placement, Placement], turn: int
) -> None:
    shape, source, destination = case
    whole = np.arange(volume(tuple((0, size) for size in shape))).reshape(shape)
    plan = plan_reshard(source, destination, turn=turn)
    received, writes = execute(
        plan, {device: whole[slices(box)] for device, box in source.items()}, destination
    )
    for device, box in destination.items():
        np.testing.assert_array_equal(received[device], whole[slices(box)])
        assert (writes[device] == 1).all()
    kept = sum(elements(piece) for piece in plan if piece.source == piece.destination)
    moved = sum(bytes_per_pair(plan, ITEMSIZE).values())
    assert moved + ITEMSIZE * kept == ITEMSIZE * sum(map(volume, destination.values()))
    assert plan == plan_reshard(
        dict(reversed(list(source.items()))), dict(reversed(list(destination.items()))), turn=turn
    )


@given_examples(80, 300, reshards())
def test_replicas_are_used_so_evenly_that_no_piece_had_better_come_from_another(
    case: tuple[tuple[int, ...], Placement, Placement],
) -> None:
    _, source, destination = case
    plan = plan_reshard(source, destination)
    sent = dict.fromkeys(source, 0)
    for piece in plan:
        sent[piece.source] += 0 if piece.source == piece.destination else elements(piece)

    def holds(device: int, box: Box) -> bool:
        return all(p <= r and s <= q for (p, q), (r, s) in zip(source[device], box, strict=True))

    for piece in plan:
        holders = [device for device in source if holds(device, piece.box)]
        assert piece.source in holders
        if piece.destination in holders:
            assert piece.source == piece.destination
        else:
            assert sent[piece.source] - min(sent[device] for device in holders) <= elements(piece)


@settings(max_examples=100)
@given(st.data())
def test_replicas_of_one_shard_differ_by_at_most_its_largest_piece(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    cells = data.draw(grids(shape))
    groups: list[list[int]] = []
    source: dict[int, Box] = {}
    for box in cells:
        groups.append([len(source) + extra for extra in range(data.draw(st.integers(1, 4)))])
        source |= dict.fromkeys(groups[-1], box)
    wanted = [box for box in data.draw(grids(shape)) for _ in range(data.draw(st.integers(1, 4)))]
    plan = plan_reshard(source, {100 + index: box for index, box in enumerate(wanted)})
    for group in groups:
        sent = [
            sum(elements(piece) for piece in plan if piece.source == device) for device in group
        ]
        largest = max(elements(piece) for piece in plan if piece.source in group)
        assert max(sent) - min(sent) <= largest


@pytest.mark.parametrize(
    ("source_parts", "destination_parts"), list(product((1, 2, 3, 6), repeat=2))
)
def test_a_granule_gives_all_pieces_one_shape(source_parts: int, destination_parts: int) -> None:
    heads, granule = 12, int(np.gcd(12 // source_parts, 12 // destination_parts))

    def split(parts: int, first: int) -> Placement:
        size = heads // parts
        return {first + part: ((0, 5), (part * size, part * size + size)) for part in range(parts)}

    source, destination = split(source_parts, 0), split(destination_parts, 10)
    plan = plan_reshard(source, destination, granule=(5, granule))
    assert {tuple(stop - start for start, stop in piece.box) for piece in plan} == {(5, granule)}
    counts = Counter(piece.destination for piece in plan)
    assert set(counts.values()) == {heads // destination_parts // granule}
    assert counts.keys() == destination.keys()
    whole = np.arange(5 * heads).reshape(5, heads)
    received, _ = execute(
        plan, {device: whole[slices(box)] for device, box in source.items()}, destination
    )
    for device, box in destination.items():
        np.testing.assert_array_equal(received[device], whole[slices(box)])


def test_a_device_that_holds_the_bytes_already_reads_its_own() -> None:
    box = ((0, 8),)
    plan = plan_reshard({0: box, 1: box, 2: box}, {1: box, 5: ((0, 4),)})
    assert [(piece.source, piece.destination) for piece in plan] == [(1, 1), (0, 5)]
    assert bytes_per_pair(plan, 2) == {(0, 5): 8}


def test_replicas_take_turns_over_many_plans() -> None:
    source, destination = {0: ((0, 4),), 1: ((0, 4),), 2: ((0, 4),)}, {9: ((0, 4),)}
    assert [plan_reshard(source, destination, turn=turn)[0].source for turn in range(5)] == [
        0,
        1,
        2,
        0,
        1,
    ]


def test_an_empty_box_gets_no_piece() -> None:
    assert plan_reshard({0: ((0, 4),)}, {1: ((2, 2),)}) == ()
    assert plan_reshard({}, {}) == ()


def test_a_source_that_does_not_cover_the_destination_is_refused_with_the_missing_box() -> None:
    with pytest.raises(
        LayoutError,
        match=r"device 7 needs \(\(4, 6\),\).*no source device holds.*\(0, 2\).*\(2, 4\)",
    ):
        plan_reshard({0: ((0, 2),), 1: ((2, 4),)}, {7: ((1, 6),)})


def test_sides_of_different_rank_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        LayoutError, match="source device 0 holds a box of 2 dimensions.*destination has 1"
    ):
        plan_reshard({0: ((0, 2), (0, 2))}, {7: ((0, 2),)})


def test_a_backward_box_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"destination device 7, dimension 0: \(3, 2\)"):
        plan_reshard({0: ((0, 4),)}, {7: ((3, 2),)})


@pytest.mark.parametrize(
    ("granule", "message"),
    [((3,), "multiples of the granule 3"), ((0,), "positive steps"), ((2, 2), "1 positive steps")],
)
def test_a_granule_that_does_not_fit_is_refused(granule: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_reshard({0: ((0, 4),)}, {7: ((0, 4),)}, granule=granule)
