"""The TCP connections of this process, and how to break each of them as a network does.

A socket is found by its file descriptor, so that no privilege is needed. `connect` to no address
makes the kernel send a reset; `shutdown` sends a FIN."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

Address = tuple[str, int]
SO_MAX_PACING_RATE = 47


@dataclass(frozen=True)
class Connection:
    descriptor: int
    inode: str
    local: Address
    peer: Address

    def reset(self) -> None:
        """The peer gets RST, and this process an error at its next read."""
        nowhere = (ctypes.c_ubyte * 16)()  # sockaddr with family AF_UNSPEC
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.connect(self.descriptor, nowhere, 16) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def pace(self, bytes_per_second: int) -> None:
        """This process sends no faster from now on."""
        with socket.socket(fileno=os.dup(self.descriptor)) as same:
            same.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second)

    def close(self) -> None:
        """Both ends get FIN."""
        with socket.socket(fileno=os.dup(self.descriptor)) as same:
            same.shutdown(socket.SHUT_RDWR)


def connections() -> Iterator[Connection]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}")
            if inode.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as same:
                    if same.family == socket.AF_INET and same.type == socket.SOCK_STREAM:
                        local, peer = same.getsockname(), same.getpeername()
                        yield Connection(int(name), inode, local, peer)


def connections_since(before: "set[str]") -> list[Connection]:
    return [one for one in connections() if one.inode not in before]


def inodes() -> set[str]:
    return {one.inode for one in connections()}
