"""Tells whether another link or other prompt lengths would change which of two plans is better.

Both plans are stepped with the change. Stepped rates alone may rank two plans that are nearly equal
differently than simulations do. Only the change of their ratio is therefore taken from stepping,
and multiplied with the ratio of the rates that the verdict compares."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from jdisagg.costs.hardware import Link
from jdisagg.simulator.workloads import Arrival

OTHER_LINK = 8  # factor on the speed of the link with which both modes are stepped again
OTHER_PROMPTS = 4  # factor on the prompt lengths
HALVINGS = 3  # of the logarithm of a factor, to find where both plans are equal

# The worth of the plan with two pools (True) or with one (False) by stepping, with these factors on
# the speed of the link and on the prompt lengths.
Stepped = Callable[[bool, float, float], float]


@dataclass(frozen=True)
class Changes:
    """
    Attributes:
        gain: Worth of two pools relative to one, without a change.
        error: Relative difference below which two plans count as equal.
        link: Link of the hand-off, or None if there are several.
        prompt: Mean number of prompt tokens with a factor on the prompt lengths, which the model's
            context limits.
    """

    gain: float
    error: float
    stepped: Stepped
    link: Link | None
    prompt: Callable[[float], float]

    def said(self) -> Iterator[str]:
        stepped = cache(self.stepped)
        before = _ratio(stepped(False, 1.0, 1.0), stepped(True, 1.0, 1.0))
        scale = self.gain / before if before and math.isfinite(before) else 1.0

        def with_link(factor: float) -> float | None:
            return _ratio(stepped(False, 1.0, 1.0), stepped(True, factor, 1.0), scale)

        def with_prompts(factor: float) -> float | None:
            return _ratio(stepped(False, 1.0, factor), stepped(True, 1.0, factor), scale)

        speed, length = float(OTHER_LINK), float(OTHER_PROMPTS)
        if self.gain > 1:
            speed, length = 1 / speed, 1 / length
        given = f" ({self._speed(speed)})" if self.link else ""
        yield self._one(f"a link {_times(speed)} as fast{given}", with_link, speed, self._speed)
        whole = self.prompt(1.0)
        times = self.prompt(length) / whole
        if max(times, 1 / times) < 1.2:
            yield f"Prompts cannot be {_times(length)} as long in this model's context."
            return
        changed = f"prompts {_times(times)} as long ({self._tokens(length)} on average)"
        yield self._one(changed, with_prompts, length, self._tokens)

    def _one(
        self,
        changed: str,
        ratio_with: Callable[[float], float | None],
        factor: float,
        figure: Callable[[float], str],
    ) -> str:
        ratio = ratio_with(factor)
        if ratio is None:
            return f"With {changed}, these two miss the limits."
        clear = not nearly_equal(self.gain, self.error)
        turned = clear and (ratio > 1) != (self.gain > 1)
        still = "still " * (clear and not turned)
        mode = "two pools" if ratio > 1 else "one pool"
        if not ratio or math.isinf(ratio):
            said = f"of these two, only {mode} would meet the limits"
        elif nearly_equal(ratio, self.error):
            said = f"these two would carry about the same ({ratio:.2f} times as much in two pools)"
        else:
            more = max(ratio, 1 / ratio)
            said = f"of these two, {still}{mode} would carry {more:.2f} times as much"
        if turned and (equal := figure(self._equal(ratio_with, factor))):
            said += f"; they are equal at about {equal}"
        return f"With {changed}, {said}."

    def _equal(self, ratio_with: Callable[[float], float | None], factor: float) -> float:
        """Returns about the factor, between 1 and `factor`, with which both plans are equal."""
        near, far = 1.0, factor
        for _ in range(HALVINGS):
            middle = (near * far) ** 0.5
            ratio = ratio_with(middle)
            turned = ratio is None or (ratio > 1) != (self.gain > 1)
            near, far = (near, middle) if turned else (middle, far)
        return (near * far) ** 0.5

    def _speed(self, factor: float) -> str:
        link = self.link
        return f"{rounded(8e-9 * factor * link.bytes_per_second, 3)} Gb/s" if link else ""

    def _tokens(self, factor: float) -> str:
        return f"{rounded(self.prompt(factor), 2)} tokens"


def nearly_equal(gain: float, error: float) -> bool:
    """Whether two plans differ by less than `error`, whichever is better."""
    return 1 / (1 + error) <= gain <= 1 + error


def with_prompts(
    workload: Sequence[Arrival], factor: float, context_tokens: int
) -> Sequence[Arrival]:
    """Returns the workload with `factor` times as long prompts, at most as long as the context
    permits. About the same part of each prompt has been named before."""
    return (
        workload if factor == 1.0 else [_longer(item, factor, context_tokens) for item in workload]
    )


def _longer(item: Arrival, factor: float, context_tokens: int) -> Arrival:
    wanted = round(factor * item.prompt_tokens)
    tokens = max(1, min(wanted, context_tokens - item.output_tokens))
    count = round(len(item.block_hashes) * tokens / item.prompt_tokens)
    # Each name becomes several, or one of several is left.
    copies = max(1, math.ceil(factor))
    places = [
        min(int((index + 0.5) / factor), len(item.block_hashes) - 1) for index in range(count)
    ]
    names = tuple(
        item.block_hashes[place] * copies + index % copies for index, place in enumerate(places)
    )
    return replace(item, prompt_tokens=tokens, block_hashes=names)


def _ratio(one: float, two: float, scale: float = 1.0) -> float | None:
    if not one and not two:
        return None
    return scale * two / one if one else math.inf


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor >= 1 else f"1/{1 / factor:.3g} times"


def rounded(value: float, digits: int) -> str:
    """Returns a number with this many significant digits, such as 28,800."""
    return f"{float(f'{value:.{digits}g}'):,.12g}"
