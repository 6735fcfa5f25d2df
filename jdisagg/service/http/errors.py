"""Converts jdisagg errors to HTTP statuses, and to the JSON bodies of OpenAI's API or of
Anthropic's API (`ErrorForm`).

A body in OpenAI's form is `{"error": {"message", "type", "param", "code"}}`. `message` is the text
of the error. If the text begins with the name of a field of the request, `param` is this name.
`code` is the name of the error's type, or the code that OpenAI clients expect."""

import math
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from jdisagg.errors import InvalidRequestError, JdisaggError, OverloadedError, QuotaExceededError
from jdisagg.service.grpc.wire import MAX_DETAILS_BYTES

Header = tuple[bytes, bytes]

_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {"UNAUTHENTICATED": "invalid_api_key", "RESOURCE_EXHAUSTED": "rate_limit_exceeded"}
_FIELD = re.compile(r"\w+")
FULL = 529
_MESSAGE_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    FULL: "overloaded_error",
}


class HttpRefusal(InvalidRequestError):
    """An error with an HTTP status that has no jdisagg error type: 404, 405, 408, 413, 415 or
    431."""

    def __init__(self, message: str, http_status: int, code: str) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.code = code


def http_status(error: JdisaggError) -> int:
    if isinstance(error, HttpRefusal):
        return error.http_status
    return _STATUSES.get(error.status, 500)


def error_body(error: JdisaggError, fields: Collection[str] = ()) -> bytes:
    """Returns the JSON body for an error in OpenAI's form. `fields` are the names of the request's
    fields. If the message begins with one of them, the body's `param` is this name."""
    status = http_status(error)
    word = _FIELD.match(error.message)
    code = _CODES.get(error.status, type(error).__name__)
    return msgspec.json.encode(
        {
            "error": {
                "message": _shown(error),
                "type": _KINDS.get(
                    status, "invalid_request_error" if status < 500 else "server_error"
                ),
                "param": word[0] if word and word[0] in fields else None,
                "code": error.code if isinstance(error, HttpRefusal) else code,
            }
        }
    )


def _shown(error: JdisaggError) -> str:
    raw = error.message.encode("utf-8", "replace")
    shown = raw[:MAX_DETAILS_BYTES].decode("utf-8", "ignore")
    return shown if len(raw) <= MAX_DETAILS_BYTES else f"{shown} ..."


def _message_status(error: JdisaggError) -> int:
    """Returns the HTTP status in Anthropic's API, where 429 means that the client exceeds its
    quota, and 529 that the server is overloaded."""
    full = isinstance(error, OverloadedError) and not isinstance(error, QuotaExceededError)
    return FULL if full else http_status(error)


def _message_body(error: JdisaggError, fields: Collection[str] = ()) -> bytes:
    status = _message_status(error)
    kind = _MESSAGE_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode(
        {"type": "error", "error": {"type": kind, "message": _shown(error)}, "request_id": None}
    )


class ErrorForm(NamedTuple):
    """The form in which an API reports errors. `event`: SSE line that precedes the body if the
    error is an event of a stream, or empty."""

    status: Callable[[JdisaggError], int]
    body: Callable[[JdisaggError, Collection[str]], bytes]
    event: bytes = b""


OPENAI_ERRORS = ErrorForm(http_status, error_body)
MESSAGE_ERRORS = ErrorForm(_message_status, _message_body, b"event: error\n")


def error_headers(error: JdisaggError) -> list[Header]:
    """Returns the headers for the reply to a failed request: `Retry-After` if the error has a retry
    time, and `WWW-Authenticate` if the token was rejected."""
    seconds = error.retry_after_seconds
    headers: list[Header] = []
    if seconds is not None and math.isfinite(seconds):
        headers += [
            (b"retry-after", str(max(1, math.ceil(seconds))).encode()),
            (b"retry-after-ms", str(max(1, math.ceil(1000 * seconds))).encode()),
        ]
    if error.status == "UNAUTHENTICATED":
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
