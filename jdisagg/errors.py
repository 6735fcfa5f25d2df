"""Errors of jdisagg. Each message names what is wrong, the rule, the value found and a remedy.

`status` is the name of the gRPC status code that the server returns for an error. It is text, which
`service/` maps to the code, because this module does not import gRPC. `assert` is reserved for
programming errors in jdisagg."""

from typing import ClassVar


class JdisaggError(Exception):
    """Base of all errors. `retry_after_seconds` is the time after which a retry may succeed, or
    None if waiting does not help."""

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
    """A layout does not fit the model's sizes or the number of devices. The message gives both
    numbers."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, truncated, of an unknown family, or has tensors that do not fit. The
    message lists names and shapes."""


class KVFileError(ConfigError):
    """A KV cache file is missing, truncated, corrupt or from another model. The message names the
    field, the value found and the value expected."""


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
    """A tenant has used up its quota. The workers may have free capacity, so adding workers does
    not help."""


class DeadlineExceededError(JdisaggError):
    """The deadline of the request, or of a wait within the request, has passed."""

    status = "DEADLINE_EXCEEDED"


class CancelledError(JdisaggError):
    """The client disconnected or cancelled the request."""

    status = "CANCELLED"


class UnavailableError(JdisaggError):
    """A worker is unreachable or draining, or one of its programs failed. An attempt on another
    worker may succeed."""

    status = "UNAVAILABLE"


class NoWorkerError(UnavailableError):
    """No worker of a needed role accepts requests. `role`: "prefill" or "decode"; "" if the error
    was received from another process. `retry_after_seconds`: expected time until such a worker
    returns."""

    role: str = ""


class ShutDownError(UnavailableError):
    """The server shut down before or during the call. The restarted server, or another one, can
    serve the request or resume its stream."""


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
    """A KV hand-off between two workers failed or timed out. The request path retries it, and
    recomputes no more KV than necessary."""


class IncompatiblePeerError(JdisaggError):
    """Two workers cannot exchange KV, because they differ in protocol version, model or KV
    geometry. The message names the field and both values."""

    status = "FAILED_PRECONDITION"


class NameTakenError(JdisaggError):
    """A worker tried to register under the name of another live worker. The message names the
    addresses of both."""

    status = "ALREADY_EXISTS"


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first single error in a group of errors. Nested groups are searched in order."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
