"""Shared links against arithmetic by hand, and gaps between tokens against the times of single
steps."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.costs.hardware import Link
from jdisagg.simulator.channel import ChannelEnd, SimulatedChannel, SimulatedOffer
from jdisagg.simulator.gaps import Gaps
from jdisagg.simulator.step_costs import Pace
from jdisagg.simulator.timeline import Timeline, gap_runs
from jdisagg.simulator.virtual_time import run_virtually

LINK = Link("test", 100.0, 0.5, 1.0)


def arrivals(
    pulls: list[tuple[float, str, str, float]],
    overlap: int = 1,
    ready_at: float = 0.0,
    slow: float = 1.0,
    links: int = 1,
    lanes: int = 0,
    make: Callable[..., SimulatedChannel] = SimulatedChannel,
) -> list[float]:
    """Returns when each pull (at, sender, receiver, bytes) has arrived."""
    found = [0.0] * len(pulls)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel = make(lambda one, other: LINK, overlap)
        channel.ends = {name: ChannelEnd(name, links, lanes) for name in ("a", "b", "x", "y")}
        channel.slow("a", slow)

        def begin(number: int, sender: str, receiver: str, size: float) -> None:
            channel.pull(
                SimulatedOffer(sender, 1, 0.0, ready_at),
                receiver,
                size,
                lambda: found.__setitem__(number, loop.time()),
            )

        for number, (at, sender, receiver, size) in enumerate(pulls):
            loop.call_at(at, begin, number, sender, receiver, size)
        await asyncio.sleep(1000.0)

    run_virtually(main)
    return found


def test_alone_a_pull_takes_latency_and_bytes() -> None:
    assert arrivals([(0.0, "a", "x", 200.0)]) == pytest.approx([2.5])
    assert arrivals([(0.0, "a", "x", 200.0)], slow=0.1) == pytest.approx([20.5])


def test_two_pulls_share_the_end_that_they_have_in_common() -> None:
    # From one sender: 100 bytes each at half the speed, then the longer one alone.
    assert arrivals([(0.0, "a", "x", 100.0), (0.0, "a", "y", 200.0)]) == pytest.approx([2.5, 3.5])
    # To one receiver, the second from t=1 on: 100 bytes are there, 100 more at half speed; then it
    # has 100 left.
    assert arrivals([(0.0, "a", "x", 200.0), (1.0, "b", "x", 200.0)]) == pytest.approx([3.5, 4.5])
    # Nothing in common.
    assert arrivals([(0.0, "a", "x", 200.0), (0.0, "b", "y", 200.0)]) == pytest.approx([2.5, 2.5])


def test_a_pull_has_the_links_of_the_devices_that_its_sequence_lies_on_and_several_ranks_have_theirs() -> (  # noqa: E501
    None
):
    assert arrivals([(0.0, "a", "x", 200.0)], links=4) == pytest.approx([1.0])
    assert arrivals([(0.0, "a", "x", 200.0)], links=4, lanes=2) == pytest.approx([1.5])
    assert arrivals([(0.0, "a", "x", 200.0)] * 2, links=4, lanes=2) == pytest.approx([1.5, 1.5])
    assert arrivals([(0.0, "a", "x", 200.0)] * 4, links=4, lanes=2) == pytest.approx([2.5] * 4)
    assert arrivals([(0.0, "a", "x", 200.0)], links=4, lanes=1, slow=0.1) == pytest.approx([20.5])


def test_layer_groups_move_while_their_chunk_computes() -> None:
    # Computed from 0 to 4; whole blocks wait for the end, halves send the first half from 2 on.
    assert arrivals([(0.0, "a", "x", 200.0)], overlap=1, ready_at=4.0) == pytest.approx([6.5])
    assert arrivals([(0.0, "a", "x", 200.0)], overlap=2, ready_at=4.0) == pytest.approx([5.5])
    assert arrivals([(0.0, "a", "x", 800.0)], overlap=2, ready_at=4.0) == pytest.approx([10.5])


@given(
    spans=st.lists(
        st.tuples(
            st.floats(0.0, 0.5), st.floats(0.001, 0.1), st.floats(0.0, 1e-4), st.integers(1, 30)
        ),
        min_size=1,
        max_size=12,
    ),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_gap_runs_are_the_gaps_of_the_single_steps(
    spans: list[tuple[float, float, float, int]], ends: tuple[float, float]
) -> None:
    prefill, mesh = Timeline(0), Timeline(1)
    (first,) = prefill.add(0.0, Pace(0.25), 1)
    times, tokens, at = list[float](), list[int](), 1.0
    for pause, seconds, growth, steps in spans:
        pace = Pace(seconds, growth)
        at += pause
        tokens += mesh.add(at, pace, steps)
        times += [at + pace.seconds(step + 1) for step in range(steps)]
        at += pace.seconds(steps)
    low, high = sorted(int(end * len(tokens)) for end in ends)
    chosen = [first, *tokens[low : high + 1]]
    exact = Gaps.of_times([0.25, *times[low : high + 1]])
    found = Gaps.of(gap_runs([prefill, mesh], chosen))
    if exact is None:
        assert found is None
        return
    assert found is not None and found.count == exact.count
    assert found.first == pytest.approx(exact.first)
    assert found.total == pytest.approx(exact.total, rel=1e-9)
    assert found.longest == pytest.approx(exact.longest, rel=0.06), (
        "a span's mean stands for its steps: contexts grow slowly"
    )


@given(first=st.floats(1e-4, 1.0), growth=st.floats(0.0, 1e-3), steps=st.integers(1, 500))
def test_steps_begun_is_the_inverse_of_seconds(first: float, growth: float, steps: int) -> None:
    pace = Pace(first, growth)
    middle = (pace.seconds(steps - 1) + pace.seconds(steps)) / 2
    assert pace.steps_begun(middle) == steps
    assert pace.steps_begun(pace.seconds(steps)) == steps
