"""What the commands to a mesh cost in seconds: the one question that a simulated executor asks. The
cost model answers it, or constants.

Rows and sequences are those of the fullest dp rank, as in `costs/cost_model.py`; ranks step
together. A span of decode steps is told by its first step and what each further one takes more
(contexts grow by a token a step): exact where the model is linear in the context, else the line
through the first and the last step. Pure."""

import math
from collections.abc import Sequence
from typing import Protocol

from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.plain import plain

MOST_REMEMBERED = 1 << 16  # prefills whose seconds are known: lengths come again


@plain
class Pace:
    """Seconds of a span's first step, and how much longer each step is than the one before it."""

    first: float
    growth: float = 0.0

    def seconds(self, steps: float) -> float:
        """Of the first `steps` steps."""
        return steps * (self.first + self.growth * (steps - 1) / 2)

    def steps_begun(self, seconds: float) -> int:
        """How many steps have begun (ended ones included) after so many seconds, the one that would
        begin just then not included."""
        if seconds <= 0:
            return 0
        # growth/2 n^2 + linear n = seconds, in the form that does not cancel where growth is small.
        linear = self.first - self.growth / 2
        steps = (
            2
            * seconds
            / (linear + math.sqrt(max(0.0, linear * linear + 2 * self.growth * seconds)))
        )
        return math.ceil(steps - 1e-9)


class StepCosts(Protocol):
    """Seconds of one instance's work. `rows`: (uncached tokens, tokens before them) of the fullest
    rank."""

    def prefill(self, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """(seconds until its tokens are there, seconds until the next batch may begin)."""
        ...

    def decode(
        self, sequences: int, context_tokens: float, steps: int, longest: float = 0.0
    ) -> Pace:
        """Of `steps` steps of so many sequences that hold `context_tokens` together at the first,
        the `longest` of their contexts so many (0: all are as long)."""
        ...

    def host(self, sequences: int) -> float:
        """The part of a decode step of so many sequences in which no device works on it."""
        ...

    def mixed(
        self,
        rows: Sequence[tuple[int, int]],
        sequences: int,
        context_tokens: float,
        elsewhere: int = 0,
    ) -> float:
        """Of one step that carries a prefill chunk and decoding sequences together. `elsewhere`:
        tokens that all other ranks have in it."""
        ...

    def insert(self, tokens: int) -> float:
        """Of writing the KV of so many tokens, as it came, into pages."""
        ...

    def wire_bytes(self, tokens: int) -> float:
        """What their KV takes on a link."""
        ...


class ModelCosts:
    """From a cost model. `codec`: how KV comes to this instance. A decode step is asked for one
    batch, from the first pipeline stage to the last; a prefill lets the next one in as soon as it
    has left the first stage. `insert_bytes_per_second`, of each device: where pages are not written
    from memory (None) but straight from the sender."""

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
        # Read once as it came and written once as it is kept, by all devices of a rank.
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
