"""What workers tell routers of the KV blocks that they keep: what came and went, in order.

An epoch is a time in which nothing was forgotten at once; its events are numbered from 1. A router
says how far it knows a worker (`KeptMark`), and the worker tells what follows, or all that it has
where that is not on record any more. So news that are lost, come twice or out of order cost a
message and are made good by the next.

A block is told by the first bytes of its name, which is a keyed hash
(`scheduler/residency.py`): who does not know the key learns nothing of what was asked."""

from jdisagg.plain import Message

TOLD_BYTES = 8  # of a name: two blocks that meet in them cost a router's guess, and no token


class KeptScheme(Message, frozen=True):
    """How a worker names its blocks: what must be equal for KV to be, the fleet's grain, and how
    many tokens, a multiple of the grain, are a block here."""

    model: str
    grain_tokens: int
    block_tokens: int


class KeptMark(Message, frozen=True):
    """How far a router knows a worker: the events of this epoch up to this number. Epochs count
    from 1; 0: it knows nothing."""

    epoch: int = 0
    number: int = 0


class KeptNews(Message, frozen=True):
    """Blocks of `worker`, `TOLD_BYTES` of each name one behind the other. `whole`: all that it
    keeps after event `number`. Else what follows event `number`: a byte of `added` for each block,
    1 where it came and 0 where it went."""

    worker: str
    epoch: int
    number: int
    names: bytes
    added: bytes = b""
    whole: bool = False
