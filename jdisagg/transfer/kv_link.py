"""Interface of the control messages between the channels of two processes. Delivery is best-effort.

A `KvLink` sends a channel's messages.

Replies are sent to the `KvEnd` given as `sender`, which must therefore equal the `KvEnd` that the
other process publishes in its cards. A link delivers a message only to the process run (boot id)
that it is addressed to. The channel tolerates loss, delay and duplication of messages. Messages
between two processes should keep their order."""

from typing import Protocol

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvMessage


class KvLink(Protocol):
    def send(self, end: KvEnd, message: KvMessage) -> None:
        """Queues a message for the process `end`. The message may be lost. Never blocks, never
        raises. Thread-safe."""
        ...


class KvReceiver(Protocol):
    def handle(self, sender: KvEnd, message: KvMessage) -> None:
        """Processes a message from the process `sender`. Never blocks, never raises.
        Thread-safe."""
        ...
