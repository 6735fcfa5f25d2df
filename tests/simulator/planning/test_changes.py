"""What would change a verdict, against ratios that are known."""

import math

import pytest

from jdisagg.costs.hardware import link
from jdisagg.simulator.planning.changes import Changes, Stepped, with_prompts
from jdisagg.simulator.workloads import Arrival

NDR = link("infiniband-ndr")  # 400 Gb/s


def said(gain: float, stepped: Stepped, most: float = math.inf) -> list[str]:
    prompt = 1000.0
    changes = Changes(gain, 0.15, stepped, NDR, lambda factor: min(most, factor * prompt))
    return list(changes.said())


def test_a_link_that_changes_nothing_leaves_the_order_that_the_simulation_found() -> None:
    """By stepping alone two pools carry 1.3 times as much, and by simulation one pool does."""
    of_link, _ = said(1 / 1.3, lambda two, speed, length: 1.3 if two else 1.0)
    assert of_link == (
        "With a link 8 times as fast (3,200 Gb/s), of these two, still one pool would carry 1.30"
        " times as much."
    )


def test_where_both_are_equal_is_told_in_tokens_and_in_gigabits() -> None:
    """Two pools lose to the square root of the factors: 2 = sqrt(4)."""
    of_link, of_prompts = said(
        2.0, lambda two, speed, length: 2.0 * (speed * length) ** 0.5 if two else 1.0
    )
    assert "one pool would carry 1.41 times as much; they are equal at about " in of_link
    at = float(of_link.split("about ")[1].split(" Gb/s")[0])
    assert at == pytest.approx(400 / 4, rel=0.15)
    assert (
        "prompts 1/4 times as long (250 tokens on average), these two would carry about"
        in of_prompts
    )


def test_small_differences_are_called_equal_and_losses_told() -> None:
    equal, _ = said(1.0, lambda two, speed, length: 1.1 if two and speed > 1 else 1.0)
    assert "these two would carry about the same" in equal and "still" not in equal
    lost, none = said(
        0.5, lambda two, speed, length: 0.0 if length > 1 else float(not two or speed == 1)
    )
    assert "of these two, only one pool would meet the limits" in lost and none.endswith(
        "these two miss the limits."
    )


def test_prompts_are_not_longer_than_the_context() -> None:
    _, of_prompts = said(0.5, lambda two, speed, length: 1.0, most=1100.0)
    assert of_prompts == "Prompts cannot be 4 times as long in this model's context."
    listed = with_prompts([Arrival(0.0, 3000, 200), Arrival(1.0, 1000, 200)], 4.0, 8192)
    assert [item.prompt_tokens for item in listed] == [7992, 4000]


@pytest.mark.parametrize("factor", [4.0, 2.83, 0.25, 0.35])
def test_longer_prompts_share_as_large_a_part_as_before(factor: float) -> None:
    shared, own = tuple(range(12)), tuple(range(100, 108))
    first, second = with_prompts(
        [Arrival(0.0, 1280, 9, shared + own), Arrival(1.0, 1280, 9, (*shared, *range(200, 208)))],
        factor,
        100_000,
    )
    names = first.block_hashes
    assert len(names) == len(set(names)) == round(20 * factor)
    pairs = zip(names, second.block_hashes, strict=True)
    common = sum(one == other for one, other in pairs)
    assert common == pytest.approx(0.6 * len(names), abs=0.6)
