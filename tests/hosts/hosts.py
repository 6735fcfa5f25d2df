"""Hosts made of namespaces, for tests of what a network does to a cluster.

A host has a network namespace and one network device, whose wire (wire.py) has conditions. A
process on a host has its own PID, IPC, UTS and mount namespaces, too: it shares the disk with the
others, and no memory, so that KV takes the network. The test's process is host 0, `here`.

Namespaces need root. `missing()` says what is missing, and tests are then skipped."""

import contextlib
import functools
import ipaddress
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import time_scale

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = time_scale.seconds(20.0)
_NUMBERS = itertools.count()


@functools.cache
def missing() -> str:
    """Returns what this machine lacks for hosts, or "" if they can be made."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"hosts of tests need the program {program!r}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "hosts of tests need /dev/net/tun, which root may use"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "hosts of tests need permission for namespaces (root)"


class Process:
    """A process on a host, and its log."""

    def __init__(self, outer: "subprocess.Popen[bytes]", log: Path) -> None:
        self._outer, self.log = outer, log

    @property
    def pid(self) -> int:
        """Of the program itself, outside its PID namespace."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        return int(children.read_text().split()[0])

    @property
    def ended(self) -> int | None:
        return self._outer.poll()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
            self.signal(signal.SIGKILL)
        self._outer.kill()  # its child dies with it
        self._outer.wait(WAIT_SECONDS)

    def wait_for(self, text: str, seconds: float = WAIT_SECONDS) -> None:
        """Waits until the log contains the text."""
        until = time.monotonic() + seconds
        while text not in (said := self.log.read_text()):
            assert self.ended is None, f"ended with {self.ended}: {said[-4000:]}"
            assert time.monotonic() < until, f"no {text!r} in the log: {said[-4000:]}"
            time.sleep(0.05)


class Hosts:
    """`count` hosts besides the test's own. Host i has the address `address(i)`, of IPv6 if `ipv6`
    and else of IPv4."""

    def __init__(self, count: int, folder: Path, ipv6: bool = False) -> None:
        self._folder = folder
        self._tag = f"{os.getpid() % 100000}x{next(_NUMBERS)}"
        self._ipv6 = ipv6
        self._number = (os.getpid() + next(_NUMBERS)) % 250
        self._taps = [f"jd{self._tag}h{host}" for host in range(count + 1)]
        self._spaces = ["", *(f"jd{self._tag}n{host}" for host in range(1, count + 1))]
        self._processes: list[Process] = []
        self._names = ""
        self._wire = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.wire", *self._taps],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._answer("ready")
            for host in range(count + 1):
                self._make(host)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return self._address(78, host)

    def _address(self, net: int, host: int) -> str:
        if self._ipv6:
            return str(ipaddress.IPv6Address(f"fd{net}:{self._number:x}::{host + 1:x}"))
        return f"10.{net}.{self._number}.{host + 1}"

    def add_network(self, host: int) -> str:
        """Gives a host an address in a second network, and returns it."""
        address = self._address(79, host)
        _ip(*self._inside(host), "addr", "add", f"{address}/24", "dev", self._taps[host])
        return address

    def _inside(self, host: int) -> tuple[str, ...]:
        space = self._spaces[host]
        return ("-n", space) if space else ()

    def name(self, host: int) -> str:
        return f"host{host}"

    def set(self, source: int | None, target: int | None, **conditions: float) -> None:
        """Sets conditions from one host to another. None means every host."""
        self._tell({"from": source, "to": target, **conditions})

    def cut_off(self, host: int, whole: bool = False) -> None:
        """Cuts a host off from all others, or ends that if `whole`."""
        self.set(host, None, drop=not whole)
        self.set(None, host, drop=not whole)

    def heal(self) -> None:
        """Removes all conditions."""
        self._tell({"from": None, "to": None})

    def run(self, host: int, command: Sequence[str]) -> Process:
        """Starts a program on a host, which has a line for each host in its /etc/hosts."""
        names = self._folder / f"hosts.{next(_NUMBERS)}"
        lines = [f"{self.address(i)} {self.name(i)}" for i in range(len(self._taps))]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        log = self._folder / f"host{host}.{next(_NUMBERS)}.log"
        inside = f'hostname {self.name(host)}; mount --bind {names} /etc/hosts; exec "$@"'
        ours = ("XLA_FLAGS", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        with log.open("wb") as file:
            outer = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._spaces[host]),
                    *("unshare", "--ipc", "--pid", "--uts", "--mount", "--fork"),
                    *("--kill-child", "--mount-proc", "sh", "-c", inside, "sh", *command),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
            )
        process = Process(outer, log)
        self._processes.append(process)
        return process

    def in_host(self, host: int, *command: str) -> "subprocess.CompletedProcess[str]":
        """Runs a short command in a host's network namespace."""
        return subprocess.run(
            ["ip", "netns", "exec", self._spaces[host], *command], capture_output=True, text=True
        )

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for space in self._spaces[1:]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        self._wire.communicate(timeout=WAIT_SECONDS)  # the end of its input ends it

    def _make(self, host: int) -> None:
        tap, space = self._taps[host], self._spaces[host]
        if space:
            _ip("netns", "add", space)
            _ip("link", "set", tap, "netns", space)
        inside = self._inside(host)
        _ip(*inside, "link", "set", "dev", tap, "address", _link_address(host))
        size = ("/64", "nodad") if self._ipv6 else ("/24",)
        _ip(*inside, "addr", "add", self.address(host) + size[0], "dev", tap, *size[1:])
        _ip(*inside, "link", "set", tap, "up")
        if space:
            _ip(*inside, "link", "set", "lo", "up")

    def _tell(self, command: dict[str, object]) -> None:
        assert self._wire.stdin is not None
        self._wire.stdin.write(json.dumps(command) + "\n")
        self._wire.stdin.flush()
        self._answer("ok")

    def _answer(self, wanted: str) -> None:
        assert self._wire.stdout is not None
        line = self._wire.stdout.readline().strip()
        assert line == wanted, f"the wire answered {line!r}"


def _link_address(host: int) -> str:
    return f"02:00:00:00:00:{host:02x}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    made = Hosts(count, folder)
    try:
        yield made
    finally:
        made.close()
