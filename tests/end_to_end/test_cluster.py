"""A cluster of real processes on one host: what it streams, what becomes of it when a process is
killed, and how it ends.

What it says is held against a dense forward pass made here. Programs are compiled once, into a
folder that all share."""

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jdisagg.client import Client
from jdisagg.errors import UnavailableError
from jdisagg.request import FinishReason
from tests.end_to_end.clusters import collect
from tests.end_to_end.process_clusters import (
    END_SECONDS,
    PROMPT,
    RunningCluster,
    all_free,
    ask,
    cluster,
    healthy,
    oracle,
    wait_until,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


def check_a_life(running: RunningCluster, killed: str) -> None:
    """Streams, is seen, loses a worker and gets it back, streams again, and ends without a
    trace."""
    text, tokens = oracle(60)
    with Client(running.address) as client:
        answer = ask(running, "--max_tokens=60", "--ignore_eos", "--temperature=0")
        assert (answer.returncode, answer.stdout) == (0, text + "\n"), answer.stderr
        assert {status.name: status.layout for status in client.status()}.keys() == set(
            running.workers
        )
        wait_until(
            lambda: all_free(client, running.workers), "pages are not free once all is quiet"
        )

        wait_until(lambda: healthy(running), "no canary made the trip")
        worker = running.worker(killed)
        assert worker is not None
        worker.kill()
        wait_until(lambda: running.worker(killed) not in (None, worker), "it was not started again")
        said: list[list[int]] = []

        def usable_again() -> bool:
            with suppress(UnavailableError):
                said.append(
                    client.complete(PROMPT, max_tokens=60, ignore_eos=True, temperature=0)
                    .choices[0]
                    .token_ids
                )
            return bool(said)

        wait_until(usable_again, "the cluster is not usable again")
        assert said == [tokens]
        wait_until(
            lambda: all_free(client, running.workers), "pages are not free after a worker's death"
        )
        wait_until(lambda: healthy(running), "no canary made the trip after the restart")

        events = client.generate(PROMPT, max_tokens=200, ignore_eos=True, temperature=0)
        seen = [next(events)]
        pids = running.pids()
        running.process.send_signal(signal.SIGTERM)
        seen += events
        assert seen[-1].finish_reason is FinishReason.LENGTH, (
            "a running stream was cut short by SIGTERM"
        )
        assert len(collect(seen).tokens[0]) == 200
    assert running.process.wait(END_SECONDS) == 0, running.log.read_text()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.ci
def test_a_cluster_streams_survives_a_killed_decode_worker_and_ends_without_a_trace(folder: Path):
    with cluster(folder, "--prefill_workers=1", "--decode_workers=1") as running:
        assert running.workers == ["decode-0", "prefill-0"]
        check_a_life(running, "decode-0")


@pytest.mark.slow
def test_two_of_each_kind_survive_a_killed_prefill_worker(folder: Path):
    with cluster(folder, "--prefill_workers=2", "--decode_workers=2") as running:
        assert len(running.workers) == 4
        check_a_life(running, "prefill-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "prefill", "decode"),
    [("decode-0.0", "dp=1,tp=4", "dp=2,tp=2"), ("prefill-0.1", "pp=2,tp=2", "pp=2,dp=2")],
)
def test_instances_of_two_processes_each_survive_the_death_of_one_of_them(
    folder: Path, killed: str, prefill: str, decode: str
):
    workers = ("--prefill_workers=1", "--decode_workers=1", "--processes_per_instance=2")
    with cluster(folder, *workers, f"--prefill={prefill}", f"--decode={decode}") as running:
        assert len(running.pids()) == 6
        check_a_life(running, killed)


@pytest.mark.ci
def test_mixed_workers_alone_serve_too(folder: Path):
    text, _ = oracle(30)
    with cluster(folder, "--mixed_workers=1") as running:
        assert running.workers == ["mixed-0"]
        answer = ask(running, "--max_tokens=30", "--ignore_eos", "--temperature=0")
        assert (answer.returncode, answer.stdout) == (0, text + "\n"), answer.stderr
        assert running.end() == 0
