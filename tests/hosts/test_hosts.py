"""What a network between hosts does to a cluster, with real workers and KV over TCP. Every stream
is right or ends with a typed error, nothing hangs, everything is freed, and soon after the end of
a condition streams come right again."""

import time
from collections.abc import Callable, Iterator

import pytest

from tests.hosts.hosts import missing
from tests.hosts.lab import Lab, Load, lab

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing())]
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One router, one prefill and one decode worker."""
    with lab(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def under(cluster: Lab, fault: Callable[[Lab], None], seconds: float, clients: int = 4) -> Load:
    """Loads the cluster, lets the fault happen for so long, heals it and checks that all is
    whole."""
    load = Load(cluster.address("router-0"), clients, DEADLINE_SECONDS)
    began = time.monotonic()
    while not load.ended_right_since(began):
        assert time.monotonic() < began + DEADLINE_SECONDS, load.errors
        time.sleep(0.05)
    fault(cluster)
    time.sleep(seconds)
    cluster.hosts.heal()
    cluster.check_whole(load, time.monotonic())
    return load


@pytest.mark.ci
def test_a_reset_connection_of_the_kv_plane_is_replaced(pair: Lab) -> None:
    load = under(pair, lambda lab: lab.between("prefill-0", "decode-0", reset=0.02), 4.0)
    assert not load.errors


@pytest.mark.ci
def test_the_only_decode_worker_is_killed_and_its_streams_wait_for_it(pair: Lab) -> None:
    def restart(cluster: Lab) -> None:
        cluster.kill("decode-0")
        cluster.start("decode-0")

    load = under(pair, restart, 0.0)
    assert not load.errors
