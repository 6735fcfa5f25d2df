"""Configuration of limits of requests. `jdisagg/config.py` re-exports it as one of its parts."""

import dataclasses
from dataclasses import dataclass, field

from jdisagg.errors import ConfigError
from jdisagg.timeouts import Timeouts


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of requests and of the time that each part of a request may take.

    Attributes:
        max_waiting_requests: Number of requests that may wait at the router for their first token.
        max_prompt_bytes: Largest prompt text accepted, in UTF-8 bytes.
        max_images: Number of images that a request may have.
        max_image_bytes: Largest image file accepted, in bytes.
        max_image_pixels: Largest image accepted, in pixels. Its header is read before it is
            decoded.
        default_deadline_seconds: Deadline of requests that set none, in seconds.
        handoff_lease_seconds: Time for which a worker keeps the state of a KV hand-off without a
            message from the other worker, in seconds. Each heartbeat of the receiver renews it.
        reservation_lease_seconds: Time for which a decode worker keeps reserved pages that their
            sequence does not yet use, in seconds.
        max_attempts: Number of attempts for each sequence of a request.
        pull_seconds: Time limit of each try of a KV transfer, in seconds.
        step_seconds: Time limit of each command on a mesh, in seconds. For a prefill chunk with
            images the limit grows by this time for each 2,048 patches.
        verify: Whether keyed checksums verify transferred KV after it is written into the
            receiver's pages.
        timeouts: All other waits, heartbeats and retries.

    Raises:
        ConfigError: A field is invalid. The message names the field and its value.
    """

    max_waiting_requests: int = 256
    max_prompt_bytes: int = 4 << 20
    max_images: int = 32
    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 40_000_000
    default_deadline_seconds: float = 600.0
    handoff_lease_seconds: float = 7.0
    reservation_lease_seconds: float = 5.0
    max_attempts: int = 8
    pull_seconds: float = 5.0
    step_seconds: float = 120.0
    verify: bool = True
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            if spec.name not in ("verify", "timeouts"):
                value = getattr(self, spec.name)
                if not value > 0:
                    raise ConfigError(f"limits.{spec.name} must be positive, got {value}")
        handoff = self.timeouts.handoff
        if self.handoff_lease_seconds < handoff.least_lease_seconds:
            raise ConfigError(
                f"limits.handoff_lease_seconds={self.handoff_lease_seconds} must be at least"
                f" {handoff.least_lease_seconds:g}, 1.5 times"
                f" limits.timeouts.handoff.heartbeat_seconds={handoff.heartbeat_seconds:g}: a"
                " late heartbeat must not end the lease"
            )
