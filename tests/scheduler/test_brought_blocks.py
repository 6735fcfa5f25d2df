"""Tokens of a prompt by where they were, against a list that labels each token by itself."""

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.request import CachedTokens
from jdisagg.scheduler.brought_blocks import BroughtBlocks, Origin

ORIGINS = st.sampled_from(["host", "disk", "peer"])
RUNS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.lists(ORIGINS, max_size=5)))


@given(st.sampled_from([1, 4, 16]), RUNS, st.integers(0, 200))
def test_each_token_counts_once_where_its_block_came_from_last(
    size: int, runs: list[tuple[int, int, list[Origin]]], tokens: int
) -> None:
    brought = BroughtBlocks(size)
    labels: list[list[str]] = [["pages"] * 200 for _ in range(2)]  # by rank and token
    for rank, first, origins in runs:
        brought.add(rank, first, origins)
        for at, origin in enumerate(origins, first):
            for token in range(at * size, min(200, (at + 1) * size)):
                labels[rank][token] = origin
    for rank in range(2):
        known = labels[rank][:tokens]
        found = brought.split(rank, tokens)
        assert found.by_tier() == {tier: known.count(tier) for tier in CachedTokens().by_tier()}
        assert found.total == tokens
