"""Who is let in: TLS, mutual TLS and bearer tokens, on every service of ours, for clients and between processes."""

import asyncio
import contextlib
import pathlib
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.client import AsyncClient, Client, Credentials
from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ports import GenerateCall
from jdisagg.dispatch.roster import Roster, WorkerPorts
from jdisagg.errors import ConfigError, UnauthenticatedError, UnavailableError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.service.kv_link import GrpcKvLink
from jdisagg.service.registry import registry_service
from jdisagg.service.remote_ports import RemoteWorker
from jdisagg.service.server import GenerationServer, GrpcServer, check_address, cluster_credentials, read_tokens
from jdisagg.service.worker_service import decode_service, peer_service, prefill_service
from tests.service.doors import STATUS, FakePath, make_frontend
from tests.service.test_wire_ports import HELLO, PREFILL, Worker

OPENSSL = shutil.which("openssl")


@dataclass(frozen=True)
class Papers:
    """Files of one authority: its own certificate, and a key and certificate that it signed for this machine."""

    authority: str
    key: str
    certificate: str

    def credentials(self, own: bool = False, **fields: str) -> Credentials:
        pair = {"certificate": self.certificate, "key": self.key} if own else {}
        return Credentials.load(authority=self.authority, **pair, **fields)


def papers_in(folder: pathlib.Path) -> Papers:
    assert OPENSSL is not None
    new = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    root = ["-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.pem", "-subj", "/CN=test authority"]
    leaf = ["-keyout", f"{folder}/own.key", "-out", f"{folder}/own.pem", "-subj", "/CN=test process"]
    signed = ["-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*new, *root], check=True, capture_output=True)
    subprocess.run([*new, *leaf, *signed, "-addext", "basicConstraints=critical,CA:FALSE"], check=True, capture_output=True)
    return Papers(f"{folder}/ca.pem", f"{folder}/own.key", f"{folder}/own.pem")


@pytest.fixture(scope="module")
def papers(tmp_path_factory) -> Papers:
    if OPENSSL is None:
        pytest.skip("openssl makes the certificates, and is not installed")
    return papers_in(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory) -> Papers:
    if OPENSSL is None:
        pytest.skip("openssl makes the certificates, and is not installed")
    return papers_in(tmp_path_factory.mktemp("theirs"))


@contextlib.asynccontextmanager
async def door(config: ServiceConfig) -> AsyncIterator[str]:
    server = GenerationServer(make_frontend(FakePath()), replace(config, port=0, drain_seconds=0.0))
    try:
        yield f"127.0.0.1:{await server.start()}"
    finally:
        await server.drain()


@contextlib.asynccontextmanager
async def workers(config: ServiceConfig, tokens: tuple[str, ...] = ()) -> AsyncIterator[str]:
    worker = Worker()
    services = [service(worker, tokens) for service in (prefill_service, decode_service, peer_service)]
    services.append(registry_service(Roster(MonotonicClock(), lambda card: WorkerPorts()), tokens))
    services.append(GrpcKvLink(KvEnd("127.0.0.1:1", 1)).service(tokens))
    server = GrpcServer(services, replace(config, port=0, drain_seconds=0.0))
    try:
        yield f"127.0.0.1:{await server.start()}"
    finally:
        await server.drain()


async def ask(target: str, credentials: Credentials = Credentials(), token: str = "") -> str:  # noqa: B008
    async with AsyncClient(target, connect_seconds=1.5, credentials=credentials, token=token) as client:
        return (await client.complete("x", max_tokens=3)).text


async def test_a_port_with_tls_serves_those_who_trust_its_authority_and_no_others(papers: Papers, strangers: Papers) -> None:
    async with door(ServiceConfig(tls_certificate=papers.certificate, tls_key=papers.key)) as target:
        assert len(await ask(target, papers.credentials())) == 3
        for credentials, hint in (
            (Credentials(), "if it speaks TLS, say whom"),
            (strangers.credentials(), "that the given authority signed"),
        ):
            with pytest.raises(UnavailableError, match=rf"within 1.5 s; is it running \(python -m launch.serve\)\? .*{hint}"):
                await ask(target, credentials)

        def ask_blocking() -> str:
            with Client(target, credentials=papers.credentials()) as client:
                return client.complete("x", max_tokens=3).text

        assert len(await asyncio.to_thread(ask_blocking)) == 3


async def test_several_servers_over_tls_are_believed_by_the_name_that_they_share(papers: Papers) -> None:
    config = ServiceConfig(tls_certificate=papers.certificate, tls_key=papers.key)
    async with door(config) as one, door(config) as other:
        assert len(await ask(f"ipv4:{one},{other}", papers.credentials(server_name="127.0.0.1"))) == 3


async def test_launch_ask_believes_a_server_by_the_name_it_is_told(papers: Papers) -> None:
    async with door(ServiceConfig(tls_certificate=papers.certificate, tls_key=papers.key)) as target:
        by_name = target.replace("127.0.0.1", "localhost")  # which the certificate does not bear
        asked = ("-m", "launch.ask", f"--target={by_name}", f"--authority={papers.authority}", "--prompt=x", "--max_tokens=3")
        for flags, welcome in (((), False), (("--server_name=127.0.0.1",), True)):
            child = await asyncio.create_subprocess_exec(sys.executable, *asked, *flags, stdout=PIPE, stderr=PIPE)
            out, err = await child.communicate()
            assert (child.returncode == 0, len(out) > 1) == (welcome, welcome), err.decode()
    with pytest.raises(ConfigError, match="a server's name, without tls"):
        Credentials.load(server_name="127.0.0.1")


async def test_a_port_with_mutual_tls_serves_those_its_authority_signed_for(papers: Papers, strangers: Papers) -> None:
    config = ServiceConfig(tls_certificate=papers.certificate, tls_key=papers.key, tls_client_ca=papers.authority)
    both = Credentials(True, papers.credentials().authority, *_pair(strangers))
    async with workers(config) as address:
        for credentials, welcome in ((papers.credentials(own=True), True), (papers.credentials(), False), (both, False)):
            remote = RemoteWorker(address, credentials)
            if welcome:
                assert await remote.decode.status() == STATUS
                assert await remote.peer.hello(HELLO) == HELLO
            else:
                with pytest.raises(UnavailableError):
                    await remote.decode.status()
            await remote.aclose()


async def test_a_client_without_a_known_token_is_refused_at_every_method_but_health(tmp_path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first\n\nsecond\n")
    async with door(ServiceConfig(token_file=str(file))) as target:
        for token in ("first", "second"):
            assert len(await ask(target, token=token)) == 3
        for token in ("", "third", "firs", "first2", "first\tsecond".replace("\t", " ")):
            with pytest.raises(UnauthenticatedError, match="bearer token"):
                await ask(target, token=token)
        async with AsyncClient(target) as client:
            for call in (client.status, client.model, lambda: client.tokenize("x"), lambda: client.detokenize((1,))):
                with pytest.raises(UnauthenticatedError):
                    await call()
        async with grpc.aio.insecure_channel(target) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_processes_show_each_other_the_clusters_token() -> None:
    async with workers(ServiceConfig(), ("between us",)) as address:
        ours, stranger = RemoteWorker(address, Credentials(token="between us")), RemoteWorker(address)
        assert await ours.decode.status() == STATUS
        calls = (
            lambda: stranger.prefill.prefill(PREFILL),
            stranger.decode.status,
            lambda: stranger.peer.hello(HELLO),
            lambda: anext(stranger.peer.offers(1, 1)),
            lambda: anext(stranger.decode.generate(GenerateCall(1, 1, 5.0))),
        )
        for call in calls:
            with pytest.raises(UnauthenticatedError):
                await call()
        await ours.aclose()
        await stranger.aclose()


async def test_processes_of_one_configuration_reach_each_other(papers: Papers, tmp_path) -> None:
    (tmp_path / "token").write_text("between us\n")
    config = ServiceConfig(
        tls_certificate=papers.certificate,
        tls_key=papers.key,
        tls_client_ca=papers.authority,
        cluster_token_file=str(tmp_path / "token"),
    )
    for change in ({}, {"tls_client_ca": ""}, {"tls_certificate": "", "tls_key": "", "tls_client_ca": ""}):
        one = replace(config, **change)
        async with workers(one, read_tokens(one.cluster_token_file)) as address:
            remote = RemoteWorker(address, cluster_credentials(one))
            assert await remote.decode.status() == STATUS
            await remote.aclose()


async def test_every_method_of_our_services_is_guarded() -> None:
    """Bytes that are no message, without a token: refused for the token, whatever the method."""
    from jdisagg.service import generation_pb2, kv_plane_pb2, registry_pb2, workers_pb2

    files = (generation_pb2, kv_plane_pb2, registry_pb2, workers_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values() if service.name != "GenerationService"]
    async with workers(ServiceConfig(), ("between us",)) as address, grpc.aio.insecure_channel(address) as channel:
        for service in services:
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    if method.server_streaming:
                        async for _ in channel.unary_stream(path)(b"\xff\xff"):
                            pass
                    else:
                        await channel.unary_unary(path)(b"\xff\xff")
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, path


def test_credentials_that_make_no_sense_are_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Credentials.load(authority=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="go together"):
        Credentials(tls=True, certificate=b"x")
    with pytest.raises(ConfigError, match="set tls"):
        Credentials(authority=b"x")
    for name in ("certificate", "key"):
        (tmp_path / name).write_text(f"-----BEGIN {'EC PRIVATE KEY' if name == 'key' else 'CERTIFICATE'}-----\n")
    files = {name: str(tmp_path / name) for name in ("certificate", "key")}
    Credentials.load(authority=files["certificate"], **files)
    for swapped, message in (
        ({"authority": files["key"]}, "credentials: authority '.*/key' has no CERTIFICATE block in PEM form, but EC PRIVATE KEY; give one"),
        ({"certificate": files["key"], "key": files["certificate"]}, "credentials: certificate '.*/key' has no CERTIFICATE"),
        ({"certificate": files["certificate"], "key": "/dev/null"}, "key '/dev/null' has no PRIVATE KEY block in PEM form, but no block"),
    ):
        with pytest.raises(ConfigError, match=message):
            Credentials.load(**swapped)
    with pytest.raises(ConfigError, match="credentials: authority has no CERTIFICATE block"):
        Credentials(tls=True, authority=b"x")
    for judge in (cluster_credentials, check_address):
        with pytest.raises(ConfigError, match="service.tls_certificate '.*/key' has no CERTIFICATE block"):
            judge(ServiceConfig(tls_certificate=files["key"], tls_key=files["key"]))
    with pytest.raises(ConfigError, match="printable"):
        Credentials(token="a\nb")
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no token"):
        read_tokens(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="go together"):
        ServiceConfig(tls_key="x")
    with pytest.raises(ConfigError, match="needs TLS"):
        ServiceConfig(tls_client_ca="x")
    assert "secret" not in repr(Credentials(token="secret"))


def _pair(papers: Papers) -> tuple[bytes, bytes]:
    return pathlib.Path(papers.certificate).read_bytes(), pathlib.Path(papers.key).read_bytes()
