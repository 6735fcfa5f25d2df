"""Addresses as text: host:port with names, IPv4 and IPv6, and hosts on which a server listens."""

import socket
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg import weights
from jdisagg.address import canonical, host_port, is_local, listening_socket, parse_host_port
from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError
from jdisagg.messages.weights import OFFER_PREFIX
from jdisagg.node.kv_endpoint import called_address, kv_interface
from jdisagg.node.weights_reader import RemoteWeights
from launch.settings import check_target

ELSEWHERE = "192.0.2.7"  # of documentation: no interface has it
HOSTS = ("localhost", "node-7.internal", "10.0.0.7", "::1", "fd00::a:1", "fe80::1%eth0")


@pytest.mark.parametrize("host", HOSTS)
def test_host_and_port_are_read_from_what_was_joined(host: str) -> None:
    assert parse_host_port(host_port(host, 8700), "--router") == (host, 8700)
    check_target(host_port(host, 8700))
    ServiceConfig(host=host, advertise_host=host, kv_host=host)


@pytest.mark.parametrize(
    ("written", "short"),
    [("[fd78:0::2]:1", "[fd78::2]:1"), ("[FE80:0:0::1%eth0]:1", "[fe80::1%eth0]:1")]
    + [(host_port(host, 8700), host_port(host, 8700)) for host in HOSTS]
    + [(other, other) for other in ("dns:///a:1", "ipv4:10.0.0.1:1,10.0.0.2:1", "[a]:1")],
)
def test_only_ipv6_addresses_have_a_shorter_form(written: str, short: str) -> None:
    assert canonical(written) == short


@pytest.mark.parametrize(
    "text",
    ["localhost", "::1:8700", "fd00::1", "[::1]", "http://a:8700", "a:b", ":8700", "a:1,b:2"],
)
def test_text_that_is_not_host_and_port_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--router=.* must be host:port, .*\[fd00::1\]:8700"):
        parse_host_port(text, "--router")


@pytest.mark.parametrize("host", ["localhost:8700", "[::1]", "10.0.0.7:1"])
@pytest.mark.parametrize("field", ["host", "advertise_host", "kv_host"])
def test_a_host_with_a_port_or_brackets_is_refused(host: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"service.{field}=.* without brackets and port"):
        replace(ServiceConfig(), **{field: host})


def test_a_server_of_every_ipv6_address_also_answers_ipv4_and_a_name_may_be_of_either() -> None:
    for listens, calls in (("::", "127.0.0.1"), ("::", "::1"), ("localhost", "localhost")):
        with listening_socket(listens, 0, "") as server:
            socket.create_connection((calls, server.getsockname()[1]), timeout=5).close()
    assert is_local("::1") and is_local("localhost") and not is_local(ELSEWHERE)


def test_a_worker_is_called_at_the_advertised_host_and_its_kv_takes_an_interface_it_has() -> None:
    every = ServiceConfig(host="0.0.0.0", port=8701)
    with pytest.raises(ConfigError, match=r"every interface.*add --advertise_host"):
        called_address(every)
    several = replace(every, advertise_host="127.0.0.1")
    assert (called_address(several), kv_interface(several)) == ("127.0.0.1:8701", "127.0.0.1")
    translated = replace(every, host="127.0.0.1", advertise_host=ELSEWHERE)
    assert (called_address(translated), kv_interface(translated)) == (
        f"{ELSEWHERE}:8701",
        "127.0.0.1",
    )
    assert kv_interface(replace(translated, kv_host="::1")) == "::1"
    with pytest.raises(ConfigError, match="means every interface"):
        replace(every, kv_host="0.0.0.0")


@pytest.mark.parametrize(
    "service",
    [
        ServiceConfig(host="::1", port=0),
        ServiceConfig(host="0.0.0.0", port=0, advertise_host="localhost"),
    ],
    ids=["ipv6", "a name"],
)
def test_an_offer_of_weights_is_read_at_the_address_that_its_name_has(
    service: ServiceConfig,
) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    with weights.offer({"matrix": jnp.asarray(matrix)}, 60.0, service) as offered:
        host, _ = parse_host_port(
            offered.name.removeprefix(OFFER_PREFIX).partition("/")[0], "offer"
        )
        assert host == service.called_host
        reader = RemoteWeights(offered.name, ServiceConfig())
        try:
            array = reader.read("matrix", (slice(0, 3), slice(0, 4)))
        finally:
            reader.close()
    assert np.array_equal(array, matrix)
