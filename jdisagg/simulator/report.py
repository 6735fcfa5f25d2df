"""Computes the figures of a run from its requests' outcomes: percentiles, goodput, cost. Simulated
and live runs use the same definitions.

TTFT: arrival to first token. TPOT: (finish - first token) / (output tokens - 1), undefined for one
token. TBT: every gap between two tokens at the client, with equal weight for all gaps of all
requests. Hand-off gap: first to second token. Percentiles interpolate linearly between order
statistics (numpy's "linear"). TBT percentiles come from histograms (`gaps`). A request attains its
SLO if it finished and met each limit. Attainment is the fraction of all requests that attained
their SLO; refused requests count as not attained. Goodput is attainment x the rate of arrivals.
Request rates are means from first to last arrival. Token rates and utilisation are means from first
arrival to last finish.

Plain data; all times are in seconds. This module must not depend on clusters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, get_args

import numpy as np

from jdisagg.errors import ConfigError, WorkloadError
from jdisagg.plain import plain
from jdisagg.simulator.gaps import Gaps, merged_percentile

End = Literal["finished", "refused", "cancelled", "deadline", "failed"]
ENDS: tuple[End, ...] = get_args(End)
PERCENTILES = (50, 90, 95, 99)


@plain
class RequestOutcome:
    """The result of one request that ended. Times are in seconds on the run's clock.

    Attributes:
      prefill, decode: Names of the workers that prefilled and decoded the request; empty if
        unknown.
      reason: The error message of a request that did not finish. For a finished request, why these
        workers were chosen; empty if unknown.
      cached_tokens: Number of prompt tokens of a finished request whose KV came from the prefix
        cache.
    """

    request_id: str
    arrival: float
    finish: float
    prompt_tokens: int
    output_tokens: int
    first_token: float | None = None
    gaps: Gaps | None = None
    end: End = "finished"
    tenant: str = ""
    prefill: str = ""
    decode: str = ""
    reason: str = ""
    # Not in the repr, because run digests are made of reprs and must equal those of older commits.
    queue_seconds: float = field(default=0.0, repr=False)
    cached_tokens: int = field(default=0, repr=False)

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.finish - self.first_token) / (self.output_tokens - 1)

    @property
    def latency(self) -> float:
        return self.finish - self.arrival


@dataclass(frozen=True, slots=True)
class SloLimits:
    """Latency limits of one request in seconds; None means no limit. A request with a single output
    token has no TPOT and no gaps, and meets the limits on both."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    longest_gap_seconds: float | None = None

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is not None and not value > 0:
                raise ConfigError(
                    f"SLO {spec.name} must be positive seconds, got {value!r}; leave it out for no"
                    " limit"
                )

    def attained(self, outcome: RequestOutcome) -> bool:
        ttft = outcome.ttft
        if outcome.end != "finished" or ttft is None:
            return False
        if self.ttft_seconds is not None and ttft > self.ttft_seconds:
            return False
        tpot, gaps, longest = outcome.tpot, outcome.gaps, self.longest_gap_seconds
        if self.tpot_seconds is not None and tpot is not None and tpot > self.tpot_seconds:
            return False
        return longest is None or gaps is None or gaps.longest <= longest


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Use of one worker's devices during a run. `busy_seconds`: seconds in which the devices were
    busy. `dollars_per_hour`: price of one device, or None if unknown."""

    worker: str
    role: str
    accelerators: int
    busy_seconds: float
    dollars_per_hour: float | None = None
    moved_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of `count` durations, in seconds. All are None if `count` is 0."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    longest: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        if not len(values):
            return cls(0, None, None, None, None, None, None)
        data = np.asarray(values, float)
        p50, p90, p95, p99 = np.percentile(data, PERCENTILES).tolist()
        return cls(len(data), float(data.mean()), p50, p90, p95, p99, float(data.max()))

    @classmethod
    def of_gaps(cls, gaps: Sequence[Gaps]) -> "Percentiles":
        count = sum(item.count for item in gaps)
        if not count:
            return cls.of(())
        mean = sum(item.total for item in gaps) / count
        p50, p90, p95, p99 = merged_percentile(gaps, PERCENTILES)
        return cls(count, mean, p50, p90, p95, p99, max(item.longest for item in gaps))


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run. `attainment` and `utilisation` are fractions. A figure is None if the
    SLO, the device usage or the price that it depends on was not given."""

    requests: int
    ends: Mapping[str, int]
    arrivals_per_second: float
    duration_seconds: float
    ttft: Percentiles
    tpot: Percentiles
    tbt: Percentiles
    slowest_tenth: Percentiles
    handoff_gap: Percentiles
    latency: Percentiles
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    attainment: float | None
    goodput_per_second: float | None
    goodput_per_accelerator: float | None
    tenants: Mapping[str, float]
    utilisation: Mapping[str, float]
    dollars_per_million_output_tokens: float | None
    dollars_per_million_tokens: float | None

    def as_fields(self) -> dict[str, object]:
        return asdict(self)


