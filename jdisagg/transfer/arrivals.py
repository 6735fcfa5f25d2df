"""Counts the bytes that have arrived at this process over TCP from another host.

The transfer engine does not report how much of an array has arrived. The kernel does, for each
socket. This module reads the counters of the process's own sockets, which needs no privilege."""

import os
import socket
import struct

TCP_INFO_BYTES = 192
BYTES_RECEIVED = struct.Struct("@128xQ")  # tcpi_bytes_received in the kernel's tcp_info


def received_bytes(address: str, but: str) -> int:
    """Returns the bytes received on all open TCP connections with the host of a sender's data
    plane. `but`: address whose port is excluded. Connections to or from this port are not
    counted."""
    host, port = address.rpartition(":")[0].strip("[]"), but.rpartition(":")[2]
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                total += _received(int(name), host, port)
        except OSError:
            continue  # closed meanwhile, or not connected
    return total


def _received(descriptor: int, host: str, but_port: str) -> int:
    # Uses a duplicate of the descriptor, because another thread owns the descriptor and may close
    # it.
    with socket.socket(fileno=os.dup(descriptor)) as same:
        if same.type != socket.SOCK_STREAM or same.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        peer, local = same.getpeername(), same.getsockname()
        ports = str(peer[1]), str(local[1])
        if peer[0].removeprefix("::ffff:") != host or but_port in ports:
            return 0
        info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        return BYTES_RECEIVED.unpack_from(info)[0] if len(info) >= BYTES_RECEIVED.size else 0
