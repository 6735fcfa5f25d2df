"""Messages from workers to routers about cached KV blocks: additions and removals, in order.

An event is the addition or removal of one block. An epoch is a period without a bulk removal, and
its events are numbered from 1. A router acknowledges the last event that it has processed
(`KeptMark`). The worker then sends the later events.

A message identifies a block by the first bytes of the block's name, which is a keyed hash
(`scheduler/block_names.py`). Without the key, names reveal nothing about prompts."""

from jdisagg.plain import Message

TOLD_BYTES = 8  # leading bytes of a name; a collision can only cause a wrong estimate at the router


def named_model(model: str, weights: str) -> str:
    return f"{model} weights={weights}" if weights else model


class KeptScheme(Message, frozen=True):
    """Parameters of a worker's block names, from which a router computes the same names.

    Attributes:
        model: Fingerprint of everything that determines the KV, apart from the tokens.
        grain_tokens: Block size that all workers share, in tokens.
        block_tokens: Block size of this worker, in tokens, a multiple of `grain_tokens`.
    """

    model: str
    grain_tokens: int
    block_tokens: int

    def with_weights(self, weights: str) -> "KeptScheme":
        """Returns the scheme of a worker that serves the weights with this identity. The identity
        of its initial weights is ""."""
        return KeptScheme(named_model(self.model, weights), self.grain_tokens, self.block_tokens)


class KeptMark(Message, frozen=True):
    """The last event of a worker that a router has processed. Epochs count from 1. Epoch 0 means
    that the router has processed no event yet."""

    epoch: int = 0
    number: int = 0


class KeptNews(Message, frozen=True):
    """Changes of the cached blocks of `worker`. If `whole` is set, the message lists all its cached
    blocks instead.

    Attributes:
        number: Number of the event that precedes this message's first event. If `whole` is set,
            number of the worker's last event.
        names: First `TOLD_BYTES` bytes of each block's name, concatenated.
        added: One byte per block, 1 for an addition and 0 for a removal. Empty if `whole` is set.
        whole: Whether `names` lists every block that is cached after event `number`.
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
        page_hash: First bytes of the block's name, as an integer.
    """

    number: int
    page_hash: int
    added: bool
