"""Messages as bytes and back: msgpack of `msgspec` structs. This file is the whole internal wire
format.

Both ends of a connection speak the same protocol, so fields go by position and no schema stands
beside the classes. Every call and every stream names its protocol in its metadata, which a server
checks before it reads a byte of what was packed (`service/internal/rpc.py`). What does not decode
to the expected class is an `InvalidRequestError` that names the place and what was found there;
lengths that a message only claims to have cost no memory.
"""

from typing import Generic, TypeVar

import msgspec

from jdisagg.errors import IncompatiblePeerError, InvalidRequestError, JdisaggError

# Counts up whenever a message changes its bytes or its meaning.
PROTOCOL = 20

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def pack(message: object) -> bytes:
    """The bytes of a message.

    Raises:
        InvalidRequestError: a value in it cannot be sent: a number beyond 64 bits, a text that is
            not Unicode.
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
            InvalidRequestError: the bytes are not such a message.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, JdisaggError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"message: {error}; both ends must run the same version of jdisagg"
            ) from error


def check_protocol(theirs: str | bytes | None, service: str) -> None:
    """Raises IncompatiblePeerError, naming both versions, unless the caller of `service` speaks
    this protocol."""
    if theirs != str(PROTOCOL):
        named = theirs if isinstance(theirs, str) else "none"
        raise IncompatiblePeerError(
            f"{service}: the caller's protocol is {named} and this process speaks {PROTOCOL}; run"
            " the same version of jdisagg on both"
        )
