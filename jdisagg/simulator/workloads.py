"""Generates workloads, which are lists of arrivals, from distributions, and transforms them.

An `Arrival` is one request, with lengths but no text. All randomness comes from a seed, so that
equal calls give equal lists. This module must not depend on clusters, models or clocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jdisagg.errors import WorkloadError
from jdisagg.plain import plain
from jdisagg.prompt.hints import Hints


@plain
class Arrival:
    """One request of a workload.

    Attributes:
      block_hashes: Names of the prompt's blocks in order, as non-negative integers; the last block
        may be partial. Equal names mean that all tokens up to the block's end are equal.
      deadline: Seconds from the arrival to the deadline, or None for no deadline.
    """

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    hints: Hints | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at_seconds) and self.at_seconds >= 0):
            raise WorkloadError(
                f"an arrival's time must be 0 or more seconds, got {self.at_seconds!r}; correct the"
                " workload"
            )
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            lengths = f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens"
            raise WorkloadError(
                f"a request must have at least 1 prompt and 1 output token, got {lengths}; correct"
                " or drop the row"
            )
        if self.deadline is not None and not self.deadline > 0:
            raise WorkloadError(
                f"an arrival's deadline must be positive seconds after it, got {self.deadline!r};"
                " leave it out for none"
            )
        if self.block_hashes and min(self.block_hashes) < 0:
            raise WorkloadError(
                f"names of an arrival's blocks must be 0 or more, got {min(self.block_hashes)};"
                " renumber them"
            )

    def at(self, seconds: float) -> "Arrival":
        """Returns the request at another time. Cheaper than `dataclasses.replace`."""
        return Arrival(
            seconds,
            self.prompt_tokens,
            self.output_tokens,
            self.block_hashes,
            self.tenant,
            self.priority,
            self.deadline,
            self.hints,
        )


def names_blocks(workload: Sequence[Arrival]) -> bool:
    """Returns whether any request names blocks. Otherwise none finds any in a prefix cache."""
    return any(item.block_hashes for item in workload)


# ---- lengths


class Lengths(Protocol):
    """A distribution of prompt and output lengths. `draw` returns two int arrays [count] with the
    numbers of prompt and output tokens, each at least 1."""

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    prompt_tokens: int
    output_tokens: int

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(count, self.prompt_tokens), np.full(count, self.output_tokens)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Draws prompt and output lengths from independent log-normal distributions, given as (median,
    sigma of the logarithm). Clips lengths to 1..`longest`."""

    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float
    longest: int = 131072

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        prompts = self.prompt_median * np.exp(self.prompt_sigma * random.standard_normal(count))
        outputs = self.output_median * np.exp(self.output_sigma * random.standard_normal(count))
        return self._cut(prompts), self._cut(outputs)

    def _cut(self, values: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(values), 1, self.longest).astype(int)


@dataclass(frozen=True, slots=True)
class Resampled:
    """Draws (prompt, output) pairs from a trace with replacement, which keeps the correlation
    between prompt and output but not the trace's order."""

    arrivals: Sequence[Arrival]

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        known = _some(self.arrivals)
        chosen = [known[index] for index in random.integers(0, len(known), count)]
        return np.array([item.prompt_tokens for item in chosen]), np.array(
            [item.output_tokens for item in chosen]
        )


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws the lengths of each request from one of `parts`, (weight, lengths), with probability in
    proportion to the weight."""

    parts: tuple[tuple[float, Lengths], ...]

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        weights = np.array([weight for weight, _ in self.parts], float)
        if not len(weights) or not np.all(weights >= 0) or not weights.sum() > 0:
            raise WorkloadError(
                f"a mixture's weights must be 0 or more and not all 0, got {weights.tolist()}; give"
                " at least one part"
            )
        chosen = random.choice(len(weights), count, p=weights / weights.sum())
        prompts, outputs = np.ones(count, int), np.ones(count, int)
        for part, (_, lengths) in enumerate(self.parts):
            mine = chosen == part
            prompts[mine], outputs[mine] = lengths.draw(random, int(mine.sum()))
        return prompts, outputs


# ---- arrival processes


def poisson(
    rate: float, count: int, lengths: Lengths, seed: int = 0, tenant: str = ""
) -> list[Arrival]:
    return gamma(rate, count, lengths, 1.0, seed, tenant)


def gamma(
    rate: float, count: int, lengths: Lengths, variation: float, seed: int = 0, tenant: str = ""
) -> list[Arrival]:
    """Returns requests with gamma-distributed times between arrivals. `variation`: coefficient of
    variation of these times; 0 is even spacing, 1 a Poisson process."""
    _check_rate(rate)
    if count < 1:
        raise WorkloadError(f"a workload must have at least 1 request, got {count}")
    if not (math.isfinite(variation) and variation >= 0):
        raise WorkloadError(f"variation of gaps must be 0 or more, got {variation!r}")
    random = np.random.default_rng(seed)
    gaps = np.full(count, 1 / rate)
    if variation:
        shape = 1 / variation**2
        gaps = random.gamma(shape, 1 / (rate * shape), count)
    gaps[0] = 0.0
    times = np.cumsum(gaps)
    prompts, outputs = lengths.draw(random, count)
    rows = zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [Arrival(at, int(prompt), int(output), tenant=tenant) for at, prompt, output in rows]


# ---- transformations of any workload


def merge(*workloads: Sequence[Arrival]) -> list[Arrival]:
    return sorted(
        (item for workload in workloads for item in workload), key=lambda item: item.at_seconds
    )


def faster(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    _check_rate(speed)
    return [item.at(item.at_seconds / speed) for item in arrivals]


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    _check_rate(rate)
    return faster(arrivals, rate / mean_rate(arrivals))


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Returns the mean number of requests per second: (n - 1) / (last arrival - first arrival).
    Raises WorkloadError if the workload is empty or all requests arrive at the same time."""
    first, last = _some(arrivals)[0].at_seconds, arrivals[-1].at_seconds
    if last <= first:
        raise WorkloadError(
            f"the rate of {len(arrivals)} requests that all come at {first:g} s is not defined;"
            " give a longer workload"
        )
    return (len(arrivals) - 1) / (last - first)


def within_context(arrivals: Sequence[Arrival], context_tokens: int) -> list[Arrival]:
    """Returns the requests whose prompt and output together fit into `context_tokens` tokens.
    Raises WorkloadError if no request fits."""
    chosen = [
        item for item in arrivals if item.prompt_tokens + item.output_tokens <= context_tokens
    ]
    if not chosen:
        raise WorkloadError(
            f"none of {len(arrivals)} requests fits a context of {context_tokens} tokens; take a"
            " model of longer context"
        )
    return chosen


def spread_ticks(arrivals: Sequence[Arrival], tick_seconds: float, seed: int = 0) -> list[Arrival]:
    """Spreads the requests of each tick of a trace's clock uniformly at random over the tick.

    Meant for traces whose clock is coarse, such as Mooncake's conversation trace (3 s). Within a
    tick arrivals are then a Poisson process."""
    _check_rate(tick_seconds)
    random = np.random.default_rng(seed)
    ticks = np.floor(np.array([item.at_seconds for item in _some(arrivals)]) / tick_seconds + 1e-9)
    times = np.sort(ticks * tick_seconds + random.uniform(0, tick_seconds, len(arrivals)))
    return [item.at(float(at)) for item, at in zip(arrivals, times, strict=True)]


def _some(arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
    if not arrivals:
        raise WorkloadError("the workload is empty; give at least one request")
    return arrivals


def _check_rate(value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise WorkloadError(f"a rate, speed or tick must be a positive number, got {value!r}")
