"""Fleets of engines whose loop differs from ours. Pure data."""

from dataclasses import dataclass

from jdisagg.errors import ConfigError
from jdisagg.simulator.fleet import Fleet


@dataclass(frozen=True)
class StudyFleet(Fleet):
    """A fleet with what studies vary.

    Attributes:
      run_ahead: Decode commands issued before the first result is read.
      drains: Issue nothing while KV is fetched into pages (`executor.DrainingExecutor`).
      serial: One loop drives all pipeline stages (`executor.SerialExecutor`).
      late_reservation: Reserve decode pages after the prefill (`deferred_reservation`).
    """

    run_ahead: int = 1
    drains: bool = False
    serial: bool = False
    late_reservation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run_ahead < 0:
            raise ConfigError(f"run_ahead must not be negative, got {self.run_ahead}")
