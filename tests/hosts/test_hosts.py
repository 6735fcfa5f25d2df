"""What a network between hosts does to a cluster, with real workers and KV over TCP. Every stream
is right or ends with a typed error, nothing hangs, everything is freed, and soon after the end of
a condition streams come right again."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.hosts import missing
from tests.hosts.lab import DEADLINE_SECONDS, Lab, Load, lab
from tests.lanes import first_ci

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing())]
Fault = Callable[["Lab"], object]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One router, one prefill and one decode worker."""
    with lab(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def under(cluster: Lab, fault: Fault, seconds: float, clients: int = 4) -> Load:
    """Loads the cluster, lets the fault happen for so long, heals it and checks that all is
    whole."""
    load = Load(cluster.target, clients, DEADLINE_SECONDS)
    began = time.monotonic()
    while not load.ended_right_since(began):
        assert time.monotonic() < began + DEADLINE_SECONDS, load.errors
        time.sleep(0.05)
    fault(cluster)
    time.sleep(seconds)
    cluster.hosts.heal()
    cluster.check_whole(load, time.monotonic())
    return load


def cut(*names: str) -> Fault:
    """Cuts hosts off from all others."""
    return lambda lab: [lab.hosts.cut_off(lab.host(name)) for name in names]


def between(source: str, target: str, **conditions: float) -> Fault:
    return lambda lab: lab.between(source, target, **conditions)


def everywhere(**conditions: float) -> Fault:
    return lambda lab: lab.everywhere(**conditions)


def restarted(*names: str, after: float = 1.0) -> Fault:
    """Kills processes one after the other and starts each again."""

    def restart(lab: Lab) -> None:
        for name in names:
            lab.kill(name)
            time.sleep(after)
            lab.start(name)
        lab.wait_until_up(*names)

    return restart


def frozen(name: str, seconds: float) -> Fault:
    def freeze(lab: Lab) -> None:
        with lab.frozen(name):
            time.sleep(seconds)

    return freeze


def flaps(name: str, times: int) -> Fault:
    def flap(lab: Lab) -> None:
        for _ in range(times):
            lab.hosts.cut_off(lab.host(name))
            time.sleep(1.0)
            lab.hosts.heal()
            time.sleep(1.0)

    return flap


NARROW = {"rate": 1e6}
MESSY = {"jitter": 0.02, "loss": 0.02, "duplicate": 0.05, "reorder": 0.1}
# Fault and seconds until it is healed, by name; the first three are those of the ci lane.
CASES: dict[str, tuple[Fault, float]] = {
    "resets": (between("prefill-0", "decode-0", reset=0.02), 4.0),
    "narrow": (between("prefill-0", "decode-0", **NARROW), 6.0),
    "decode restarted": (restarted("decode-0"), 0.0),
    "nothing": (lambda lab: None, 5.0),
    "delay": (everywhere(delay=0.05), 10.0),
    "loss": (everywhere(loss=0.2), 15.0),
    "reordered": (everywhere(reorder=0.25), 10.0),
    "doubled": (everywhere(duplicate=0.2), 10.0),
    "messy": (everywhere(**MESSY), 12.0),
    "black hole": (everywhere(largest=1400), 12.0),
    "black hole of KV": (between("prefill-0", "decode-0", largest=1400), 12.0),
    "3 Mbit": (between("prefill-0", "decode-0", rate=3e6), 20.0),
    "1 Mbit": (between("prefill-0", "decode-0", **NARROW), 28.0),
    "resets of all": (everywhere(reset=0.005), 10.0),
    "prefill cut off": (cut("prefill-0"), 10.0),
    "decode cut off": (cut("decode-0"), 10.0),
    "router cut off": (
        lambda lab: [between("router-0", name, drop=True)(lab) for name in lab.workers],
        6.0,
    ),
    "prefill to decode lost": (between("prefill-0", "decode-0", drop=True), 10.0),
    "decode to prefill lost": (between("decode-0", "prefill-0", drop=True), 10.0),
    "prefill to router lost": (between("prefill-0", "router-0", drop=True), 10.0),
    "router to prefill lost": (between("router-0", "prefill-0", drop=True), 10.0),
    "router to decode lost": (between("router-0", "decode-0", drop=True), 10.0),
    "client to router lost": (between("client", "router-0", drop=True), 10.0),
    "router flaps": (flaps("router-0", 5), 0.0),
    "prefill frozen": (frozen("prefill-0", 30.0), 0.0),
    "decode frozen": (frozen("decode-0", 30.0), 0.0),
    "router frozen": (frozen("router-0", 5.0), 0.0),
    "prefill restarted": (restarted("prefill-0", after=2.0), 0.0),
    "both restarted": (restarted("prefill-0", "decode-0"), 0.0),
}


@pytest.mark.ci
@pytest.mark.parametrize(("name",), first_ci([(name,) for name in CASES], 3))
def test_a_pair_of_workers_is_whole_again_and_no_stream_ends_with_an_error(
    pair: Lab, name: str
) -> None:
    load = under(pair, *CASES[name])
    print(f"{name}: {load.summary()}")
    assert not load.errors


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two routers, two prefill and two decode workers."""
    folder = tmp_path_factory.mktemp("hosts")
    with lab(folder, routers=2, prefills=2, decodes=2) as made:
        yield made


def vanish(*names: str) -> Fault:
    """A host is gone, and its process is started again after a while."""

    def gone(lab: Lab) -> None:
        for name in names:
            lab.hosts.cut_off(lab.host(name))
            lab.kill(name)
        time.sleep(6.0)
        lab.hosts.heal()
        for name in names:
            lab.start(name)
        lab.wait_until_up(*names)

    return gone


def drained(*names: str) -> Fault:
    def drain(lab: Lab) -> None:
        for name in names:
            lab.drain(name)
            lab.start(name)
            lab.wait_until_up(name)

    return drain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        (restarted("router-0", after=3.0), 0.0),
        (vanish("router-0"), 0.0),
        (restarted("prefill-0", "decode-0"), 0.0),
        (vanish("prefill-1"), 0.0),
        (vanish("decode-1"), 0.0),
        (between("prefill-0", "decode-0", drop=True), 15.0),
        (drained("prefill-0", "prefill-1", "decode-0", "decode-1"), 0.0),
    ],
)
def test_two_of_each_serve_on(four: Lab, fault: Fault, seconds: float) -> None:
    load = under(four, fault, seconds)
    print(load.summary())
    assert not load.errors


@pytest.mark.ci
def test_processes_that_have_names_for_addresses_serve(tmp_path: Path) -> None:
    with lab(tmp_path, by_name=True) as cluster:
        load = Load(cluster.target, 2, DEADLINE_SECONDS)
        cluster.check_whole(load, time.monotonic())
    assert not load.errors
