"""Network addresses as text (host:port, the form that gRPC and JAX accept), listening sockets, and
the error for an address that cannot be bound."""

import errno
import socket

from jdisagg.errors import ConfigError


def host_port(host: str, port: int) -> str:
    """Joins host and port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
