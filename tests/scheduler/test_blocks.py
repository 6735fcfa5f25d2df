"""How KV is cut into blocks by layers: few bytes together, many apart, every layer group once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.errors import LayoutError
from jdisagg.scheduler.blocks import bands, even_runs, layer_groups, stage_layers

MIB = 1 << 20


@given(st.integers(1, 200), st.integers(1, 200))
def test_even_runs_cover_everything_once_and_differ_by_one_at_most(count: int, runs: int) -> None:
    found = even_runs(count, runs)
    assert [item for run in found for item in run] == list(range(count))
    sizes = [len(run) for run in found]
    assert len(found) == min(runs, count)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.integers(1, 100), st.integers(1, 1 << 32), st.integers(0, 1 << 26))
def test_bands_cover_every_layer_group_once_and_none_is_much_smaller_than_asked(
    groups: int, nbytes: int, least: int
) -> None:
    found = bands(groups, nbytes, least)
    assert [group for band in found for group in band] == list(range(groups))
    count = len(found)
    assert count == groups or count & (count - 1) == 0
    if not least:
        assert count == groups
    else:
        assert count == 1 or nbytes / count >= least
        assert count == groups or nbytes / (2 * count) < least, (
            "twice as many would not have been too small"
        )


def test_more_tokens_are_never_cut_into_fewer_blocks() -> None:
    for groups, least in itertools.product((1, 5, 16, 23), (1, MIB, 4 * MIB)):
        counts = [
            len(bands(groups, tokens * 128 << 10, least))
            for tokens in (16 << power for power in range(10))
        ]
        assert counts == sorted(counts) and counts[-1] == groups


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(16, 1), (32, 1), (64, 2), (128, 4), (256, 8), (512, 16), (4096, 16)]
)
def test_an_8b_models_prompts_leave_in_blocks_of_four_mebibytes_until_there_is_one_for_each_group(
    tokens: int, blocks: int
) -> None:
    assert len(bands(16, tokens * 128 << 10, 4 * MIB)) == blocks


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 8), st.data())
def test_stages_cover_every_layer_once_and_cut_no_layer_group(
    layers: int, groups: int, stages: int, data: st.DataObject
) -> None:
    positioned = tuple(
        sorted(data.draw(st.sets(st.integers(0, layers - 1), min_size=1), "layers with KV"))
    )
    cut = layer_groups(positioned, layers, groups)
    if stages > len(cut):
        with pytest.raises(LayoutError, match=f"choose at most pp={len(cut)}"):
            stage_layers(positioned, layers, groups, stages)
        return
    found = stage_layers(positioned, layers, groups, stages)
    assert [layer for run in found for layer in run] == list(range(layers))
    assert len(found) == stages and all(found)
    starts = {group.start for group in cut}
    assert all(run.start in starts for run in found)


@given(st.integers(1, 200), st.integers(1, 8))
def test_stages_that_may_be_cut_anywhere_differ_by_one_layer_at_most(
    layers: int, stages: int
) -> None:
    stages = min(stages, layers)
    sizes = [len(run) for run in stage_layers(tuple(range(layers)), layers, layers, stages)]
    assert max(sizes) - min(sizes) <= 1
