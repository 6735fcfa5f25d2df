"""Two channels over the real transfer engine in one process, and the link between them, which may
be tampered with."""

from collections.abc import Callable

from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import KvMessage
from jdisagg.transfer.negotiated_channel import NegotiatedChannel

SENDER, RECEIVER = KvEnd("127.0.0.1:1", 0xA), KvEnd("127.0.0.1:2", 0xB)


class Loopback:
    """A link between channels of this process. `tamper` sees each message and gives those that are
    delivered."""

    def __init__(self) -> None:
        self.channels: dict[KvEnd, NegotiatedChannel] = {}
        self.tamper: Callable[[KvMessage], list[KvMessage]] = lambda message: [message]

    def heard(self) -> list[KvMessage]:
        """All that is sent from now on, as it is sent."""
        messages: list[KvMessage] = []
        self.tamper = lambda message: [messages.append(message) or message]
        return messages

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
