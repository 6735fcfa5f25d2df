"""NIXL's agent, used only in ways that were measured to be safe. No other module of jdisagg calls
NIXL. NIXL is an optional dependency. Without it this module is not used.

Failure modes of NIXL (benchmarks/LOG.md, 2026-11-24) and the countermeasures:
- NIXL's progress thread uses half a core by busy polling. jdisagg configures a delay, which is the
  longest sleep of the thread when no event wakes it.
- UCX over TCP sends segments of 8 KiB by default. With these, both sides need about 1.5 times as
  long as with segments of TCP_SEGMENT bytes. jdisagg sets TCP_SEGMENT.
- UCX listens on every interface by default, and NIXL's parameters can name only one device.
  Therefore environment variables name the interface of `host` and the RDMA devices while NIXL's
  backend is created.
- A read of unmapped memory kills the process that owns the address: over TCP, UCX in that process
  copies from any requested address, registered or not. Registered memory therefore stays mapped and
  registered (nixl_memory.py).
- An abandoned read still writes to its destination if a paused sender resumes. The read's handle
  and destination are kept until the read has ended.
- NIXL checks only the form of metadata. Metadata is therefore sent with a digest, which is checked
  before NIXL loads the metadata.
- NIXL's wheels declare torch as a dependency. Only NIXL's bindings are imported, which do not need
  torch."""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.settings.address import numeric

INSTALL = "pip install --no-deps nixl-cu12 (or nixl-cu13)"
PROGRESS_MICROSECONDS = 10_000
TCP_SEGMENT = "256k"
_WHEELS = ("nixl_cu12", "nixl_cu13")
_DIGEST_BYTES = 16
_DEVICES_VARIABLE = "UCX_NET_DEVICES"
_SEGMENT_VARIABLES = ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")
_SIOCGIFADDR = 0x8915
_environment = threading.Lock()
_log = logging.getLogger(__name__)


def nixl_bindings() -> ModuleType:
    """Raises ConfigError if no wheel is installed or it does not load."""
    for wheel in _WHEELS:
        try:
            return importlib.import_module(f"{wheel}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(f"NIXL: {wheel} is installed and does not load: {error}") from error
    raise ConfigError(f"NIXL is configured and none of {_WHEELS} is installed: {INSTALL}")


def is_loopback(host: str) -> bool:
    """Raises ConfigError if `host` has no IPv4 address."""
    return ipaddress.ip_address(_address(host)).is_loopback


def rdma_devices() -> tuple[str, ...]:
    folder = Path("/sys/class/infiniband")
    found = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted(f"{each.name}:1" for each in found))


def ucx_devices(host: str) -> tuple[str, ...]:
    """Returns the devices that UCX may use: this machine's RDMA devices and the interface with the
    address `host`. For a loopback address, returns "lo" only. Raises ConfigError if no interface
    has the address."""
    address = _address(host)
    if is_loopback(host):
        return ("lo",)
    devices = rdma_devices()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
                if socket.inet_ntoa(found[20:24]) == address:
                    return (*devices, name)
    raise ConfigError(
        f"NIXL: no network interface of this machine has the address {address} of host {host!r};"
        " give the worker an address of its own"
    )


