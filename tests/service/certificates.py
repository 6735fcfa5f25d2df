"""Certificate authorities of a test, and what they signed."""

import pathlib
import shutil
import subprocess
from dataclasses import dataclass

import pytest

from jdisagg.client import Credentials
from jdisagg.config import ServiceConfig

OPENSSL = shutil.which("openssl")


@dataclass(frozen=True)
class CertificateFiles:
    """Files of one authority: its own certificate, and a key and certificate that it signed for
    this machine."""

    authority: str
    key: str
    certificate: str

    def credentials(self, own: bool = False, **fields: str) -> Credentials:
        pair = {"certificate": self.certificate, "key": self.key} if own else {}
        return Credentials.load(authority=self.authority, **pair, **fields)

    def service(self, **more: str) -> ServiceConfig:
        return ServiceConfig(tls_certificate=self.certificate, tls_key=self.key, **more)


def certificates_in(folder: pathlib.Path, names: str = "IP:127.0.0.1") -> CertificateFiles:
    """Makes the files. `names` are the certificate's subject alternative names."""
    assert OPENSSL is not None
    new = (
        f"{OPENSSL} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        " -keyout {0}/{1}.key -out {0}/{1}.pem -subj"
    )
    signed = (
        f"-CA {folder}/ca.pem -CAkey {folder}/ca.key -addext subjectAltName={names}"
        " -addext basicConstraints=critical,CA:FALSE"
    )
    root = [*new.format(folder, "ca").split(), "/CN=test authority"]
    leaf = [*new.format(folder, "own").split(), "/CN=test process", *signed.split()]
    for command in (root, leaf):
        subprocess.run(command, check=True, capture_output=True)
    return CertificateFiles(f"{folder}/ca.pem", f"{folder}/own.key", f"{folder}/own.pem")


def authority(factory: pytest.TempPathFactory, name: str) -> CertificateFiles:
    if OPENSSL is None:
        pytest.skip("openssl makes the certificates, and is not installed")
    return certificates_in(factory.mktemp(name))
