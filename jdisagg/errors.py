"""The errors of jdisagg: each says subject, rule, value and remedy, and carries the gRPC status
that it becomes.

`status` is the name of a gRPC status code, so that this file need not import gRPC; `service/` maps
it. `assert` is kept for what our own code broke."""

from typing import ClassVar


class JdisaggError(Exception):
    """Base of all our errors. `retry_after_seconds` is a hint for the client, where waiting
    helps."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class InvalidRequestError(JdisaggError):
    """A field of a request is outside what is allowed; names the field, the value and the limit."""

    status = "INVALID_ARGUMENT"


class ConfigError(JdisaggError):
    """A configuration, flag or layout that cannot work; names the field, the value and the
    remedy."""

    status = "FAILED_PRECONDITION"


class LayoutError(ConfigError):
    """A layout that does not divide the model or the devices; names the numbers."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing, truncated, of an unknown family, or whose tensors do not fit;
    lists names and shapes."""


class KVFileError(ConfigError):
    """A file of a KV cache that is missing, truncated, spoiled, or of another model; names the
    field and both values."""


class WorkloadError(ConfigError):
    """A trace or workload that cannot be used: a column missing, a length below 1, no rows; names
    file, row, column and value."""


class UnauthenticatedError(JdisaggError):
    """A call without the bearer token that its service asks for."""

    status = "UNAUTHENTICATED"


class OverloadedError(JdisaggError):
    """No room now: a bounded queue or the pages are full. Carries `retry_after_seconds`."""

    status = "RESOURCE_EXHAUSTED"


class QuotaExceededError(OverloadedError):
    """A tenant has used its share up. There may be room for others, and more workers would not let
    it in."""


class DeadlineExceededError(JdisaggError):
    """The request's deadline, or the deadline of one wait inside it, has passed."""

    status = "DEADLINE_EXCEEDED"


class CancelledError(JdisaggError):
    """The client went away or cancelled."""

    status = "CANCELLED"


class UnavailableError(JdisaggError):
    """A worker is gone, draining, or its program failed; another attempt elsewhere may succeed."""

    status = "UNAVAILABLE"


class ShutDownError(UnavailableError):
    """The server shut down while the call ran; the one that comes after it, or another, can go on
    with it."""


class BrokenModelError(JdisaggError):
    """The model computed logits that are not finite for this sequence; another try would do the
    same. Ends that request alone."""

    def __init__(
        self,
        message: str = "the model's logits for this request are not finite (NaN or infinity);"
        " check the checkpoint and its dtype",
        *,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)


class HandoffError(UnavailableError):
    """A hand-off of KV between two workers failed or ran out of time; the path re-enters at the
    cheapest point."""


class IncompatiblePeerError(JdisaggError):
    """Two workers whose protocol, model or KV geometry differ; names the field and both values."""

    status = "FAILED_PRECONDITION"


class NameTakenError(JdisaggError):
    """A worker registers under the name of another one that lives; names both addresses."""

    status = "ALREADY_EXISTS"


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first of a group's errors, however deep the groups lie in each other."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
