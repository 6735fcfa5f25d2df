"""Estimates the seconds of a simulated executor's commands from a cost model.

Rows and sequences are those of the fullest dp rank, as in `costs/cost_model.py`; ranks step
together. A span of decode steps is described by its first step's seconds and a constant increase
per step, since contexts grow by a token a step. This is exact if the cost is linear in the context,
and otherwise the line through the first and the last step. Pure."""

import math
from collections.abc import Sequence
from typing import Protocol

from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.plain import plain

MOST_REMEMBERED = 1 << 16  # size of the cache of prefill costs; workloads repeat lengths


@plain
class Pace:
    """Seconds of a span's first step, and seconds by which each further step is longer."""

    first: float
    growth: float = 0.0

    def seconds(self, steps: float) -> float:
        """Returns the seconds of the first `steps` steps."""
        return steps * (self.first + self.growth * (steps - 1) / 2)

    def steps_begun(self, seconds: float) -> int:
        """Returns the number of steps that begin in less than `seconds`."""
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


class StepCosts(Protocol):
    """Seconds of one instance's commands. `rows`: (uncached tokens, cached tokens before them) of
    each prompt on the fullest rank."""

    def prefill(self, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Returns (seconds until the sampled tokens, seconds until the next batch may begin)."""
        ...

    def decode(
        self, sequences: int, context_tokens: float, steps: int, longest: float = 0.0
    ) -> Pace:
        """Returns the pace of `steps` steps. `context_tokens`: sum of contexts at the first step.
        `longest`: the longest context; 0 means that all are equally long."""
        ...

    def host(self, sequences: int) -> float:
        """Returns the seconds of a decode step in which no device computes."""
        ...

    def mixed(
        self,
        rows: Sequence[tuple[int, int]],
        sequences: int,
        context_tokens: float,
        elsewhere: int = 0,
    ) -> float:
        """Returns the seconds of one step with a prefill chunk and decoding sequences. `elsewhere`:
        tokens in the step on all other ranks."""
        ...

    def insert(self, tokens: int) -> float:
        """Returns the seconds to write the received KV of `tokens` tokens into pages."""
        ...

    def wire_bytes(self, tokens: int) -> float:
        """Returns the bytes of `tokens` tokens' KV on a link."""
        ...


class ModelCosts:
    """Step costs from a cost model.

    A decode step takes one batch through all pipeline stages. The next prefill may begin when the
    previous one leaves the first stage.

    Args:
      model: The cost model of the instance.
      codec: Codec of transferred KV.
      insert_bytes_per_second: Write speed of each device if received KV is written directly into
        pages; None if it is staged in device memory first.
    """

    def __init__(
        self, model: CostModel, codec: str = "none", insert_bytes_per_second: float | None = None
    ) -> None:
        self._model = model
        self._bytes_per_token = wire_bytes_per_token(model.geometry, model.kv_value_bytes, codec)
        geometry = model.geometry
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
        return tokens * self._insert_seconds_per_token

    def wire_bytes(self, tokens: int) -> float:
        return tokens * self._bytes_per_token
