"""Hosts that are called at another address than they listen on, hosts of IPv6, and TLS between
hosts."""

import re
import time
from pathlib import Path

import pytest

from jdisagg.supervisor.supervisor import EXIT_CONFIG
from tests.hosts.hosts import missing
from tests.hosts.lab import (
    DEADLINE_SECONDS,
    PYTHON,
    START_SECONDS,
    WORKER_FLAGS,
    Lab,
    lab,
    wait_until,
)
from tests.service.certificates import OPENSSL, certificates_in

pytestmark = [pytest.mark.ci, pytest.mark.skipif(bool(missing()), reason=missing())]


def kv_paths(cluster: Lab) -> str:
    """Returns the address and the path of the KV that the decode worker received."""
    with cluster.client() as client:
        (path,) = next(one for one in client.status() if one.name == "decode-0").kv_channels
    return path


def peers(cluster: Lab, name: str) -> set[str]:
    """Returns the hosts with which a process's host has TCP connections."""
    listed = cluster.hosts.in_host(cluster.host(name), "ss", "-Htn", "state", "established")
    return {host for _, host in re.findall(r"(\S+):\d+ +(\S+):\d+", listed.stdout)}


def test_an_advertised_address_and_a_second_network_for_kv_are_used_where_they_are_given(
    tmp_path: Path,
) -> None:
    """The workers listen on every interface, and have the network 10.79 for KV."""
    second: dict[str, str] = {}

    def prepare(made: Lab) -> None:
        for name in made.workers:
            called = made.hosts.address(made.host(name))
            second[name] = made.hosts.add_network(made.host(name))
            made.flags[name] = (
                "--host=0.0.0.0",
                f"--advertise_host={called}",
                f"--kv_host={second[name]}",
            )

    with lab(tmp_path, prepare=prepare) as cluster:
        load = cluster.load(2, DEADLINE_SECONDS)
        cluster.check_whole(load, time.monotonic())
        assert not load.errors
        assert kv_paths(cluster) == f"{cluster.address('prefill-0')} transfer engine"
        assert second["prefill-0"] in peers(cluster, "decode-0")
        assert second["decode-0"] in peers(cluster, "prefill-0")


@pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates")
def test_hosts_of_ipv6_serve_with_tls_and_tokens_and_refuse_a_certificate_of_another_host(
    tmp_path: Path,
) -> None:
    tokens = {name: tmp_path / name for name in ("cluster", "client")}
    for name, path in tokens.items():
        path.write_text(f"token of {name}s".replace(" ", "-"))

    def prepare(made: Lab) -> None:
        names = ",".join(f"IP:{made.hosts.address(made.host(name))}" for name in made.names)
        files = certificates_in(tmp_path, names)
        made.credentials = files.credentials(own=True, token=str(tokens["client"]))
        made.flags[""] = (
            f"--tls_certificate={files.certificate}",
            f"--tls_key={files.key}",
            f"--tls_client_ca={files.authority}",
            f"--cluster_token_file={tokens['cluster']}",
        )
        made.flags["router-0"] = (f"--token_file={tokens['client']}",)

    with lab(tmp_path, ipv6=True, prepare=prepare) as cluster:
        load = cluster.load(2, DEADLINE_SECONDS)
        cluster.check_whole(load, time.monotonic())
        assert not load.errors
        assert kv_paths(cluster) == f"{cluster.address('prefill-0')} transfer engine"

        other = cluster.hosts.address(9)
        process = cluster.hosts.run(
            cluster.host("decode-0"),
            [PYTHON, "-m", "launch.worker", "--role=decode", "--layout=tp=1", "--name=decode-1"]
            + [f"--router={cluster.address('router-0')}", f"--advertise_host={other}"]
            + [f"--host={cluster.hosts.address(cluster.host('decode-0'))}"]
            + [*WORKER_FLAGS, *cluster.flags[""]],
        )
        process.wait_for(f"is not for --advertise_host {other}", START_SECONDS)
        wait_until(lambda: process.ended == EXIT_CONFIG, "78", START_SECONDS)
