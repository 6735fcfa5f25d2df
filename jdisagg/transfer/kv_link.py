"""The interface by which the channels of two processes exchange small messages, with best-effort
delivery.

A `KvLink` sends a channel's messages. The link's owner passes received messages to the channel,
which is a `KvReceiver`:

    channel = NegotiatedChannel(clock, end, link, ...)
    link.send(KvEnd("10.0.0.7:8811", boot_id), message)  # the channel does this
    channel.handle(sender, message)  # the link's owner does this; `sender` is the origin's KvEnd

Replies are sent to the `KvEnd` given as `sender`, which must therefore equal the one that the other
process publishes in its cards. A link delivers only to the addressed boot. The channel tolerates
loss, delay and duplication; messages between two processes should keep their order."""

from typing import Protocol

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvMessage


class KvLink(Protocol):
    def send(self, end: KvEnd, message: KvMessage) -> None:
        """Queues a message, which may be lost. Never blocks, never raises; thread-safe."""
        ...


class KvReceiver(Protocol):
    def handle(self, sender: KvEnd, message: KvMessage) -> None:
        """Processes a message from `sender`. Never blocks, never raises; thread-safe."""
        ...
