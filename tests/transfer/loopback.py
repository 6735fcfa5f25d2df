"""Two channels between processes, both in this process, and the link between them, which tests may
tamper with."""

import dataclasses
from collections.abc import Callable

from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import KvMessage
from jdisagg.transfer.negotiated_channel import Memories, NegotiatedChannel
from tests.transfer.conformance import Ends, ManualClock

SENDER, RECEIVER = KvEnd("127.0.0.1:1", 0xA), KvEnd("127.0.0.1:2", 0xB)


class Loopback:
    """A link between channels of this process. `tamper` maps each message to those delivered."""

    def __init__(self) -> None:
        self.channels: dict[KvEnd, NegotiatedChannel] = {}
        self.tamper: Callable[[KvMessage], list[KvMessage]] = lambda message: [message]

    def heard(self) -> list[KvMessage]:
        """Returns a list that collects all messages from now on."""
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


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sender and a receiver that have these memories, and all messages between them."""

    sender: NegotiatedChannel
    receiver: NegotiatedChannel
    sender_end: KvEnd
    memories: tuple[Memories, Memories]
    clock: ManualClock
    loopback: Loopback
    messages: list[KvMessage]

    @staticmethod
    def of(loopback: Loopback, sender: Memories, receiver: Memories) -> "Pair":
        clock, messages, ends = ManualClock(), loopback.heard(), []
        for end, memories in ((SENDER, sender), (RECEIVER, receiver)):
            end = memories.end(end.control, end.boot_id)
            ends.append(end)
            loopback.channels[end] = NegotiatedChannel(
                clock, end, loopback.of(end), transports=2, memories=memories
            )
        here, there = (loopback.channels[end] for end in ends)
        there.connect("", card(ends[0]))
        return Pair(here, there, ends[0], (sender, receiver), clock, loopback, messages)

    @property
    def ends(self) -> Ends:
        return Ends(self.sender, self.receiver, self.clock)

    def heard(self, kind: type[KvMessage]) -> list[KvMessage]:
        return [message for message in self.messages if isinstance(message, kind)]

    def quiet(self) -> bool:
        return self.sender.postings() == self.receiver.under_way() == 0

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
