"""Errors of jdisagg. Each message gives subject, rule, value and remedy.

`status` is the name of the gRPC status code that the server returns for an error. This module does
not import gRPC, so `status` is text that `service/` maps. `assert` is reserved for programming
errors in jdisagg."""

from typing import ClassVar


class JdisaggError(Exception):
    """Base of all errors. `retry_after_seconds` is a hint for the client if waiting helps."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class InvalidRequestError(JdisaggError):
    """A request field is outside its allowed range. The message names field, value and limit."""

    status = "INVALID_ARGUMENT"


class ConfigError(JdisaggError):
    """A configuration, flag or layout cannot work. The message names field, value and remedy."""

    status = "FAILED_PRECONDITION"


class LayoutError(ConfigError):
    """A layout does not fit the model's sizes or the devices. The message gives the numbers."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, truncated, of an unknown family, or has tensors that do not fit. The
    message lists names and shapes."""


class KVFileError(ConfigError):
    """A KV cache file is missing, truncated, corrupt or from another model. The message names the
    field and both values."""


class WorkloadError(ConfigError):
    """A trace or workload is unusable: a column is missing, a length is below 1, or there are no
    rows. The message names file, row, column and value."""


class UnauthenticatedError(JdisaggError):
    """A call lacks the bearer token that its service requires."""

    status = "UNAUTHENTICATED"


class OverloadedError(JdisaggError):
    """A bounded queue is full, or no pages are free. `retry_after_seconds` is set."""

    status = "RESOURCE_EXHAUSTED"


class QuotaExceededError(OverloadedError):
    """A tenant has used up its quota. Capacity may be free for other tenants, so more workers do
    not help."""


class DeadlineExceededError(JdisaggError):
    """The deadline of the request, or of one wait inside it, has passed."""

    status = "DEADLINE_EXCEEDED"


class CancelledError(JdisaggError):
    """The client disconnected or cancelled."""

    status = "CANCELLED"


class UnavailableError(JdisaggError):
    """A worker is gone, draining, or its program failed. Another attempt elsewhere may succeed."""

    status = "UNAVAILABLE"


class ShutDownError(UnavailableError):
    """The server shut down during the call. A restarted or another server can resume the stream."""


class BrokenModelError(JdisaggError):
    """The model computed non-finite logits for this sequence. A retry would give the same result,
    so the request ends. Other requests continue."""

    def __init__(
        self,
        message: str = "the model's logits for this request are not finite (NaN or infinity);"
        " check the checkpoint and its dtype",
        *,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)


class HandoffError(UnavailableError):
    """A KV hand-off between two workers failed or timed out. The request path retries it at the
    lowest cost."""


class IncompatiblePeerError(JdisaggError):
    """Two workers differ in protocol, model or KV geometry. The message names field and values."""

    status = "FAILED_PRECONDITION"


class NameTakenError(JdisaggError):
    """A worker registers under the name of a live worker. The message names both addresses."""

    status = "ALREADY_EXISTS"


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first error of a group, at any depth of nesting."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
