"""Messages from workers to routers about cached KV blocks: additions and removals, in order.

An epoch is a period without a bulk removal. Its events are numbered from 1. A router acknowledges
up to where it knows a worker (`KeptMark`). The worker sends the events that follow, or its whole
state if those are no longer recorded. Lost, doubled or reordered news thus cost one message, and
the next repairs them.

A block is identified by the first bytes of its name, a keyed hash (`scheduler/residency.py`).
Without the key, names reveal nothing about prompts."""

from jdisagg.plain import Message, plain

TOLD_BYTES = 8  # prefix of a name; a collision costs a wrong estimate at the router, never a token


class KeptScheme(Message, frozen=True):
    """Naming of a worker's blocks: everything that must be equal for KV to be equal, the fleet's
    block size, and the tokens of a block here, a multiple of that size."""

    model: str
    grain_tokens: int
    block_tokens: int


class KeptMark(Message, frozen=True):
    """Last event of a worker that a router has processed. Epochs count from 1, and 0 means none."""

    epoch: int = 0
    number: int = 0


class KeptNews(Message, frozen=True):
    """Changed or cached blocks of `worker`.

    Attributes:
        number: Event before the first one here, or the last one if `whole`.
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


@plain
class PrefixEvent:
    """One change of what a worker holds, in a router's index.

    Attributes:
        number: Place among the worker's events, counted from 1 without gaps.
        page_hash: Name of the block, as a number.
        added: Whether the block was added; otherwise it was removed.
    """

    number: int
    page_hash: int
    added: bool
