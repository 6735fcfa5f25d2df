"""The name of a host, which gloo looks up and sends to the other processes."""

import socket

import pytest

from jdisagg.errors import ConfigError
from jdisagg.instance.host_name import check_own_name


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch):
    """Sets what this host's name means; () for a name without an address."""

    def mean(*addresses: str) -> None:
        def look_up(name: str, port: None) -> list[tuple[object, ...]]:
            assert name == "node-7"
            if not addresses:
                raise socket.gaierror(-2, "Name or service not known")
            return [(2, 1, 6, "", (address, 0)) for address in addresses]

        monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return mean


def test_a_name_without_an_address_is_refused_with_the_line_to_write(means) -> None:
    means()
    for host in ("10.0.0.7", "127.0.0.1"):
        with pytest.raises(ConfigError, match=rf'"{host} node-7" to /etc/hosts'):
            check_own_name(host)


def test_a_name_that_means_loopback_is_refused_where_other_hosts_must_reach_it(means) -> None:
    means("127.0.1.1", "10.0.0.7")
    with pytest.raises(ConfigError, match=r"means 127\.0\.1\.1.*\"10\.0\.0\.7 node-7\""):
        check_own_name("10.0.0.7")
    check_own_name("127.0.0.1")
    check_own_name("10.0.0.7", collectives=False)


def test_a_name_with_the_hosts_own_address_passes(means) -> None:
    means("10.0.0.7")
    check_own_name("10.0.0.7")
    means("fd00::7", "10.0.0.7")
    check_own_name("10.0.0.7")
