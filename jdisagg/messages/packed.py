"""The internal wire format: msgpack of `msgspec` structs.

Fields are encoded by position without a schema. Two protocol versions are compatible if the changes
between them only add fields with defaults at the ends of messages: an older process ignores the new
fields, and a newer one uses the defaults. Every call and stream carries the caller's version and
the oldest version that it is compatible with in its metadata. A server checks both before it
decodes a byte (`service/internal/rpc.py`). Bytes that do not decode to the expected class raise
`InvalidRequestError` with the position and the value found."""

from typing import Generic, TypeVar

import msgspec

from jdisagg.errors import IncompatiblePeerError, InvalidRequestError, JdisaggError

# Incremented whenever a message changes its bytes or its meaning.
PROTOCOL = 53
# The oldest compatible version. Must be set to PROTOCOL after a change that does more than add
# fields which an older process may ignore.
OLDEST = 52

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def pack(message: object) -> bytes:
    """Encodes a message.

    Raises:
        InvalidRequestError: A value is a number beyond 64 bits, or text that is not Unicode.
    """
    try:
        return _encoder.encode(message)
    except (OverflowError, ValueError) as error:
        raise InvalidRequestError(
            f"message {type(message).__name__}: a value cannot be sent: {error}"
        ) from error


class Unpacker(Generic[T]):
    """Decodes messages of one class, or of a union of tagged classes."""

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)  # pyright: ignore

    def __call__(self, data: bytes) -> T:
        """Decodes `data`.

        Raises:
            InvalidRequestError: The bytes are not a message of the expected class.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, JdisaggError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"message: {error}; both ends must run the same version of jdisagg"
            ) from error


def protocol_text() -> str:
    """Returns this process's protocol version and the oldest compatible version, in the form that
    calls carry in their metadata."""
    return f"{PROTOCOL}/{OLDEST}"


def compatible(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Returns whether two processes can work together. Each is given as (protocol version, oldest
    version that it is compatible with)."""
    return one[0] >= other[1] and other[0] >= one[1]


def check_protocol(theirs: str | bytes | None, service: str, *, same: bool = False) -> None:
    """Checks that the protocol version of a caller is compatible with this process.

    Args:
        theirs: The caller's `protocol_text`; None if the call carries none.
        same: Whether the versions must be equal.

    Raises:
        IncompatiblePeerError: The versions are not compatible. The message has both.
    """
    named = theirs if isinstance(theirs, str) else "none"
    version, _, oldest = named.partition("/")
    numbers = (version, oldest or version)
    if all(number.isascii() and number.isdigit() and len(number) < 10 for number in numbers):
        found = (int(numbers[0]), int(numbers[1]))
        if found[0] == PROTOCOL if same else compatible(found, (PROTOCOL, OLDEST)):
            return
    works = str(PROTOCOL) if same or OLDEST == PROTOCOL else f"{OLDEST} to {PROTOCOL}"
    raise IncompatiblePeerError(
        f"{service}: the caller's protocol is {named} and this process speaks {works}; run"
        " versions of jdisagg that work together (docs/operations.md)"
    )
