"""Network addresses as text (host:port, the form that gRPC and JAX accept), listening sockets, and
the error for an address that cannot be bound."""

import errno
import ipaddress
import socket

from jdisagg.errors import ConfigError


def host_port(host: str, port: int) -> str:
    """Joins host and port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric(host: str, purpose: str) -> str:
    """Looks up a host's name, and returns its first IPv4 address, or else its first IPv6 address.
    Returns an address unchanged.

    Args:
        host: Name or address of a host.
        purpose: What the address is for, which begins the error's message.

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
    """Opens a listening TCP socket. On failure raises ConfigError, whose message ends with
    `remedy`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise cannot_listen(host, port, error, remedy) from error


def cannot_listen(host: str, port: int, error: Exception, remedy: str) -> ConfigError:
    """Returns the error of a server that could not bind its address."""
    reason = str(error)
    if isinstance(error, OSError):
        if error.errno == errno.EADDRINUSE:
            return ConfigError(f"port {port} is in use; {remedy}")
        reason = error.strerror or reason
    return ConfigError(f"cannot listen on {host_port(host, port)}: {reason}; {remedy}")
