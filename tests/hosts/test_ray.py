"""`jdisagg cluster --on=ray` on a Ray cluster of two nodes, each on a host of its own (hosts.py).
Skipped where Ray is not installed:

    pip install ray
    python -m pytest -m slow tests/hosts/test_ray.py
"""

import contextlib
import importlib.util
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jdisagg.client import Client
from tests import time_scale
from tests.hosts.hosts import ROOT, Hosts, Process, hosts, missing
from tests.hosts.lab import PYTHON, START_SECONDS, WORKER_FLAGS, all_free, check_answers, wait_until

PORT, RAY_PORT = 19400, 6380
# On a busy machine `ray start` may wait for ever: its raylet ends if the agent takes over 15 s.
TRY_SECONDS = time_scale.seconds(60.0)
WORKERS = ["prefill-0", "decode-0"]
RAY = Path(sys.executable).parent / "ray"
ABSENT = "" if importlib.util.find_spec("ray") and RAY.exists() else "Ray is not installed"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing() or ABSENT), reason=missing() or ABSENT),
]


def node(made: Hosts, at: int, cpus: int) -> Process:
    """Starts a node of the Ray cluster. Host 1 has the head."""
    where = (
        ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        if at == 1
        else [f"--address={made.address(1)}:{RAY_PORT}"]
    )
    command = [
        *(str(RAY), "start", "--block", "--disable-usage-stats", *where),
        *(f"--node-ip-address={made.address(at)}", f"--num-cpus={cpus}"),
        f"--object-store-memory={100 << 20}",
    ]
    patience = f"RAY_raylet_start_wait_time_s={START_SECONDS:.0f}"
    until = time.monotonic() + START_SECONDS
    while True:
        started = made.run(at, ["env", f"PYTHONPATH={ROOT}", patience, *command])
        try:
            started.wait_for("Ray runtime started", TRY_SECONDS)
            return started
        except AssertionError:
            started.kill()
            if time.monotonic() > until:
                raise


class Driver:
    """`jdisagg cluster --on=ray`, the nodes beside the head's, and a client of the cluster."""

    client: Client

    def __init__(self, process: Process, nodes: list[Process]) -> None:
        self.process, self.nodes = process, nodes

    def __str__(self) -> str:
        return self.process.log.read_text()[-6000:]

    def where(self) -> dict[str, str]:
        """Returns the address at which each worker began to serve last."""
        text = self.process.log.read_text()
        return dict(re.findall(r"worker (\S+) \(.*serves on ([\d.]+):", text))


@contextlib.contextmanager
def cluster(made: Hosts, folder: Path, nodes: int, *flags: str) -> Iterator[Driver]:
    """Runs `jdisagg cluster --on=ray` beside the head of a Ray cluster of so many nodes."""
    head = node(made, 1, cpus=1)  # the router
    started = [node(made, at, cpus=2) for at in range(2, nodes + 1)]
    address = f"{made.address(1)}:{RAY_PORT}"

    def beside_head(*command: str) -> list[str]:
        """Ray finds a driver by its process id, so it shares the head's PID namespace."""
        inside = ["nsenter", f"--target={head.pid}", "--all", f"--wd={ROOT}"]
        return [*inside, "env", f"PYTHONPATH={ROOT}", f"RAY_ADDRESS={address}", *command]

    def all_joined() -> bool:
        code = f"import ray; ray.init('auto'); assert len(ray.nodes()) == {nodes}"
        return not subprocess.run(beside_head(PYTHON, "-c", code), capture_output=True).returncode

    wait_until(all_joined, f"{nodes} nodes", START_SECONDS)
    command = [PYTHON, "-u", "-m", "jdisagg", "cluster", "--on=ray", "--drain_seconds=10"]
    command += [f"--port={PORT}", "--http_port=-1", "--canary_seconds=0", *WORKER_FLAGS, *flags]
    log = folder / "driver.log"
    with log.open("wb") as file:
        outer = subprocess.Popen(beside_head(*command), stdout=file, stderr=file)
    driver = Driver(Process(outer, log), started)
    try:
        with Client(f"{made.address(1)}:{PORT}", connect_seconds=START_SECONDS) as client:
            driver.client = client
            wait_until(lambda: all_free(client, WORKERS), "workers register", START_SECONDS, driver)
            yield driver
        driver.process.signal(signal.SIGTERM)
        wait_until(lambda: driver.process.ended == 0, "the cluster ends", START_SECONDS, driver)
    finally:
        driver.process.kill()


def test_workers_are_actors_that_move_to_another_node_when_theirs_is_lost(tmp_path: Path) -> None:
    """The second node alone has room for the pair. When it is lost, a third takes its place."""
    layouts = ("--prefill=tp=1", "--decode=tp=1")
    with hosts(3, tmp_path) as made, cluster(made, tmp_path, 2, *layouts) as driver:
        assert driver.where() == {name: made.address(2) for name in WORKERS}
        check_answers(driver.client, 120.0)
        driver.nodes[0].kill()
        node(made, 3, cpus=2)

        moved = {name: made.address(3) for name in WORKERS}
        wait_until(lambda: driver.where() == moved, "both serve on the third", START_SECONDS)
        wait_until(lambda: all_free(driver.client, WORKERS), "pages are free", START_SECONDS)
        check_answers(driver.client, 120.0)
