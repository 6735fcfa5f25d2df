"""The channel between processes, over the real transfer engine: both ends in this process."""

from collections.abc import Callable, Iterator

import pytest

from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.transfer.jax_transfer import JaxTransferChannel
from jdisagg.transfer.kv_messages import KvMessage
from tests.transfer.conformance import ChannelConformance, Ends, ManualClock

SENDER, RECEIVER = KvEnd("127.0.0.1:1", 0xA), KvEnd("127.0.0.1:2", 0xB)


class Loopback:
    """A link between channels of this process. `tamper` sees each message and gives those that are delivered."""

    def __init__(self) -> None:
        self.channels: dict[KvEnd, JaxTransferChannel] = {}
        self.tamper: Callable[[KvMessage], list[KvMessage]] = lambda message: [message]

    def of(self, sender: KvEnd) -> "LoopbackEnd":
        return LoopbackEnd(self, sender)


class LoopbackEnd:
    def __init__(self, loopback: Loopback, sender: KvEnd) -> None:
        self._loopback, self._sender = loopback, sender

    def send(self, end: KvEnd, message: KvMessage) -> None:
        for delivered in self._loopback.tamper(message):
            if channel := self._loopback.channels.get(end):
                channel.handle(self._sender, delivered)


def card(end: KvEnd, transports: int = 2) -> MeshCard:
    return MeshCard((1, 1, 1), (0,), (0,), (end,), transports)


@pytest.fixture
def loopback() -> Loopback:
    return Loopback()


@pytest.fixture
def ends(loopback: Loopback) -> Iterator[Ends]:
    clock = ManualClock()
    for end in (SENDER, RECEIVER):
        loopback.channels[end] = JaxTransferChannel(clock, end, loopback.of(end), transports=2)
    sender, receiver = loopback.channels[SENDER], loopback.channels[RECEIVER]
    receiver.connect("", card(SENDER))
    yield Ends(sender, receiver, clock)
    receiver.close()
    sender.close()


class TestJaxTransferChannel(ChannelConformance):
    pass
