"""A gRPC connection between two jdisagg processes: credentials, detection of crashes, errors.

The peer is the process at the other end. If the peer does not answer pings for 3 s, or closes the
connection, running calls raise UnavailableError. The connection recovers by itself, so that a
process restarted at the same address is usable within two seconds. Calls fail fast: no call waits
for a peer that is unreachable. A call may contain the `boot_id` of the intended peer, a random
number drawn at the start of a process. A restarted process at the same address refuses such a call.

Every call has a time limit, except a stream whose caller enforces a limit itself."""

import asyncio
import contextlib
import pathlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import grpc
import grpc.aio

from jdisagg.errors import ConfigError, JdisaggError, UnavailableError
from jdisagg.messages.packed import protocol_text
from jdisagg.messages.spans import WireStatus
from jdisagg.messages.trace_context import outgoing
from jdisagg.service.bearer import token_of
from jdisagg.service.grpc import wire
from jdisagg.service.grpc_life import keep_grpc_alive
from jdisagg.settings.address import canonical
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, CallTimeouts

MAX_MESSAGE_BYTES = 128 << 20
BOOT_KEY = "jdisagg-boot"
PROTOCOL_KEY = "jdisagg-protocol"
TOKEN_KEY = "authorization"
# gRPC treats a deadline beyond the range of its clock (292 years) as already passed.
LONGEST_SECONDS = 1e9

_BLOCKS = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----")

Channel = TypeVar("Channel")
Unary = Callable[..., Awaitable[bytes]]

