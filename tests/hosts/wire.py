"""A wire between hosts in user space, because a kernel may lack netem and netem forges no resets.

Each host has a TAP device. This process reads the frames of all devices and delivers each to the
device of its destination, under the conditions of that ordered pair of hosts.

    python -m tests.hosts.wire TAP...      # prints "ready" once the devices exist
    {"from": 0, "to": 1, "loss": 0.05}     # on stdin, one JSON object a line; answers "ok"
    {}                                     # no host and no condition: all wires are whole again

Host i has the MAC address 02:00:00:00:00:0i, so that a frame says where it goes."""

import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import struct
import sys
import time
from dataclasses import dataclass, fields

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES = 65536
QUEUE_SECONDS = 0.5  # of a link with a rate: what would wait longer is dropped
TCP, IPV4 = 6, b"\x08\x00"
ACK, RST, SYN = 0x10, 0x04, 0x02


@dataclass
class Conditions:
    """Conditions from one host to another. All are off by default.

    Attributes:
        delay, jitter: Seconds that each frame takes, and most seconds that are added at random.
        loss, duplicate, reorder, reset: Share of frames. Reordered frames take up to 30 ms longer.
            Of TCP segments that are reset, the receiver gets RST instead.
        rate: Bits a second, or 0 for no limit.
        largest: Bytes of the largest IP packet that passes, or 0. Larger ones vanish without ICMP.
        drop: Whether nothing passes.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reset: float = 0.0
    rate: float = 0.0
    largest: int = 0
    drop: bool = False


class Link:
    """The wire from one host to another: when each frame arrives, if it does."""

    def __init__(self, draw: random.Random) -> None:
        self.conditions = Conditions()
        self._draw = draw
        self._free_at = 0.0

    def arrivals(self, frame: bytes, now: float) -> list[tuple[float, bytes]]:
        want = self.conditions
        if (
            want.drop
            or (want.largest and len(frame) - 14 > want.largest)
            or self._happens(want.loss)
        ):
            return []
        if self._happens(want.reset):
            frame = as_reset(frame) or frame
        at = now
        if want.rate:
            begins = max(now, self._free_at)
            if begins - now > QUEUE_SECONDS:
                return []
            at = self._free_at = begins + 8 * len(frame) / want.rate
        return [(at + self._taken(), frame) for _ in range(1 + self._happens(want.duplicate))]

    def _taken(self) -> float:
        want = self.conditions
        late = 0.03 * self._draw.random() if self._happens(want.reorder) else 0.0
        return want.delay + want.jitter * self._draw.random() + late

    def _happens(self, share: float) -> bool:
        return share > 0 and self._draw.random() < share


def checksum(data: bytes | bytearray) -> int:
    total = sum(struct.unpack(f">{len(data) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def as_reset(frame: bytes) -> bytes | None:
    """Returns a frame with RST in place of a TCP segment, or None for other frames and for SYN."""
    if len(frame) < 54 or frame[12:14] != IPV4 or frame[23] != TCP:
        return None
    size = 4 * (frame[14] & 15)
    ip, tcp = bytearray(frame[14 : 14 + size]), bytearray(frame[14 + size : 34 + size])
    if tcp[13] & SYN:
        return None
    tcp[12], tcp[13] = 5 << 4, RST | ACK
    tcp[16:20] = bytes(4)  # checksum and urgent pointer
    pseudo = bytes(ip[12:20]) + struct.pack(">HH", TCP, len(tcp))
    tcp[16:18] = struct.pack(">H", checksum(pseudo + tcp))
    ip[2:4] = struct.pack(">H", size + len(tcp))
    ip[10:12] = bytes(2)
    ip[10:12] = struct.pack(">H", checksum(ip))
    return frame[:14] + bytes(ip) + bytes(tcp)


def open_tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI)
    fcntl.ioctl(descriptor, TUNSETIFF, request)
    return descriptor


class Wire:
    def __init__(self, taps: list[str], seed: int = 0) -> None:
        self._taps = [open_tap(name) for name in taps]
        hosts = range(len(taps))
        draw = random.Random(seed)
        self._links = {(a, b): Link(draw) for a in hosts for b in hosts if a != b}
        self._coming: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        for host, tap in enumerate(self._taps):
            self._selector.register(tap, selectors.EVENT_READ, host)
        self._selector.register(sys.stdin, selectors.EVENT_READ, -1)

    def run(self) -> None:
        while True:
            wait = self._coming[0][0] - time.monotonic() if self._coming else None
            for key, _ in self._selector.select(None if wait is None else max(0.0, wait)):
                if key.data >= 0:
                    self._read(key.data)
                elif not self._obey(sys.stdin.readline()):
                    return
            now = time.monotonic()
            while self._coming and self._coming[0][0] <= now:
                _, _, host, frame = heapq.heappop(self._coming)
                self._write(host, frame)

    def _read(self, host: int) -> None:
        now = time.monotonic()
        for _ in range(64):
            try:
                frame = os.read(self._taps[host], FRAME_BYTES)
            except (BlockingIOError, OSError):
                return
            everyone = bool(frame[0] & 1)
            for other in range(len(self._taps)):
                if other != host and (everyone or frame[5] == other):
                    for at, arriving in self._links[host, other].arrivals(frame, now):
                        self._arrive(at, other, arriving, now)

    def _arrive(self, at: float, host: int, frame: bytes, now: float) -> None:
        if at <= now and not self._coming:
            self._write(host, frame)
        else:
            heapq.heappush(self._coming, (at, next(self._numbers), host, frame))

    def _write(self, host: int, frame: bytes) -> None:
        try:
            os.write(self._taps[host], frame)
        except OSError:
            return  # the device is down, or its queue is full

    def _obey(self, line: str) -> bool:
        if not line:
            return False
        wanted = json.loads(line)
        source, target = wanted.pop("from", None), wanted.pop("to", None)
        assert wanted.keys() <= {spec.name for spec in fields(Conditions)}, wanted
        for (a, b), link in self._links.items():
            if source in (None, a) and target in (None, b):
                if not wanted:
                    link.conditions = Conditions()
                for name, value in wanted.items():
                    setattr(link.conditions, name, value)
        print("ok", flush=True)
        return True


if __name__ == "__main__":
    wire = Wire(sys.argv[1:])
    print("ready", flush=True)
    wire.run()