def ucx_version() -> str:
    """Returns the version of the UCX library that NIXL loaded into this process; "" without."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split(maxsplit=5)[-1] for line in lines if "/libucp" in line}
    for library in sorted(libraries):
        version = ctypes.CDLL(library).ucp_get_version_string
        version.restype = ctypes.c_char_p
        return version().decode()
    return ""


def _address(host: str) -> str:
    address = numeric(host, "NIXL")
    if ":" in address:
        raise ConfigError(
            f"NIXL: host {host!r} has no IPv4 address; give the worker one, or serve without NIXL"
        )
    return address


class NixlAgent:
    """The NIXL agent of this process. Registers memory, reads other processes' memory, and lets
    other processes read registered memory. Thread-safe. Raises ConfigError if NIXL is not
    installed, or has no backend for these devices."""

    def __init__(self, host: str) -> None:
        self._nixl = nixl_bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_MICROSECONDS
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        self.name = f"jdisagg-{secrets.token_hex(8)}"
        parameters = {"ucx_error_handling_mode": "peer", "num_workers": "1"}
        with _named_devices(host) as self.devices:
            try:
                self._agent = self._nixl.nixlAgent(self.name, config)
                self._backend = self._agent.createBackend("UCX", parameters)
            except Exception as error:
                raise ConfigError(
                    f"NIXL has no UCX backend over devices {self.devices}: {error}; name others in"
                    f" {_DEVICES_VARIABLE}, or serve without NIXL"
                ) from error
        _log.info(
            "NIXL reads host memory over UCX %s, devices %s", ucx_version(), ", ".join(self.devices)
        )
        self._lock = threading.Lock()
        self._known: dict[bytes, str] = {}
        self._reads: dict[str, set[NixlRead]] = {}
        self._lost: set[str] = set()
        self._closed = False

    @property
    def pins_memory(self) -> bool:
        """Whether this machine has an RDMA device, which may pin the pages of registered memory."""
        return any(":" in device for device in self.devices)

    def register(self, address: int, size: int) -> bytes:
        """Registers memory for reads by other processes, until this process ends. Returns the
        metadata that other processes need for their reads."""
        described = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size, 0, "")])
        try:
            self._agent.registerMem(described, [self._backend])
            blob = self._agent.getLocalPartialMD(described, True, [self._backend])
        except Exception as error:
            raise HandoffError(
                f"NIXL did not register {size} bytes: {error}; raise the limit of locked memory"
            ) from error
        return _digest(blob) + blob

    def know(self, metadata: bytes) -> str:
        """Loads another agent's metadata. This is required before reads from that agent's memory.
        Raises HandoffError if the metadata is invalid, or reads over a previous, lost connection to
        the agent have not ended."""
        blob = metadata[_DIGEST_BYTES:]
        if metadata[:_DIGEST_BYTES] != _digest(blob):
            raise HandoffError("a sender announced NIXL metadata with another digest; pull again")
        with self._lock:
            under_way = [read for lost in self._lost for read in self._reads.get(lost, ())]
        for read in under_way:
            read.is_over()  # it may not be polled elsewhere any more
        with self._lock:
            if self._closed:
                raise HandoffError("the channel was closed")
            self._forget_lost()
            if metadata not in self._known:
                try:
                    name = self._agent.loadRemoteMD(blob)
                except Exception as error:
                    raise HandoffError(f"NIXL refused a sender's metadata: {error}") from error
                self._known[metadata] = name.decode() if isinstance(name, bytes) else name
            peer = self._known[metadata]
            if peer in self._lost:
                raise HandoffError("the connection over NIXL is being closed; pull again")
            return peer

    def read(
        self, peer: str, remote: int, local: int, size: int, in_time: Callable[[], bool]
    ) -> "NixlRead":
        """Starts to copy another process's registered memory into this process's registered memory.

        Args:
            peer: Name of the other process's agent, as returned by `know`.
            in_time: Function that is called once, when the read has ended. Returns False if the
                deadline has passed; the read then counts as failed.
        """
        nixl = self._nixl
        with self._lock:
            if self._closed:
                raise HandoffError("the channel was closed")
            try:
                handle = self._agent.createXferReq(
                    nixl.NIXL_READ,
                    nixl.nixlXferDList(nixl.DRAM_SEG, [(local, size, 0)]),
                    nixl.nixlXferDList(nixl.DRAM_SEG, [(remote, size, 0)]),
                    peer,
                    "",
                    [self._backend],
                )
            except Exception as error:
                self._lost.add(peer)
                raise HandoffError(f"NIXL cannot read {size} bytes: {error}") from error
            read = NixlRead(self, peer, handle, in_time)
            self._reads.setdefault(peer, set()).add(read)
        read.begin(lambda: self._agent.postXferReq(handle))
        return read

    def lose(self, peer: str) -> None:
        """Drops the connection to the agent `peer` when its last running read has ended. The next
        read opens a new connection."""
        with self._lock:
            self._lost.add(peer)
            self._forget_lost()

    def close(self) -> None:
        """Ends the agent; running reads fail. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            reads = [read for peer in self._reads.values() for read in peer]
        for read in reads:
            read.end("the channel was closed")
        with self._lock:
            del self._agent

    def status(self, handle: int) -> str | None:
        """Returns "" if the read has completed, an error text if it has failed, or None while it is
        running."""
        try:
            found = self._agent.getXferStatus(handle)
        except Exception as error:
            return str(error) or type(error).__name__
        return self.named(found)

    def named(self, status: object) -> str | None:
        if status == self._nixl.NIXL_IN_PROG:
            return None
        return "" if status == self._nixl.NIXL_SUCCESS else str(status)

    def over(self, read: "NixlRead", peer: str, handle: int, failed: bool) -> None:
        with contextlib.suppress(Exception):  # a failed read may have no handle
            self._agent.releaseXferReq(handle)
        with self._lock:
            self._reads[peer].discard(read)
            if failed:
                self._lost.add(peer)

    def _forget_lost(self) -> None:
        for peer in [each for each in self._lost if not self._reads.get(each)]:
            self._lost.discard(peer)
            self._reads.pop(peer, None)
            self._known = {blob: name for blob, name in self._known.items() if name != peer}
            with contextlib.suppress(Exception):  # the agent may not have it
                self._agent.invalidateRemoteMD(peer)


class NixlRead:
    """A read in progress or ended, to be polled. Thread-safe."""

    def __init__(
        self, agent: NixlAgent, peer: str, handle: int, in_time: Callable[[], bool]
    ) -> None:
        self._agent, self._peer, self._handle, self._in_time = agent, peer, handle, in_time
        self._lock = threading.Lock()
        self._over = False
        self.error: str | None = None

    def begin(self, post: Callable[[], object]) -> None:
        try:
            status = self._agent.named(post())
        except Exception as error:
            status = str(error) or type(error).__name__
        if status is not None:
            self._settle(status)

    def is_over(self) -> bool:
        if not self._over:
            status = None
            with self._lock:
                if not self._over:
                    status = self._agent.status(self._handle)
            if status is not None:
                self._settle(status)
        return self._over

    def end(self, why: str) -> None:
        self._settle(why)

    def _settle(self, failure: str) -> None:
        with self._lock:
            if self._over:
                return
            if failure:
                self.error = f"the sender's memory could not be read over NIXL: {failure}"
            elif not self._in_time():
                self.error = "what was read over NIXL came after the pull's deadline"
            self._agent.over(self, self._peer, self._handle, failed=bool(failure))
            self._over = True


def _digest(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=_DIGEST_BYTES, person=b"jdisagg-nixl").digest()


@contextlib.contextmanager
def _named_devices(host: str) -> Iterator[tuple[str, ...]]:
    """Sets UCX's devices and segment sizes in the environment, because UCX reads them only
    there."""
    with _environment:
        said = os.environ.get(_DEVICES_VARIABLE)
        devices = tuple(said.split(",")) if said else ucx_devices(host)
        settings = {_DEVICES_VARIABLE: ",".join(devices)}
        settings |= dict.fromkeys(_SEGMENT_VARIABLES, TCP_SEGMENT)
        new = {name: value for name, value in settings.items() if not os.environ.get(name)}
        os.environ.update(new)
        try:
            yield devices
        finally:
            for name in new:
                del os.environ[name]
