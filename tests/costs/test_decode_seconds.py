"""A decode step's seconds: the cached form against the sum of all parts, and attention whose blocks
of threads read whole contexts (`Kernels.whole_contexts`) against multiprocessors that take one head
after the other."""

import heapq
import random

import numpy as np
import pytest

from jdisagg.costs.catalog import CATALOG, geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.kernels import Kernels
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout
from tests.costs.named import A100, OPT_13B


def waves_by_hand(contexts: list[int], heads: int, multiprocessors: int) -> int:
    """Tokens that the busiest multiprocessor reads when each takes the next head of the next
    sequence as soon as it is free."""
    read = [0] * multiprocessors
    for context in contexts:
        for _ in range(heads):
            heapq.heapreplace(read, read[0] + context)
    return max(read)


@pytest.mark.parametrize("sequences", [1, 3, 8, 20, 60])
def test_decode_attention_over_whole_contexts_waits_for_the_busiest_multiprocessor(
    sequences: int,
) -> None:
    heads, kernels = 40, Kernels(multiprocessors=108, whole_contexts=True)
    rng = np.random.default_rng(sequences)
    per_token = heads / kernels.multiprocessors  # of all contexts, on one of them
    equal = kernels.waited_for(sequences, 900.0 * sequences, 0, heads) * per_token
    assert equal == pytest.approx(waves_by_hand([900] * sequences, heads, 108))
    for _ in range(20):
        contexts = rng.integers(20, 2000, sequences).tolist()
        waited = kernels.waited_for(sequences, sum(contexts), max(contexts), heads) * per_token
        by_hand = waves_by_hand(contexts, heads, 108)
        assert by_hand <= waited * (1 + 1e-9)
        assert waited <= by_hand + max(contexts)


def test_only_kernels_that_read_whole_contexts_ask_for_the_longest() -> None:
    shape, card = OPT_13B, A100
    cut, whole = (
        CostModel(shape, card, kernels=Kernels(multiprocessors=108, whole_contexts=each))
        for each in (False, True)
    )
    even, uneven = [500] * 20, [100] * 19 + [8100]
    assert cut.decode(even) == cut.decode(uneven)
    assert whole.decode(even).seconds < whole.decode(uneven).seconds
    seconds = whole.decode_seconds(20, 10_000, 8100)
    assert seconds == whole.decode(uneven).seconds


LAYOUTS = (Layout(), Layout(tp=4), Layout(tp=8), Layout(dp=8, ep=8), Layout(dp=2, tp=4, ep=8))


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_seconds_in_one_go_are_those_of_all_parts_together_to_the_bit(name: str) -> None:
    draw, asked = random.Random(name), 0
    for hardware in ("h100", "gb200", "l40s"):
        for layout in LAYOUTS:
            try:
                model = CostModel(geometry(name), accelerator(hardware), layout)
            except (ConfigError, LayoutError):
                continue
            for _ in range(20):
                sequences = draw.randrange(0, 300)
                context = sequences * draw.uniform(1, 40_000)
                assert (
                    model.decode_seconds(sequences, context)
                    == model.decode_of(sequences, context).seconds
                )
                asked += 1
    assert asked