def summarise(
    outcomes: Sequence[RequestOutcome],
    slo: SloLimits | None = None,
    usage: Sequence[WorkerUsage] = (),
) -> Report:
    """Computes the figures of a run. Raises WorkloadError if `outcomes` is empty."""
    if not outcomes:
        raise WorkloadError("no requests to report on; the run must have at least one")
    arrivals = sorted(item.arrival for item in outcomes)
    last = max(item.finish for item in outcomes)
    duration = max(last - arrivals[0], 0.0)
    rate = (
        (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
        if arrivals[-1] > arrivals[0]
        else _per(len(arrivals), duration)
    )
    gaps = [item.gaps for item in outcomes if item.gaps is not None and item.gaps.count]
    finished = [item for item in outcomes if item.end == "finished"]
    outputs = sum(item.output_tokens for item in outcomes)
    prompts = sum(item.prompt_tokens for item in outcomes if item.first_token is not None)
    met = attainment(outcomes, slo) if slo else None
    accelerators = sum(item.accelerators for item in usage)
    dollars = _dollars(usage, duration)
    return Report(
        requests=len(outcomes),
        ends=dict(Counter(item.end for item in outcomes)),
        arrivals_per_second=rate,
        duration_seconds=duration,
        ttft=Percentiles.of([item.ttft for item in outcomes if item.ttft is not None]),
        tpot=Percentiles.of([item.tpot for item in finished if item.tpot is not None]),
        tbt=Percentiles.of_gaps(gaps),
        slowest_tenth=Percentiles.of([item.slowest_tenth for item in gaps]),
        handoff_gap=Percentiles.of([item.first for item in gaps]),
        latency=Percentiles.of([item.latency for item in finished]),
        output_tokens_per_second=_per(outputs, duration),
        prompt_tokens_per_second=_per(prompts, duration),
        attainment=met,
        goodput_per_second=None if met is None else met * rate,
        goodput_per_accelerator=(
            None if met is None or not accelerators else met * rate / accelerators
        ),
        tenants=_tenants(outcomes, slo) if slo else {},
        utilisation=_utilisation(usage, duration),
        dollars_per_million_output_tokens=(
            None if dollars is None or not outputs else 1e6 * dollars / outputs
        ),
        dollars_per_million_tokens=(
            None if dollars is None or not outputs else 1e6 * dollars / (outputs + prompts)
        ),
    )


def attainment(outcomes: Sequence[RequestOutcome], slo: SloLimits) -> float:
    return sum(map(slo.attained, outcomes)) / len(outcomes)


def _tenants(outcomes: Sequence[RequestOutcome], slo: SloLimits) -> dict[str, float]:
    mine: dict[str, list[bool]] = {}
    for item in outcomes:
        mine.setdefault(item.tenant, []).append(slo.attained(item))
    return {name: sum(met) / len(met) for name, met in sorted(mine.items())}


def utilisation(
    outcomes: Sequence[RequestOutcome], usage: Sequence[WorkerUsage]
) -> dict[str, float]:
    """Returns the fraction of the run in which the devices of each role were busy."""
    first = min([item.arrival for item in outcomes])
    return _utilisation(usage, max([item.finish for item in outcomes]) - first)


def _utilisation(usage: Sequence[WorkerUsage], duration: float) -> dict[str, float]:
    busy: dict[str, float] = {}
    there: dict[str, float] = {}
    for item in usage:
        busy[item.role] = busy.get(item.role, 0.0) + item.busy_seconds * item.accelerators
        there[item.role] = there.get(item.role, 0.0) + duration * item.accelerators
    return {role: _per(busy[role], there[role]) for role in sorted(busy)}


def _dollars(usage: Sequence[WorkerUsage], duration: float) -> float | None:
    prices = [item.dollars_per_hour for item in usage]
    if not usage or any(price is None for price in prices):
        return None
    return (
        sum(item.accelerators * (item.dollars_per_hour or 0.0) for item in usage) * duration / 3600
    )


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
