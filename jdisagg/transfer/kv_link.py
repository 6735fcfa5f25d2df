"""How the transfer channels of two processes reach each other: small messages to a process,
delivered at best effort.

A `KvLink` sends a channel's messages. Its owner passes received messages to a `KvReceiver`, which a
channel is:

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
        """Sends the message soon, or loses it if the receiver is gone or slow. Never blocks, never
        raises; thread-safe."""
        ...


class KvReceiver(Protocol):
    def handle(self, sender: KvEnd, message: KvMessage) -> None:
        """Takes a message of `sender`. Never blocks, never raises; thread-safe."""
        ...
