"""Bytes that an unrelated program may send to a port: nothing, zeros, another protocol, noise, an
unfinished connection, or a thousand connections.

Uses plain sockets, neither gRPC nor the transfer engine. Checks nothing itself; the attacked
process must keep serving others."""

import asyncio
import contextlib
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil

HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scanner\r\n\r\n"
CONNECT_SECONDS = 5.0
LINGER_SECONDS = 0.2


def tls_hello() -> bytes:
    """Returns the first message of a TLS client."""
    context, into, out = ssl.create_default_context(), ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(into, out, server_hostname="localhost").do_handshake()
    return out.read()


def noise(length: int = 4096, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


MESSAGES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "four zero bytes": lambda: bytes(4),
    "a page of zero bytes": lambda: bytes(4096),
    "an HTTP request": lambda: HTTP,
    "a TLS hello": tls_hello,
    "64 random bytes": lambda: noise(64),
    "random bytes": noise,
    "a huge length": lambda: b"\xff" * 8,
}
ENDS = ("close", "half open", "reset")


def listening_ports(processes: list[psutil.Process]) -> list[int]:
    """Returns all TCP ports on which these processes listen."""
    ports = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            ports |= {
                connection.laddr.port
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return sorted(ports)


async def send(port: int, message: bytes, end: str, host: str = "127.0.0.1") -> bool:
    """Sends a message over one connection. Returns False if the connection was refused (the process
    may have died of the previous message)."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await loop.sock_connect(connection, (host, port))
            await loop.sock_sendall(connection, message)
        if end == "half open":
            connection.shutdown(socket.SHUT_WR)
        await asyncio.sleep(LINGER_SECONDS)
        if end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return True
    except (OSError, TimeoutError):
        return False
    finally:
        connection.close()


@asynccontextmanager
async def idle_connections(port: int, count: int, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Keeps `count` connections open without sending. Returns the number of accepted
    connections."""
    loop = asyncio.get_running_loop()
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.socket()
            connection.setblocking(False)
            held.append(connection)
        results = []
        for start in range(0, count, 50):  # a listener's backlog is short
            tries = (
                asyncio.wait_for(loop.sock_connect(one, (host, port)), CONNECT_SECONDS)
                for one in held[start : start + 50]
            )
            results += await asyncio.gather(*tries, return_exceptions=True)
        yield sum(result is None for result in results)
    finally:
        for connection in held:
            connection.close()
