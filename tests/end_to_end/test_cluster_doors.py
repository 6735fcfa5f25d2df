"""Admission to a cluster of real processes: clients and workers need the right credentials, and
workers must fit and have a unique name. The others get the reason, and a worker that all routers
refuse ends."""

import subprocess
from pathlib import Path

import pytest

from jdisagg.client import Client
from jdisagg.errors import JdisaggError, UnauthenticatedError
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from tests.end_to_end.process_clusters import (
    PROMPT,
    SMALL,
    RunningCluster,
    ask,
    cluster,
    launched,
    oracle,
)
from tests.service.certificates import OPENSSL, certificates_in

pytestmark = pytest.mark.ci


def worker(running: RunningCluster, *flags: str) -> "subprocess.CompletedProcess[str]":
    """One more worker for a running cluster, until it ends."""
    return launched("worker", "--role=mixed", f"--router={running.address}", *SMALL, *flags)


@pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates")
def test_a_cluster_with_tls_and_tokens_serves_who_shows_them(tmp_path: Path):
    ours = certificates_in(tmp_path)
    for name in ("client", "cluster"):
        (tmp_path / name).write_text(f"{name} token\n")
    tls = (
        f"--tls_certificate={ours.certificate}",
        f"--tls_key={ours.key}",
        f"--tls_client_ca={ours.authority}",
    )
    tokens = (f"--token_file={tmp_path}/client", f"--cluster_token_file={tmp_path}/cluster")
    text, _ = oracle(20)
    own = (
        f"--authority={ours.authority}",
        f"--certificate={ours.certificate}",
        f"--key={ours.key}",
    )
    with cluster(tmp_path, "--prefill_workers=1", "--decode_workers=1", *tls, *tokens) as running:
        asked = ("--max_tokens=20", "--ignore_eos", "--temperature=0", *own)
        answer = ask(running, *asked, f"--token_file={tmp_path}/client")
        assert (answer.returncode, answer.stdout) == (0, text + "\n"), answer.stderr
        with (
            Client(running.address, credentials=ours.credentials(own=True)) as client,
            pytest.raises(UnauthenticatedError),
        ):
            client.complete(PROMPT, max_tokens=2)
        with Client(running.address, connect_seconds=1.0) as client, pytest.raises(JdisaggError):
            client.complete(PROMPT, max_tokens=2)
        assert running.end() == 0, running.log.read_text()


@pytest.mark.slow
def test_a_worker_that_no_router_takes_ends_and_says_why(tmp_path: Path):
    with cluster(tmp_path, "--mixed_workers=1") as running:
        for flags, why in (
            (("--name=mixed-0",), "a worker with that name is alive at 127.0.0.1:"),
            (
                ("--name=mixed-1", "--dtype=bfloat16"),
                "its model's dtype is 'bfloat16', and this cluster serves 'float32'",
            ),
        ):
            ended = worker(running, *flags)
            assert ended.returncode == EXIT_CONFIG, ended.stderr
            last = ended.stderr.splitlines()[-1]
            assert last.startswith("error: ") and why in last, ended.stderr
        with Client(running.address) as client:
            assert [status.name for status in client.status()] == ["mixed-0"]
            assert (
                len(client.complete(PROMPT, max_tokens=5, ignore_eos=True).choices[0].token_ids)
                == 5
            )
        assert running.end() == 0, running.log.read_text()