PING_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # gRPC also pings to measure bandwidth, and sends no keepalive ping before the answer arrives.
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
RECONNECT_OPTIONS: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time limit of an attempt to connect, because a stopped process accepts connections
    # but does not answer.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # By default, channels to one address share their connection and therefore its back-off.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials with which a process connects to other processes. Certificates and keys are PEM
    texts.

    Attributes:
        tls: Whether to use TLS. If `authority` is empty, the system's root certificates apply.
        authority: CA certificate against which the certificate of the server is verified.
        server_name: Host name in the server's certificate, if it differs from the address.
    """

    tls: bool = False
    authority: bytes = b""
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ConfigError(
                "credentials: a certificate and its key go together; give both or none"
            )
        if not self.tls and (self.authority or self.certificate or self.server_name):
            raise ConfigError("credentials: certificates and a server name need TLS; set tls")
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("credentials: a token may only have printable ASCII characters")
        for name, kind in (
            ("authority", "CERTIFICATE"),
            ("certificate", "CERTIFICATE"),
            ("key", "PRIVATE KEY"),
        ):
            if getattr(self, name):
                _check_pem(f"credentials: {name}", getattr(self, name), kind)

    @classmethod
    def load(
        cls,
        *,
        authority: str = "",
        certificate: str = "",
        key: str = "",
        token: str = "",
        server_name: str = "",
    ) -> "Credentials":
        """Reads credentials from files. TLS is on if an authority or a certificate is given.
        `token`: token file of the server, whose first token is sent. Raises ConfigError for an
        invalid file."""
        return cls(
            tls=bool(authority or certificate),
            authority=read_pem("credentials: authority", authority),
            certificate=read_pem("credentials: certificate", certificate),
            key=read_pem("credentials: key", key, "PRIVATE KEY"),
            token=first_token(token),
            server_name=server_name,
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, f"Bearer {self.token}"),) if self.token else ()

    def options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.authority or None, self.key or None, self.certificate or None
        )


NO_CREDENTIALS = Credentials()


def open_channel(
    address: str, credentials: Credentials, options: Sequence[tuple[str, int | str]]
) -> grpc.aio.Channel:
    """Call it on the event loop that will use it. Raises ConfigError for an empty address."""
    keep_grpc_alive()
    makers = grpc.aio.secure_channel, grpc.aio.insecure_channel
    return channel_of(*makers, address, credentials, options)


def channel_of(
    secure: Callable[..., Channel],
    insecure: Callable[..., Channel],
    address: str,
    credentials: Credentials,
    options: Sequence[tuple[str, int | str]],
) -> Channel:
    """Opens a channel with TLS if the credentials require it. Raises ConfigError if the address is
    empty. gRPC would only report that the server is unreachable."""
    if not isinstance(address, str) or not address.strip():
        raise ConfigError(
            f"target must be an address, got {address!r}; give host:port, such as localhost:8700"
        )
    if credentials.tls:
        return secure(canonical(address), credentials.channel(), options)
    return insecure(canonical(address), options)


def read_pem(subject: str, path: str, kind: str = "CERTIFICATE") -> bytes:
    """Returns the contents of a PEM file, or b"" if `path` is empty. Raises ConfigError if the file
    is unreadable, or has no block of this kind. gRPC would only report that the server is
    unreachable."""
    data = read_secret(path)
    if path:
        _check_pem(f"{subject} {path!r}", data, kind)
    return data


def _check_pem(subject: str, data: bytes, kind: str) -> None:
    found = [name.decode() for name in _BLOCKS.findall(data)]
    if not any(name.endswith(kind) for name in found):
        raise ConfigError(
            f"{subject} has no {kind} block in PEM form, but"
            f" {', '.join(found[:4]) or 'no block at all'}; give another"
        )


def first_token(path: str) -> str:
    """Returns the first token of a server's token file, or "" if `path` is empty. Raises
    ConfigError if the file is unreadable or has no token."""
    lines = token_lines(path)
    return token_of(lines[0]) if lines else ""


def token_lines(path: str) -> tuple[str, ...]:
    """Returns the lines of a token file, or an empty tuple if `path` is empty. Raises ConfigError
    if the file is unreadable or has no line."""
    if not path:
        return ()
    text = read_secret(path).decode("utf-8", "replace")
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise ConfigError(f"token file {path!r} has no token; write one per line")
    return lines


def read_secret(path: str) -> bytes:
    """Raises ConfigError if the file is unreadable."""
    try:
        return pathlib.Path(path).expanduser().read_bytes() if path else b""
    except OSError as error:
        raise ConfigError(
            f"cannot read {path!r}: {error.strerror}; give the path of a readable PEM or token file"
        ) from None


def status_of(error: grpc.RpcError) -> WireStatus:
    # Every error that a call raises is a grpc.Call or AioRpcError, which the type stubs omit.
    call = cast(grpc.Call, error)
    metadata = tuple(
        (key, value) for key, value in call.trailing_metadata() or () if isinstance(value, str)
    )
    return WireStatus(call.code().name, call.details() or "", metadata)


def protocol_metadata() -> tuple[str, str]:
    """Sent with every call between jdisagg processes."""
    return PROTOCOL_KEY, protocol_text()


def _bounded(seconds: float | None) -> float | None:
    return None if seconds is None else min(seconds, LONGEST_SECONDS)


async def _quietly(call: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(JdisaggError):
        await call()


class Connection:
    """A connection to one process. Use it on one event loop. Several tasks may share it. `boot_id`:
    if set, a process with another boot id (after a restart) refuses the calls."""

    def __init__(
        self,
        address: str,
        credentials: Credentials = NO_CREDENTIALS,
        boot_id: int | None = None,
        timeouts: CallTimeouts = DEFAULT_TIMEOUTS.call,
    ) -> None:
        self.address = address
        self.boot_id = boot_id
        self.timeouts = timeouts
        self._credentials = credentials
        self._closed = False
        self._background: set[asyncio.Task[None]] = set()
        options: list[tuple[str, int | str]] = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            *PING_OPTIONS,
            *RECONNECT_OPTIONS,
            *credentials.options(),
        ]
        self.channel = open_channel(address, credentials, options)

    async def call(
        self, method: Unary, request: bytes, seconds: float | None, any_boot: bool = False
    ) -> bytes:
        """Makes a call and returns the reply as bytes.

        Args:
            any_boot: Whether a process that has restarted may accept the call.

        Raises:
            JdisaggError: The error that the called process raised.
            UnavailableError: The process is or becomes unreachable.
        """
        self._check_open()
        try:
            return await method(
                request, timeout=_bounded(seconds), metadata=self._metadata(any_boot)
            )
        except grpc.aio.AioRpcError as error:
            raise self._typed(error, seconds) from None
        except asyncio.CancelledError:
            self._check_closed_under_us()
            raise

    async def stream(
        self,
        method: Callable[..., object],
        request: bytes,
        seconds: float | None,
        any_boot: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """Closing the iterator cancels the call. The arguments and errors are those of `call`."""
        self._check_open()
        call = method(request, timeout=_bounded(seconds), metadata=self._metadata(any_boot))
        assert isinstance(call, grpc.aio.UnaryStreamCall)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._typed(error, seconds) from None
        except asyncio.CancelledError:
            self._check_closed_under_us()
            raise
        finally:
            call.cancel()

    def fire(self, call: Callable[[], Awaitable[None]]) -> None:
        """Starts a call in the background. A jdisagg error of the call is ignored."""
        if self._closed:
            return
        task = asyncio.ensure_future(_quietly(call))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def close(self) -> None:
        """Ends running calls with UnavailableError and closes the channel in the background.
        Idempotent."""
        if self._closed:
            return
        self._closed = True
        task = asyncio.ensure_future(self.channel.close())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def aclose(self) -> None:
        self.close()
        if self._background:
            await asyncio.wait(set(self._background), timeout=self.timeouts.slack_seconds)

    def _metadata(self, any_boot: bool) -> tuple[tuple[str, str], ...]:
        bound = self.boot_id is not None and not any_boot
        boot = ((BOOT_KEY, f"{self.boot_id:x}"),) if bound else ()
        return (*self._credentials.metadata(), protocol_metadata(), *boot, *outgoing())

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(
                f"the connection to {self.address} is closed: the process left or was given up"
            )

    def _check_closed_under_us(self) -> None:
        """Without this check, the caller's task would look as if it were cancelled, because closing
        a channel cancels its calls."""
        task = asyncio.current_task()
        if self._closed and (task is None or not task.cancelling()):
            raise UnavailableError(
                f"the connection to {self.address} was closed during the call"
            ) from None

    def _typed(self, error: grpc.aio.AioRpcError, seconds: float | None) -> JdisaggError:
        status = status_of(error)
        typed = wire.error_from_status(status)
        if wire.ERROR_KEY in dict(status.metadata):
            return typed
        if status.code in ("CANCELLED", "UNKNOWN", "INTERNAL", "UNIMPLEMENTED"):
            # No jdisagg server sent this status: the connection broke, or another program listens
            # at the address.
            return UnavailableError(f"{self.address}: {status.code}: {status.details}")
        if status.code == "DEADLINE_EXCEEDED":
            # The time limit of this call, not of a request: workers report request deadlines
            # as typed errors.
            return UnavailableError(
                f"{self.address} did not answer"
                f" {'in time' if seconds is None else f'within {seconds:g} s'}"
            )
        typed.message = f"{self.address}: {typed.message}"
        return typed
