"""Checks the name of this host before JAX starts. JAX would end the process without a clear reason
if the name has no usable address.

On Debian and Ubuntu the address is often 127.0.1.1, which no other host can reach."""

import ipaddress
import socket

from jdisagg.errors import ConfigError


def check_own_name(host: str, collectives: bool = True) -> None:
    """Checks that the name of this host resolves to a usable address.

    Args:
        collectives: Whether the processes use gloo's collectives, as on CPUs. If so, other hosts
            must be able to reach the address, unless `host` is a loopback address.

    Raises:
        ConfigError: The name has no address, or one that other hosts cannot reach.
    """
    name = socket.gethostname()
    remedy = f'write the line "{host} {name}" to /etc/hosts, before other lines with this name'
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None)]
    except OSError as error:
        raise ConfigError(
            f"instance: this host's name {name!r} has no address ({error.strerror}), and JAX looks"
            f" it up; {remedy}"
        ) from None
    if collectives and _is_loopback(found[0]) and not _is_loopback(host):
        raise ConfigError(
            f"instance: this host's name {name!r} means {found[0]}, which other hosts cannot reach,"
            f" and JAX sends it to the other processes; {remedy}"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
