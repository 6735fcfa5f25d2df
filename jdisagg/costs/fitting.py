"""Fits the constants of an accelerator (`hardware.Efficiency`) to measured steps.

Uses Gauss-Newton with Levenberg's damping on relative errors.
If the measured steps do not determine a constant, a weak prior keeps it near the accelerator's
published value: fractions within about 30 %, times within an order of magnitude. `launch_seconds`
is a lower bound on a step's time and has no gradient for longer steps. Therefore one fit starts at
the fastest step's time and another below it, and the better of the two is used."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from jdisagg.costs.cost_model import Cost, CostModel
from jdisagg.costs.hardware import Accelerator
from jdisagg.costs.kernels import OURS, Kernels
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout

# Relative residual at which the loss turns from square to linear. One sigma of the prior weighs as
# much as such a residual.
NOISE = 0.05
SIGMA_FRACTION, SIGMA_LINK, SIGMA_SECONDS = 0.3, 0.7, 2.3

# op_seconds and attention_seconds are not fitted: the published values come from isolated kernels,
# and whole steps cannot separate them from collectives.
WHOLE_STEP_CONSTANTS = (
    "gemm_compute", "gemm_memory", "launch_seconds", "prefill_launch_seconds", "sequence_seconds",
    "collective_seconds", "collective_bandwidth", "large_bandwidth",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured prefill or decode step of the dp rank with the most work.

    Attributes:
      rows: For a prefill, (new tokens, cached tokens) of each prompt. For a decode step, (number of
        sequences, context tokens of each).
    """

    geometry: CostGeometry
    layout: Layout
    phase: Literal["prefill", "decode"]
    rows: tuple[tuple[int, int], ...]
    seconds: float
    dtype: str = "bfloat16"
    kernels: Kernels = OURS

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(
                f"measured step of {self.geometry.name}: seconds must be positive, got"
                f" {self.seconds!r}; drop the row"
            )
        if not self.rows:
            raise ConfigError(f"measured step of {self.geometry.name} has no rows; drop it")


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions, as fractions."""

    median: float
    p90: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Errors":
        if not values:
            raise ConfigError("no measured steps to compare with; give some")
        absolute = np.abs(np.asarray(values))
        return cls(float(np.median(absolute)), float(np.percentile(absolute, 90)), len(values))


def predict(accelerator: Accelerator, observations: Sequence[Observation]) -> list[Cost]:
    models: dict[tuple[str, Layout, str, Kernels], CostModel] = {}
    costs = []
    for seen in observations:
        key = (seen.geometry.name, seen.layout, seen.dtype, seen.kernels)
        if key not in models:
            models[key] = CostModel(
                seen.geometry, accelerator, seen.layout, dtype=seen.dtype, kernels=seen.kernels
            )
        if seen.phase == "prefill":
            costs.append(models[key].prefill(seen.rows))
        else:
            count = sum(sequences for sequences, _ in seen.rows)
            held = float(sum(sequences * context for sequences, context in seen.rows))
            longest = max(context for _, context in seen.rows)
            costs.append(models[key].decode_of(count, held, longest))
    return costs


def relative_errors(accelerator: Accelerator, observations: Sequence[Observation]) -> list[float]:
    pairs = zip(predict(accelerator, observations), observations, strict=True)
    return [cost.seconds / seen.seconds - 1 for cost, seen in pairs]


def fit(
    accelerator: Accelerator,
    observations: Sequence[Observation],
    free: Sequence[str] = WHOLE_STEP_CONSTANTS,
) -> Accelerator:
    """Returns the accelerator with the fitted values.

    Args:
        accelerator: Accelerator with start values. They are also the centre of the prior, except
            for launch times.
        observations: Measured steps. They must include each phase, prefill or decode, that the
            fitted constants affect.
    """
    if not observations:
        raise ConfigError("nothing to fit: no measured steps; give some")
    fitted: list[tuple[float, Accelerator]] = []
    for share in (0.6, 1.0) if any(name.endswith("launch_seconds") for name in free) else (1.0,):
        floors = _floors(observations, share)
        start = [
            floors[name] if name in floors else float(getattr(accelerator.efficiency, name))
            for name in free
        ]
        fitted.append(
            _descend(accelerator, observations, tuple(free), np.log(np.maximum(start, 1e-9)))
        )
    return min(fitted, key=lambda pair: pair[0])[1]


def _floors(observations: Sequence[Observation], share: float) -> dict[str, float]:
    found = {}
    for phase, name in (("decode", "launch_seconds"), ("prefill", "prefill_launch_seconds")):
        times = [
            seen.seconds * seen.layout.pp / seen.geometry.layers
            for seen in observations
            if seen.phase == phase
        ]
        if times:
            found[name] = share * min(times)
    return found


def _descend(
    accelerator: Accelerator,
    observations: Sequence[Observation],
    free: tuple[str, ...],
    start: np.ndarray,
) -> tuple[float, Accelerator]:
    centre = np.log(np.maximum([getattr(accelerator.efficiency, name) for name in free], 1e-6))
    width = np.array([sigma(name) for name in free])
    # A floor has no published value; its prior is centred at its start.
    centre = np.where([name.endswith("launch_seconds") for name in free], start, centre)
    measured = np.log([seen.seconds for seen in observations])

    def with_constants(point: np.ndarray) -> Accelerator:
        constants = {
            name: bounded(name, float(value))
            for name, value in zip(free, np.exp(point), strict=True)
        }
        return replace(accelerator, efficiency=replace(accelerator.efficiency, **constants))

    def residuals(point: np.ndarray) -> np.ndarray:
        predicted = np.log([cost.seconds for cost in predict(with_constants(point), observations)])
        return np.concatenate([(predicted - measured) / NOISE, (point - centre) / width])

    loss, point = descend(residuals, start)
    return loss, with_constants(point)


def descend(
    residuals: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    rounds: int = 40,
    step: float = 1e-4,
) -> tuple[float, np.ndarray]:
    """Minimises the soft L1 loss of `residuals(point)`, and returns the loss and the point at the
    minimum.

    Derivatives are finite differences of width `step`, because the models have kinks. Stops when a
    round does not reduce the loss."""

    def loss(values: np.ndarray) -> float:
        return float(np.sum(2 * (np.sqrt(1 + values**2) - 1)))

    point, damping = start.copy(), 1e-2
    values = residuals(point)
    best = loss(values)
    for _ in range(rounds):
        slopes = np.stack(
            [(residuals(point + step * unit) - values) / step for unit in np.eye(len(point))],
            axis=1,
        )
        weights = 1 / np.sqrt(1 + values**2)  # weights of soft L1, constant in this round
        normal = slopes.T @ (weights[:, None] * slopes)
        gradient = slopes.T @ (weights * values)
        improved = False
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            candidate = point + np.clip(move, -0.5, 0.5)
            found = residuals(candidate)
            if loss(found) < best:
                improved = loss(found) < best * (1 - 1e-6)
                point, values, best, damping = candidate, found, loss(found), max(damping / 4, 1e-6)
                break
            damping *= 4
        if not improved:
            break
    return best, point


def bounded(name: str, value: float) -> float:
    return min(1.0, value) if name.endswith(("_compute", "_memory")) else value


def sigma(name: str) -> float:
    if name.endswith("_seconds"):
        return SIGMA_SECONDS
    return SIGMA_LINK if name.endswith("_bandwidth") else SIGMA_FRACTION
