"""Messages from workers to routers about cached KV blocks: additions and removals, in order.

An epoch is a period without a bulk removal, and its events are numbered from 1. A router
acknowledges the last event that it has processed (`KeptMark`). The worker sends the events that
follow, or its whole state if it no longer records those. The next message thus repairs lost,
duplicated or reordered ones.

A block is identified by the first bytes of its name, a keyed hash (`scheduler/residency.py`).
Without the key, names reveal nothing about prompts."""

from jdisagg.plain import Message

TOLD_BYTES = 8  # prefix of a name; a collision costs a wrong estimate at the router, never a token


class KeptScheme(Message, frozen=True):
    """How a worker names its cached blocks: `model` covers everything that the KV depends on,
    `grain_tokens` is the fleet's block size, and `block_tokens` is this worker's, a multiple of it.
    """

    model: str
    grain_tokens: int
    block_tokens: int


class KeptMark(Message, frozen=True):
    """Last event of a worker that a router has processed. Epochs count from 1; 0 means no event."""

    epoch: int = 0
    number: int = 0


class KeptNews(Message, frozen=True):
    """Additions and removals of `worker`'s cached blocks, or all of its cached blocks.

    Attributes:
        number: Event before the first one in this message, or the last event if `whole`.
        names: `TOLD_BYTES` of each block's name, concatenated.
        added: One byte per block, 1 for an addition and 0 for a removal. Empty if `whole`.
        whole: Whether `names` lists every cached block after event `number`.
    """

    worker: str
    epoch: int
    number: int
    names: bytes
    added: bytes = b""
    whole: bool = False


class PrefixEvent(Message, frozen=True):
    """Addition or removal of one cached block of a worker, as a router's index receives it.

    Attributes:
        number: Number of the event at this worker, counted from 1 without gaps.
        page_hash: Name of the block, as a number.
        added: Whether the block was added; otherwise it was removed.
    """

    number: int
    page_hash: int
    added: bool
