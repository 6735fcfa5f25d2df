"""How the transfer channels of two processes reach each other: small messages, addressed to a
process, delivered if all goes well.

A `KvLink` carries what a channel says; what arrives for this process is given to its `KvReceiver`,
which a channel is:

    channel = NegotiatedChannel(clock, end, link, ...)
    link.send(KvEnd("10.0.0.7:8811", boot_id), message)  # the channel does this
    channel.handle(sender, message)  # the link's owner does this; `sender` is the KvEnd it is from

Replies go through `send` to the `KvEnd` given as `sender`: it must therefore be the other process's
own `KvEnd`, control address and boot id, as its cards show it. A link delivers nothing to another
boot than the one addressed. Loss, delay and doubling are survived; messages from one process to one
process should keep their order."""

from typing import Protocol

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvMessage


class KvLink(Protocol):
    def send(self, end: KvEnd, message: KvMessage) -> None:
        """Sends, soon, or loses it: an end that is gone or slow is not an error here. Never blocks,
        never raises; from any thread."""
        ...


class KvReceiver(Protocol):
    def handle(self, sender: KvEnd, message: KvMessage) -> None:
        """Takes a message that came from `sender`. Never blocks, never raises; from any thread."""
        ...
