"""One prompt on a prefill worker, from the call until its tokens are sampled. Its KV leaves through its `Outbox`, which may live longer.

Knows no scheduler and no mesh.
"""

import asyncio

from jdisagg.dispatch.ports import HandoffEnd, PrefillCall, PrefillReply
from jdisagg.errors import JdisaggError
from jdisagg.worker.outbox import Outbox


class Sender:
    """`key` owns its pages. `box` is made by the worker, who hears of its end."""

    def __init__(self, key: int, call: PrefillCall, box: Outbox, arrival: float, now: float) -> None:
        self.key = key
        self.call = call
        self.box = box
        self.arrival = arrival
        self.queued_at = now
        self.started_at: float | None = None
        self.rank = -1
        self.reply: asyncio.Future[PrefillReply] = asyncio.get_running_loop().create_future()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.call.request.prompt_token_ids + self.call.children[0].accepted

    def end(self, offers: int) -> HandoffEnd:
        """The last message of the hand-off, once there is a reply."""
        return HandoffEnd(offers, len(self.tokens), self.reply.result().tokens)

    def fail(self, error: JdisaggError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()
