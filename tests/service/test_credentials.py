"""Who is let in: TLS, mutual TLS and bearer tokens, on every service of ours, for clients and
between processes."""

import asyncio
import contextlib
import os
import pathlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.client import AsyncClient, Client, Credentials
from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.membership import Membership, WorkerPorts
from jdisagg.errors import ConfigError, UnauthenticatedError, UnavailableError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvPlanePort
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillPort
from jdisagg.messages.registry import RegistryPort
from jdisagg.messages.spans import SpanSessionPort
from jdisagg.service import reread
from jdisagg.service.certificate import check_certificate
from jdisagg.service.internal import rpc
from jdisagg.service.internal.kv_link import GrpcKvLink
from jdisagg.service.internal.registry import registry_service
from jdisagg.service.internal.remote_ports import RemoteWorker
from jdisagg.service.internal.worker_service import decode_service, peer_service, prefill_service
from jdisagg.service.server import check_address, cluster_credentials, read_tokens
from jdisagg.settings.address import parse_host_port
from tests.service.certificates import OPENSSL, CertificateFiles, certificates_in
from tests.service.doors import STATUS
from tests.service.http_doors import http_door, with_tokens
from tests.service.listening import listening
from tests.service.port_worker import HELLO, Worker


@contextlib.asynccontextmanager
async def door(config: ServiceConfig) -> AsyncIterator[str]:
    async with http_door(service=config) as one:
        yield one.target


@contextlib.asynccontextmanager
async def workers(config: ServiceConfig, tokens: tuple[str, ...] = ()) -> AsyncIterator[str]:
    worker = Worker()
    services = [
        service(worker, tokens) for service in (prefill_service, decode_service, peer_service)
    ]
    services.append(
        registry_service(Membership(MonotonicClock(), lambda card: WorkerPorts()), tokens)
    )
    services.append(GrpcKvLink(KvEnd("127.0.0.1:1", 1)).service(tokens))
    async with listening(*services, config=config) as address:
        yield address


REFUSED_SECONDS = 0.4


async def ask(
    target: str,
    credentials: Credentials = Credentials(),  # noqa: B008
    token: str = "",
    seconds: float = 1.5,
) -> str:
    async with AsyncClient(
        target, connect_seconds=seconds, credentials=credentials, token=token
    ) as client:
        return (await client.complete("x", max_tokens=3)).text


async def test_a_port_with_tls_serves_those_who_trust_its_authority_and_no_others(
    ours: CertificateFiles, theirs: CertificateFiles
) -> None:
    async with door(ours.service()) as target:
        assert len(await ask(target, ours.credentials())) == 3
        for credentials, hint in (
            (Credentials(), "If it uses TLS, give its CA certificate"),
            (theirs.credentials(), "that the given CA signed"),
        ):
            with pytest.raises(
                UnavailableError,
                match=rf"within {REFUSED_SECONDS} s; is it running \(jdisagg serve\), or .*{hint}",
            ):
                await ask(target, credentials, seconds=REFUSED_SECONDS)

        def ask_blocking() -> str:
            with Client(target, credentials=ours.credentials()) as client:
                return client.complete("x", max_tokens=3).text

        assert len(await asyncio.to_thread(ask_blocking)) == 3


async def test_an_ipv6_address_in_any_form_is_the_one_that_a_certificate_has(
    tmp_path: pathlib.Path,
) -> None:
    if OPENSSL is None:
        pytest.skip("openssl makes the certificates, and is not installed")
    files = certificates_in(tmp_path, "IP:::1")
    config = files.service(host="::1")
    async with door(config) as target:
        port = parse_host_port(target, "target")[1]
        for written in ("[::1]", "[0:0::1]", "[0000:0:0:0:0:0:0:0001]"):
            assert len(await ask(f"{written}:{port}", files.credentials())) == 3
            with Client(f"{written}:{port}", credentials=files.credentials()) as client:
                done = await asyncio.to_thread(client.complete, "x", max_tokens=3)
            assert len(done.text) == 3
    with pytest.raises(ConfigError, match="a server name need TLS"):
        Credentials.load(server_name="127.0.0.1")


