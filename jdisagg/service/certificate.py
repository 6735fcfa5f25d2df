"""Checks that a process's TLS certificate contains the host at which other processes call it.

A worker with another host's certificate could still register with a router, because it is then the
TLS client. All calls to the worker would fail. The check is a TLS handshake in memory with the
configured files, so that names are compared as in a real connection."""

import ssl

from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError

MISMATCHES = (62, 64)  # OpenSSL's error codes for a wrong host name and a wrong IP address


def check_certificate(config: ServiceConfig) -> None:
    """Raises ConfigError if the certificate is not for the host at which other processes call a
    worker. Other faults of a certificate are detected when connections are made."""
    if not config.tls_certificate:
        return
    try:
        _shake_hands(config)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in MISMATCHES:
            flag = "--advertise_host" if config.advertise_host else "--host"
            raise ConfigError(
                f"service.tls_certificate {config.tls_certificate!r} is not for {flag}"
                f" {config.called_host}, at which other processes call this one:"
                f" {error.verify_message}; use a certificate with this address or name as a subject"
                " alternative name"
            ) from None
    except ssl.SSLError:
        return


def _shake_hands(config: ServiceConfig) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(config.tls_certificate, config.tls_key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(config.tls_client_ca or config.tls_certificate)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(down, up, server_hostname=config.called_host),
        server.wrap_bio(up, down, server_side=True),
    )
    done: set[ssl.SSLObject] = set()
    while len(done) < len(ends):
        for end in ends:
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                continue
