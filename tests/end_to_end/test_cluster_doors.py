"""Clients and workers of a cluster of real processes need the right credentials."""

from pathlib import Path

import pytest

from jdisagg.client import Client
from jdisagg.errors import JdisaggError, UnauthenticatedError
from tests.end_to_end.process_clusters import PROMPT, ask, cluster, oracle
from tests.service.certificates import OPENSSL, certificates_in

pytestmark = pytest.mark.ci


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
