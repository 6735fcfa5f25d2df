"""Network addresses as text (host:port, the form that gRPC and JAX accept), listening sockets, and
the error for an address that cannot be bound."""

import errno
import ipaddress
import re
import socket

from jdisagg.errors import ConfigError

_HOST_PORT = re.compile(r"(?:\[([^\[\]/]+)\]|([^\[\]:/,]+)):([0-9]{1,5})")

# Wildcard addresses (every interface of a host), each with the loopback address for calls from the
# same host.
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def host_port(host: str, port: int) -> str:
    """Returns host:port as text, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_host_port(text: str, subject: str) -> tuple[str, int]:
    """Splits host:port, the inverse of `host_port`.

    Args:
        text: Name or IPv4 address and port, or IPv6 address in brackets and port.
        subject: Name of the setting with the address, such as a flag. The error message begins with
            it.

    Raises:
        ConfigError: The text has another form.
    """
    found = _HOST_PORT.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise ConfigError(
            f"{subject}={text} must be host:port, such as localhost:8700 or [fd00::1]:8700, with a"
            " port of 1 to 65535 and without http://"
        )
    return found[1] or found[2], int(found[3])


def canonical(target: str) -> str:
    """Returns host:port with an IPv6 address in its shortest form, and other targets unchanged.

    gRPC compares a target's address as text with the addresses of a certificate in short form.
    Without this change, it would refuse a valid certificate for the target [fd00:0::1]:8700.
    """
    found = _HOST_PORT.fullmatch(target)
    if found is None or not found[1]:
        return target
    try:
        return host_port(str(ipaddress.IPv6Address(found[1])), int(found[3]))
    except ValueError:
        return target


def check_host(name: str, host: str, wildcard: bool) -> None:
    """Checks the form of a host in the configuration.

    Args:
        wildcard: Whether an address for every interface, such as 0.0.0.0, is allowed.

    Raises:
        ConfigError: The host has a port or brackets, or is a wildcard that is not allowed.
    """
    if not wildcard and host in EVERY_INTERFACE:
        raise ConfigError(
            f"{name}={host} means every interface, and other processes cannot call it; give one"
            " address or name of this host"
        )
    try:
        if ":" in host:
            ipaddress.IPv6Address(host)
    except ValueError:
        raise ConfigError(
            f"{name}={host} must be a name or an address without brackets and port; give the port"
            " with --port"
        ) from None


def is_local(host: str) -> bool:
    try:
        _listen(host, 0, 1).close()
    except OSError:
        return False
    return True


def numeric(host: str, purpose: str) -> str:
    """Resolves a host name to its first IPv4 address, or to its first IPv6 address if it has no
    IPv4 address. An IP address is returned unchanged.

    Raises:
        ConfigError: The name has no address, or one that means every interface.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{purpose}: host {host!r} has no address: {error}; give --host an address of this"
            " machine, or a name that has one"
        ) from error
    ordered = sorted(found, key=lambda entry: entry[0] is not socket.AF_INET)
    address = str(ordered[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ConfigError(
            f"{purpose}: host {host!r} means every interface; name one private address, because"
            " there is no authentication"
        )
    return address


def listening_socket(host: str, port: int, remedy: str, backlog: int = 1) -> socket.socket:
    """Opens a listening TCP socket.

    Raises:
        ConfigError: The address cannot be bound.
    """
    try:
        return _listen(host, port, backlog)
    except OSError as error:
        raise cannot_listen(host, port, error, remedy) from error


def is_free(host: str, port: int) -> bool:
    """Returns whether a server could listen on the port now.

    Raises:
        OSError: The host itself is unusable, for example because its name has no address.
    """
    try:
        _listen(host, port, 1).close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        return False
    return True


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    both = host == "::" and socket.has_dualstack_ipv6()
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] is not socket.AF_INET)
    return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=both)


def cannot_listen(host: str, port: int, error: Exception, remedy: str) -> ConfigError:
    reason = str(error)
    if isinstance(error, OSError):
        if error.errno == errno.EADDRINUSE:
            return ConfigError(f"port {port} is in use; {remedy}")
        reason = error.strerror or reason
    return ConfigError(f"cannot listen on {host_port(host, port)}: {reason}; {remedy}")