async def test_several_servers_over_tls_are_believed_by_the_name_that_they_share(
    ours: CertificateFiles,
) -> None:
    config = ours.service()
    async with door(config) as one, door(config) as other:
        assert len(await ask(f"ipv4:{one},{other}", ours.credentials(server_name="127.0.0.1"))) == 3


async def test_a_port_with_mutual_tls_serves_those_its_authority_signed_for(
    ours: CertificateFiles, theirs: CertificateFiles
) -> None:
    config = ours.service(tls_client_ca=ours.authority)
    both = Credentials(True, ours.credentials().authority, *_pair(theirs))
    async with workers(config) as address:
        for credentials, welcome in (
            (ours.credentials(own=True), True),
            (ours.credentials(), False),
            (both, False),
        ):
            remote = RemoteWorker(address, credentials)
            if welcome:
                assert await remote.decode.status() == STATUS
                assert await remote.peer.hello(HELLO) == HELLO
            else:
                with pytest.raises(UnavailableError):
                    await remote.decode.status()
            await remote.aclose()


async def test_a_client_without_a_known_token_is_refused_at_every_method_but_health(
    tmp_path,
) -> None:
    async with door(with_tokens(tmp_path, "first", "", "second")) as target:
        for token in ("first", "second"):
            assert len(await ask(target, token=token)) == 3
        for token in ("", "third", "firs", "first2", "first\tsecond".replace("\t", " ")):
            with pytest.raises(UnauthenticatedError, match="bearer token"):
                await ask(target, token=token)
        async with AsyncClient(target) as client:
            for call in (
                client.status,
                client.model,
                lambda: client.tokenize("x"),
                lambda: client.detokenize((1,)),
            ):
                with pytest.raises(UnauthenticatedError):
                    await call()
        async with grpc.aio.insecure_channel(target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_processes_of_one_configuration_reach_each_other(
    ours: CertificateFiles, tmp_path
) -> None:
    (tmp_path / "token").write_text("between us\n")
    token = str(tmp_path / "token")
    config = ours.service(tls_client_ca=ours.authority, cluster_token_file=token)
    for change in (
        {},
        {"tls_client_ca": ""},
        {"tls_certificate": "", "tls_key": "", "tls_client_ca": ""},
    ):
        one = replace(config, **change)
        async with workers(one, read_tokens(one.cluster_token_file)) as address:
            remote = RemoteWorker(address, cluster_credentials(one))
            assert await remote.decode.status() == STATUS
            await remote.aclose()


async def test_every_method_of_our_services_is_guarded() -> None:
    """Bytes that are no message, without a token: refused for the token, whatever the method."""
    ports = (PrefillPort, DecodePort, PeerPort, RegistryPort, KvPlanePort)
    sessions = [(DecodePort, method) for method in rpc.methods(SpanSessionPort)]
    methods = [(port, method) for port in ports for method in rpc.methods(port)] + sessions
    async with (
        workers(ServiceConfig(), ("between us",)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for port, method in methods:
            path = f"/{rpc.service_name(port)}/{method.name}"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                if method.streams:
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
    files = {name: str(tmp_path / name) for name in ("certificate", "key")}
    (tmp_path / "certificate").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "key").write_text("-----BEGIN EC PRIVATE KEY-----\n")
    Credentials.load(authority=files["certificate"], **files)
    swapped = {"certificate": files["key"], "key": files["certificate"]}
    for wrong, message in (
        ({"authority": files["key"]}, "authority '.*/key' has no CERTIFICATE .* EC PRIVATE KEY"),
        (swapped, "credentials: certificate '.*/key' has no CERTIFICATE"),
        (files | {"key": "/dev/null"}, "key '/dev/null' has no PRIVATE KEY block .*, but no block"),
    ):
        with pytest.raises(ConfigError, match=message):
            Credentials.load(**wrong)
    with pytest.raises(ConfigError, match="credentials: authority has no CERTIFICATE block"):
        Credentials(tls=True, authority=b"x")
    for judge in (cluster_credentials, check_address):
        with pytest.raises(
            ConfigError, match="service.tls_certificate '.*/key' has no CERTIFICATE block"
        ):
            judge(ServiceConfig(tls_certificate=files["key"], tls_key=files["key"]))
    with pytest.raises(ConfigError, match="printable"):
        Credentials(token="a\nb")
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(ConfigError, match="has no token"):
        read_tokens(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"tls_key='x' needs tls_certificate \(--tls_cert"):
        ServiceConfig(tls_key="x")
    with pytest.raises(ConfigError, match="tls_client_ca='x' needs tls_certificate"):
        ServiceConfig(tls_client_ca="x")
    assert "secret" not in repr(Credentials(token="secret"))


def _pair(ours: CertificateFiles) -> tuple[bytes, bytes]:
    return pathlib.Path(ours.certificate).read_bytes(), pathlib.Path(ours.key).read_bytes()


async def test_renewed_certificates_and_tokens_are_taken_up_without_a_restart(
    ours: CertificateFiles, theirs: CertificateFiles, tmp_path: pathlib.Path
) -> None:
    files = CertificateFiles("", f"{tmp_path}/key.pem", f"{tmp_path}/certificate.pem")
    tokens = tmp_path / "tokens"

    def install(source: CertificateFiles, token: str) -> None:
        shutil.copy(source.certificate, files.certificate)
        shutil.copy(source.key, files.key)
        tokens.write_text(token)

    install(ours, "first")
    config = files.service(token_file=str(tokens))
    async with door(config) as target:
        assert len(await ask(target, ours.credentials(), "first")) == 3
        install(theirs, "second")
        renewed = ""
        async with asyncio.timeout(30):
            while not renewed:
                with contextlib.suppress(UnavailableError, UnauthenticatedError):
                    renewed = await ask(target, theirs.credentials(), "second")
        with pytest.raises(UnavailableError):
            await ask(target, ours.credentials(), "second", REFUSED_SECONDS)
        with pytest.raises(UnauthenticatedError):
            await ask(target, theirs.credentials(), "first")


def test_a_file_that_becomes_unreadable_leaves_what_was_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reread, "LOOK_SECONDS", 0.0)
    file = tmp_path / "tokens"
    file.write_text("first")
    latest = reread.Reread((str(file),), lambda: read_tokens(str(file)))
    file.write_text("  ")
    os.utime(file, ns=(1, 1))
    assert latest() == ("first",)
    assert "has no token" in caplog.text
    file.write_text("second")
    assert latest() == ("second",)


def test_a_file_that_is_replaced_is_read_again_whatever_time_it_has_and_may_be_missing_meanwhile(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reread, "LOOK_SECONDS", 0.0)
    file, new = tmp_path / "tokens", tmp_path / "new"
    for path, token in ((file, "first"), (new, "other")):
        path.write_text(token)
        os.utime(path, ns=(1, 1))
    latest = reread.Reread((str(file),), lambda: read_tokens(str(file)))
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: True)  # it was, a moment ago
    file.unlink()
    assert latest() == ("first",)
    new.rename(file)
    assert latest() == ("other",)


def test_a_client_sends_the_first_token_of_the_servers_file_without_its_limits(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "tokens"
    file.write_text("\n new secret tenant=a streams=2\nold\n")
    assert Credentials.load(token=str(file)).token == read_tokens(str(file))[0] == "new secret"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="tokens' has no token"):
        Credentials.load(token=str(file))


def test_a_certificate_that_is_not_for_the_workers_host_is_refused_at_the_start(
    ours: CertificateFiles,
) -> None:
    config = ours.service(tls_client_ca=ours.authority)
    check_certificate(config)
    for other in ("10.0.0.7", "node-7.internal"):
        with pytest.raises(ConfigError, match=f"not for --host {other}.*subject alternative"):
            check_certificate(replace(config, host=other))
        with pytest.raises(ConfigError, match=f"not for --advertise_host {other}"):
            check_certificate(replace(config, advertise_host=other))
    check_certificate(replace(config, host="0.0.0.0", advertise_host="127.0.0.1"))
    check_certificate(ServiceConfig(host="10.0.0.7"))
