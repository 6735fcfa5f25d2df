"""Estimates the seconds of a simulated executor's commands from a cost model.

All dp ranks step together, so the rank with the most work determines the duration of a step.
Arguments describe the prompts and sequences of this rank, as in `costs/cost_model.py`. As contexts
grow by one token per step, a span is described by the duration of the first step and a constant
increase per step. This is exact if the cost is linear in the context length, and otherwise
interpolates between the first and the last step."""

import math
from collections.abc import Sequence
from typing import Protocol

from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.plain import plain

MOST_REMEMBERED = 1 << 16  # size of the cache of prefill costs; workloads repeat lengths


@plain
class Pace:
    """The durations of the decode steps of a span. `first`: seconds of the first step. `growth`:
    seconds by which each step is longer than the previous step."""

    first: float
    growth: float = 0.0

    def seconds(self, steps: float) -> float:
        return steps * (self.first + self.growth * (steps - 1) / 2)

    def steps_begun(self, seconds: float) -> int:
        if seconds <= 0:
            return 0
        # Solves growth/2 n^2 + linear n = seconds in the form without cancellation for small
        # growth.
        linear = self.first - self.growth / 2
        steps = (
            2
            * seconds
            / (linear + math.sqrt(max(0.0, linear * linear + 2 * self.growth * seconds)))
        )
        return math.ceil(steps - 1e-9)

    def boundary(self, seconds: float, run_ahead: int) -> int:
        """Returns the number of steps of a span that is interrupted after `seconds`: the steps that
        have begun, and the `run_ahead` steps that are already issued."""
        return max(1, self.steps_begun(seconds)) + run_ahead


class StepCosts(Protocol):
    """Estimates the seconds of one instance's commands. `rows` describes the prompts on the dp rank
    with the most work, as (number of tokens to compute, number of cached tokens before them)."""

    def prefill(self, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Returns (seconds until tokens are sampled, seconds until the next batch may begin)."""
        ...

    def decode(
        self, sequences: int, context_tokens: float, steps: int, longest: float = 0.0
    ) -> Pace:
        """Returns the durations of `steps` decode steps. `context_tokens`: sum of the context
        lengths at the first step. `longest`: longest context; 0 if all are equally long."""
        ...

    def host(self, sequences: int) -> float:
        """Returns the part of a decode step's seconds in which the host works and the device is
        idle."""
        ...

    def mixed(
        self,
        rows: Sequence[tuple[int, int]],
        sequences: int,
        context_tokens: float,
        elsewhere: int = 0,
    ) -> float:
        """Returns the seconds of one step that runs a prefill chunk together with decoding
        sequences. `elsewhere`: number of tokens in the step on all other dp ranks."""
        ...

    def insert(self, tokens: int) -> float:
        """Returns the seconds to write the received KV of `tokens` tokens into pages."""
        ...

    def wire_bytes(self, tokens: int) -> float:
        """Returns the number of bytes that the KV of `tokens` tokens takes on a link."""
        ...


class ModelCosts:
    """Step costs from a cost model.

    With pipeline stages, a decode step takes one batch through all stages. A prefill may begin when
    the previous prefill leaves the first stage.

    Args:
      insert_bytes_per_second: Speed at which each device receives KV if KV is received directly
        into pages. None means that received KV is first stored elsewhere in device memory and then
        copied into pages.
    """

    def __init__(
        self, model: CostModel, codec: str = "none", insert_bytes_per_second: float | None = None
    ) -> None:
        self._model = model
        self._bytes_per_token = wire_bytes_per_token(model.geometry, model.kv_value_bytes, codec)
        geometry = model.geometry
        self._windowed_part, self._window = geometry.windowed_part, geometry.widest_window - 1
        kept = geometry.kv_values * model.kv_value_bytes
        spread = (
            model.layout.tp
            * model.stages
            * model.accelerator.memory_bytes_per_second
            * model.accelerator.efficiency.gemm_memory
        )
        # The devices of a rank together read the wire form once and write the pages once.
        self._insert_seconds_per_token = (self._bytes_per_token + kept) / spread
        if insert_bytes_per_second is not None:
            self._insert_seconds_per_token = self._bytes_per_token / (
                model.layout.tp * model.stages * insert_bytes_per_second
            )
        self._prefills: dict[tuple[tuple[int, int], ...], tuple[float, float]] = {}

    def prefill(self, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
        key = tuple(rows)
        known = self._prefills.get(key)
        if known is None:
            if len(self._prefills) >= MOST_REMEMBERED:
                self._prefills.clear()
            cost = self._model.prefill(key)
            known = self._prefills[key] = (cost.seconds, self._model.interval_seconds(cost))
        return known

    def decode(
        self, sequences: int, context_tokens: float, steps: int, longest: float = 0.0
    ) -> Pace:
        seconds = self._model.decode_seconds
        first = seconds(sequences, context_tokens, longest)
        if steps == 1:
            return Pace(first)
        grown = longest and longest + steps - 1
        last = seconds(sequences, context_tokens + sequences * (steps - 1), grown)
        return Pace(first, (last - first) / (steps - 1))

    def host(self, sequences: int) -> float:
        return self._model.host_seconds(sequences)

    def mixed(
        self,
        rows: Sequence[tuple[int, int]],
        sequences: int,
        context_tokens: float,
        elsewhere: int = 0,
    ) -> float:
        tokens = sum(new for new, _ in rows)
        pairs = sum(self._model.pairs(new, cached) for new, cached in rows)
        held = float(sum(new + cached for new, cached in rows))
        return self._model.mixed_of(
            tokens, pairs, held, len(rows), sequences, context_tokens, elsewhere
        ).seconds

    def insert(self, tokens: int) -> float:
        return self._sent(tokens) * self._insert_seconds_per_token

    def wire_bytes(self, tokens: int) -> float:
        return self._sent(tokens) * self._bytes_per_token

    def _sent(self, tokens: int) -> float:
        return tokens - self._windowed_part * max(0, tokens - self._window)
