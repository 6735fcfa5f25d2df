"""Network addresses as text (host:port, the form that gRPC and JAX accept), and the error for an
address that cannot be bound."""

import errno

from jdisagg.errors import ConfigError


def host_port(host: str, port: int) -> str:
    """Joins host and port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cannot_listen(host: str, port: int, error: Exception, remedy: str) -> ConfigError:
    """Returns the error of a server that could not bind its address."""
    reason = str(error)
    if isinstance(error, OSError):
        in_use = error.errno == errno.EADDRINUSE
        reason = "the port is in use" if in_use else error.strerror or reason
    return ConfigError(f"cannot listen on {host_port(host, port)}: {reason}; {remedy}")
