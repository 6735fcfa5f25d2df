"""Addresses as text: host:port with names, IPv4 and IPv6, and hosts on which a server listens."""

import socket
from dataclasses import replace

import pytest

from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError
from jdisagg.settings.address import (
    canonical,
    host_port,
    is_local,
    listening_socket,
    parse_host_port,
)
from launch.settings import check_target

ELSEWHERE = "192.0.2.7"  # of documentation: no interface has it
HOSTS = ("localhost", "node-7.internal", "10.0.0.7", "::1", "fd00::a:1", "fe80::1%eth0")


def test_host_and_port_are_read_from_what_was_joined() -> None:
    for host in HOSTS:
        joined = host_port(host, 8700)
        assert parse_host_port(joined, "--router") == (host, 8700)
        check_target(joined)
        assert canonical(joined) == joined
        ServiceConfig(host=host, advertise_host=host, kv_host=host)


def test_only_ipv6_addresses_have_a_shorter_form() -> None:
    assert canonical("[fd78:0::2]:1") == "[fd78::2]:1"
    assert canonical("[FE80:0:0::1%eth0]:1") == "[fe80::1%eth0]:1"
    for other in ("dns:///a:1", "ipv4:10.0.0.1:1,10.0.0.2:1", "[a]:1"):
        assert canonical(other) == other


NO_ADDRESSES = (
    "localhost",
    "::1:8700",
    "fd00::1",
    "[::1]",
    "http://a:8700",
    "a:b",
    ":8700",
    "a:0",
    "a:65536",
)


def test_text_that_is_not_host_and_port_is_refused_by_its_flag_or_field() -> None:
    for text in (*NO_ADDRESSES, "a:1,b:2"):
        with pytest.raises(ConfigError, match=r"--router=.* must be host:port, .*\[fd00::1\]:8700"):
            parse_host_port(text, "--router")
    for host in ("localhost:8700", "[::1]", "10.0.0.7:1"):
        for field in ("host", "advertise_host", "kv_host"):
            with pytest.raises(ConfigError, match=f"service.{field}=.* without brackets and port"):
                replace(ServiceConfig(), **{field: host})


def test_a_server_of_every_ipv6_address_also_answers_ipv4_and_a_name_may_be_of_either() -> None:
    for listens, calls in (("::", "127.0.0.1"), ("::", "::1"), ("localhost", "localhost")):
        with listening_socket(listens, 0, "") as server:
            socket.create_connection((calls, server.getsockname()[1]), timeout=5).close()
    assert is_local("::1") and is_local("localhost") and not is_local(ELSEWHERE)
