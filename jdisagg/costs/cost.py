"""Result of the cost model: seconds split by cause, so that a placement decision can state its
reason."""

from dataclasses import fields

from jdisagg.plain import plain


@plain
class Cost:
    """Estimated seconds of a step or a transfer, split by cause. The total is the sum.

    Attributes:
      compute, memory: Seconds of operations that are bound by arithmetic, or by memory bandwidth.
      communication: Seconds of tensor-parallel all-reduces and of sends between pipeline stages, or
        of a KV transfer.
      overhead: Seconds of launch latency, and of host work during which the device is idle.
    """

    compute: float = 0.0
    memory: float = 0.0
    communication: float = 0.0
    exchange: float = 0.0
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.memory + self.communication + self.exchange + self.overhead

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.compute + other.compute,
            self.memory + other.memory,
            self.communication + other.communication,
            self.exchange + other.exchange,
            self.overhead + other.overhead,
        )

    def __mul__(self, factor: float) -> "Cost":
        return Cost(*(getattr(self, spec.name) * factor for spec in fields(Cost)))

    def explain(self) -> str:
        terms = sorted(
            ((getattr(self, spec.name), spec.name) for spec in fields(Cost)), reverse=True
        )
        return f"{_milliseconds(self.seconds)}: " + ", ".join(
            f"{name} {_milliseconds(value)}" for value, name in terms if value
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
