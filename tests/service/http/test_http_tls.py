"""The HTTP door with the certificates of the gRPC door: TLS alone, clients' certificates where they
are asked for, files read again."""

import asyncio
import contextlib
import os
import pathlib
import shutil
import ssl
from dataclasses import replace

import pytest

from jdisagg.client import Administration
from jdisagg.errors import ConfigError, UnavailableError
from jdisagg.node.serving import where
from jdisagg.service import reread
from tests.service.certificates import CertificateFiles
from tests.service.http_doors import HttpDoor, http_door, parse

ASKED = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def trust(files: CertificateFiles, own: CertificateFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.authority)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


async def status(door: HttpDoor, context: ssl.SSLContext | None) -> int:
    """Of /health. Raises OSError (ssl.SSLError is one) where one side does not trust the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=context)
    try:
        writer.write(ASKED)
        if not (data := await reader.read()):
            raise ConnectionError("closed without an answer")
        return parse(data).status
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_the_door_speaks_tls_alone(ours: CertificateFiles, theirs: CertificateFiles) -> None:
    async with http_door(service=ours.service()) as door:
        assert where(door.server.listens).endswith(f" and https://127.0.0.1:{door.port}")
        assert await status(door, trust(ours)) == 200
        for other in (None, trust(theirs)):
            with pytest.raises(OSError):
                await status(door, other)
        assert await status(door, trust(ours)) == 200


async def test_clients_show_a_certificate_where_it_is_asked_for(
    ours: CertificateFiles, theirs: CertificateFiles
) -> None:
    async with http_door(service=ours.service(tls_client_ca=ours.authority)) as door:
        assert await status(door, trust(ours, own=ours)) == 200
        admin = Administration(
            door.url.replace("http", "https"), credentials=ours.credentials(True)
        )
        assert await asyncio.to_thread(admin.reset_cache) == 7
        given = ours.credentials(True)
        commented = replace(given, authority="# Főtanúsítvány\n".encode() + given.authority)
        admin = Administration(f"127.0.0.1:{door.port}", credentials=commented)
        assert await asyncio.to_thread(admin.reset_cache) == 7
        stranger = Administration(f"127.0.0.1:{door.port}", credentials=theirs.credentials(True))
        with pytest.raises(UnavailableError, match="--authority"):
            await asyncio.to_thread(stranger.reset_cache)
        for own in (None, theirs):
            with pytest.raises(OSError):
                await status(door, trust(ours, own=own))


async def test_a_renewed_certificate_is_shown_to_new_connections(
    ours: CertificateFiles,
    theirs: CertificateFiles,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reread, "LOOK_SECONDS", 0.0)
    files = CertificateFiles("", str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem"))

    def install(source: CertificateFiles) -> None:
        for kind in ("key", "certificate"):
            shutil.copy(getattr(source, kind), getattr(files, kind) + ".new")
            os.replace(getattr(files, kind) + ".new", getattr(files, kind))

    install(ours)
    async with http_door(service=files.service()) as door:
        assert await status(door, trust(ours)) == 200
        install(theirs)
        assert await status(door, trust(theirs)) == 200
        pathlib.Path(files.certificate).write_text("nonsense")
        assert await status(door, trust(theirs)) == 200, "what cannot be used changes nothing"


async def test_files_that_do_not_belong_together_are_refused(
    ours: CertificateFiles, theirs: CertificateFiles
) -> None:
    mixed = CertificateFiles("", theirs.key, ours.certificate)
    with pytest.raises(ConfigError, match="service.tls"):
        async with http_door(service=mixed.service()):
            pass


@pytest.mark.parametrize("target", ["localhost:99999", "localhost:x", "http://[::1", "a:0", ""])
def test_a_target_that_is_no_address_is_refused_at_once(target: str) -> None:
    with pytest.raises(ConfigError, match="target must be the URL or host:port of an HTTP API"):
        Administration(target)
