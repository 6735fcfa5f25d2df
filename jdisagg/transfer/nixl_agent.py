"""NIXL's agent, called only in the ways that were measured to be safe. Nothing else in jdisagg
calls NIXL; it is an optional extra, and without it nothing here is reached.

What goes wrong otherwise (benchmarks/LOG.md, 2026-11-24), and what is done about it:
- its progress thread spins through half a core when it is given no delay: it gets one, which bounds
  how long it sleeps where no event wakes it;
- UCX's TCP moves 8 KiB at a time, which costs both sides about half as much time again as
  TCP_SEGMENT does;
- UCX listens on every interface, and the backend's own parameters name one device at most: its
  environment names the one that has `host` while the backend is made, and the RDMA devices;
- a read of memory that is not mapped any more kills the process that is read, for over TCP its UCX
  copies from whatever address is asked for; so registration keeps nobody off either. What was ever
  registered stays mapped and registered (nixl_memory.py);
- a read that was given up still writes into its place when a stopped sender runs on: its handle is
  kept until it is over, and its place is used for nothing else until then;
- metadata is checked for its form alone: it travels with a digest, and what has another is refused
  before NIXL sees it;
- the wheels name torch as what they need. Their bindings do not, and nothing else is imported."""

import contextlib
import fcntl
import hashlib
import importlib
import ipaddress
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from jdisagg.errors import ConfigError, HandoffError

INSTALL = "pip install --no-deps nixl-cu12 (or nixl-cu13)"
PROGRESS_MICROSECONDS = 10_000
TCP_SEGMENT = "256k"
_WHEELS = ("nixl_cu12", "nixl_cu13")
_DIGEST_BYTES = 16
_DEVICES_VARIABLE = "UCX_NET_DEVICES"
_SEGMENT_VARIABLES = ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")
_SIOCGIFADDR = 0x8915
_environment = threading.Lock()


def nixl_bindings() -> ModuleType:
    """Raises ConfigError where no wheel of NIXL is installed, or its libraries do not load."""
    for wheel in _WHEELS:
        try:
            return importlib.import_module(f"{wheel}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(f"NIXL: {wheel} is installed and does not load: {error}") from error
    raise ConfigError(f"NIXL is asked for and none of {_WHEELS} is installed: {INSTALL}")


def is_loopback(host: str) -> bool:
    """Whether no other host reaches what is bound there. Raises ConfigError for a host that has no
    IPv4 address."""
    return ipaddress.ip_address(_address(host)).is_loopback


def rdma_devices() -> tuple[str, ...]:
    """This machine's, by UCX's names of their first ports."""
    folder = Path("/sys/class/infiniband")
    found = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted(f"{each.name}:1" for each in found))


def ucx_devices(host: str) -> tuple[str, ...]:
    """The network interface that has the address `host`, and this machine's RDMA devices where
    other hosts are reached. Raises ConfigError where no interface has it."""
    address = _address(host)
    if is_loopback(host):
        return ("lo",)
    devices = rdma_devices()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # one without an address
                found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
                if socket.inet_ntoa(found[20:24]) == address:
                    return (*devices, name)
    raise ConfigError(
        f"NIXL: no network interface of this machine has the address {address} of host {host!r};"
        " give the worker an address of its own"
    )


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(
            f"NIXL: host {host!r} has no IPv4 address: {error}; give the worker one, or serve"
            " without NIXL"
        ) from error


class NixlAgent:
    """This process's: it registers memory, reads that of others, and serves what they read on a
    thread of its own. From any thread.

    host: the address whose interface it uses. Raises ConfigError where NIXL is not installed, or
    has no backend for what is there."""

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
        self._lock = threading.Lock()
        self._known: dict[bytes, str] = {}
        self._reads: dict[str, set[NixlRead]] = {}
        self._lost: set[str] = set()
        self._closed = False

    @property
    def pins_memory(self) -> bool:
        """Whether a device may hold on to the pages of what is registered."""
        return any(":" in device for device in self.devices)

    def register(self, address: int, size: int) -> bytes:
        """Memory of this process, for good. Gives what others need to read it."""
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
        """The name of the agent whose memory it describes, which can be read from now on. Raises
        HandoffError for what no agent has made, and while reads are under way from one that was
        lost."""
        blob = metadata[_DIGEST_BYTES:]
        if metadata[:_DIGEST_BYTES] != _digest(blob):
            raise HandoffError("a sender announced NIXL metadata with another digest; pull again")
        with self._lock:
            under_way = [read for lost in self._lost for read in self._reads.get(lost, ())]
        for read in under_way:
            read.is_over()  # nobody else may look at it any more
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
        """Begins to copy `size` bytes from address `remote` of the peer to `local` of this process,
        both registered. `in_time`: asked once, when it is over; what is late counts as failed."""
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
        """Drops the connection to it once no read is under way; the next one makes another."""
        with self._lock:
            self._lost.add(peer)
            self._forget_lost()

    def close(self) -> None:
        """Nothing is read from here any more, and reads under way fail. Idempotent."""
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
        """What came of a read: None while it is under way, "" when it is done, or why it failed."""
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
        with contextlib.suppress(Exception):  # of a failed one nothing may be left
            self._agent.releaseXferReq(handle)
        with self._lock:
            self._reads[peer].discard(read)
            if failed:
                self._lost.add(peer)

    def _forget_lost(self) -> None:
        """Under the lock."""
        for peer in [each for each in self._lost if not self._reads.get(each)]:
            self._lost.discard(peer)
            self._reads.pop(peer, None)
            self._known = {blob: name for blob, name in self._known.items() if name != peer}
            with contextlib.suppress(Exception):  # it may know nothing of it
                self._agent.invalidateRemoteMD(peer)


class NixlRead:
    """A read under way, to poll. From any thread."""

    def __init__(
        self, agent: NixlAgent, peer: str, handle: int, in_time: Callable[[], bool]
    ) -> None:
        self._agent, self._peer, self._handle, self._in_time = agent, peer, handle, in_time
        self._lock = threading.Lock()
        self._over = False
        self.error: str | None = None

    def begin(self, post: Callable[[], object]) -> None:
        try:
            said = self._agent.named(post())
        except Exception as error:
            said = str(error) or type(error).__name__
        if said is not None:
            self._settle(said)

    def is_over(self) -> bool:
        """Whether it is done or has failed; never waits."""
        if not self._over:
            said = None
            with self._lock:
                if not self._over:
                    said = self._agent.status(self._handle)
            if said is not None:
                self._settle(said)
        return self._over

    def end(self, why: str) -> None:
        """Nobody will look at it again, for its agent ends."""
        self._settle(why)

    def _settle(self, said: str) -> None:
        with self._lock:
            if self._over:
                return
            if said:
                self.error = f"the sender's memory could not be read over NIXL: {said}"
            elif not self._in_time():
                self.error = "what was read over NIXL came after the pull's deadline"
            self._agent.over(self, self._peer, self._handle, failed=bool(said))
            self._over = True


def _digest(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=_DIGEST_BYTES, person=b"jdisagg-nixl").digest()


@contextlib.contextmanager
def _named_devices(host: str) -> Iterator[tuple[str, ...]]:
    """UCX reads them, and what else it is to know, from the environment alone; who has set it there
    is obeyed."""
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
