"""The internal wire format: msgpack of `msgspec` structs.

Both ends of a connection use the same protocol version, so fields are encoded by position without a
schema. Every call and stream carries its version in its metadata, and a server checks it before it
decodes a byte (`service/internal/rpc.py`). Bytes that do not decode to the expected class raise
`InvalidRequestError` with the place and the value found. Decoding allocates no memory for lengths
that a message only claims."""

from typing import Generic, TypeVar

import msgspec

from jdisagg.errors import IncompatiblePeerError, InvalidRequestError, JdisaggError

# Incremented whenever a message changes its bytes or its meaning.
PROTOCOL = 28

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
    """Decodes messages of one class, or of one tagged union of classes."""

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


def check_protocol(theirs: str | bytes | None, service: str) -> None:
    """Raises IncompatiblePeerError, with both versions, if the caller of `service` uses another
    protocol version than this process."""
    if theirs != str(PROTOCOL):
        named = theirs if isinstance(theirs, str) else "none"
        raise IncompatiblePeerError(
            f"{service}: the caller's protocol is {named} and this process speaks {PROTOCOL}; run"
            " the same version of jdisagg on both"
        )
