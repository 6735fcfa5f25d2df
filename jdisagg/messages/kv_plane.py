"""The protocol by which one KV block moves from a sender to a receiver. Does not import JAX.

`WORKFLOW` is the protocol: states, events, who acts, and the message to the other end. The
workers of two meshes follow it for each block of a hand-off, over the peer port
(`messages/ports.py`: Offer, OfferChecksum, acknowledge, abort). For each pull of a block, the
processes of the two meshes follow it over a `KvLink`, by the messages below. Any of these may be
lost, late or duplicated. Ids are therefore used once, every wait has a deadline, and an event that
`WORKFLOW` does not name for a state changes nothing.

A receiver process sends Leave when it makes no more pulls over a connection.

A device number is the number that JAX gives the device in the process that owns it."""

import enum
from typing import Protocol

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.plain import Message

# While bytes of the sender keep arriving, a pull may take this many times its time limit.
MOST_PATIENCE = 12


class BlockState(enum.Enum):
    __hash__ = object.__hash__  # by identity, which is fast, because lookups are frequent
    OFFERED = "the receiver knows the block"
    ASKED = "the receiver waits for the block"
    RESERVED = "the sender has memory for the requested pieces"
    POSTED = "the receiver may read the pieces, and the sender must not change them"
    ARRIVED = "the block is on the receiver's devices, and the sender may free the pieces"
    VERIFIED = "the block is intact in the receiver's pages, and the sender may free the block"
    LOST = "the pull failed; the receiver may ask again, under a new id"


class BlockEvent(enum.Enum):
    __hash__ = object.__hash__
    ASK = "the receiver asks, again if no answer came"
    RESERVE = "the sender reserves memory"
    POST = "the sender answers"
    ARRIVE = "all bytes have arrived"
    VERIFY = "the checksum in the pages is the one that the sender computed"
    REFUSE = "the sender has no such block, or revokes it"
    GIVE_UP = "a deadline has passed, the receiver lost interest, or the block is not intact"


_S, _E = BlockState, BlockEvent
_PULLED = (_S.ASKED, _S.RESERVED, _S.POSTED)
# (state, event): (who acts, next state, message)
WORKFLOW: dict[tuple[BlockState, BlockEvent], tuple[str, BlockState, str]] = {
    (_S.OFFERED, _E.ASK): ("receiver", _S.ASKED, "PullRequest"),
    **{(state, _E.ASK): ("receiver", state, "PullRequest") for state in _PULLED},
    (_S.ASKED, _E.RESERVE): ("sender", _S.RESERVED, ""),
    (_S.ASKED, _E.POST): ("sender", _S.POSTED, "Posted"),
    (_S.RESERVED, _E.POST): ("sender", _S.POSTED, "Posted"),
    (_S.ASKED, _E.ARRIVE): ("receiver", _S.ARRIVED, "Pulled"),  # needs no answer
    (_S.POSTED, _E.ARRIVE): ("receiver", _S.ARRIVED, "Pulled"),
    (_S.ARRIVED, _E.VERIFY): ("receiver", _S.VERIFIED, "acknowledge"),
    **{(state, _E.REFUSE): ("sender", _S.LOST, "Refused") for state in _PULLED},
    **{(state, _E.GIVE_UP): ("either", _S.LOST, "Withdraw") for state in _PULLED},
    (_S.ARRIVED, _E.GIVE_UP): ("receiver", _S.LOST, ""),
    (_S.LOST, _E.ASK): ("receiver", _S.ASKED, "PullRequest"),
}


def after(state: BlockState, event: BlockEvent) -> BlockState | None:
    """Returns the next state. None if the event is late or repeated, and changes nothing."""
    found = WORKFLOW.get((state, event))
    return found[1] if found is not None else None


class KvBackend(enum.StrEnum):
    """Transport of the KV bytes of a pull."""

    ENGINE = "engine"
    SHARED = "shared"
    NIXL = "nixl"


class Wanted(Message, frozen=True):
    """One device that receives KV. It is described by its number, the index of its process, and the
    index of the shard of kv heads that it holds (of `PullRequest.head_shards` shards)."""

    device: int
    process: int
    head_shard: int


class PostedPiece(Message, frozen=True):
    """One piece of a KV block, sent by device `source` to the receiver's device `destination`.
    `part` is its index among the pieces between these two devices."""

    source: int
    destination: int
    part: int


class PullRequest(Message, frozen=True):
    """Request of one receiver process to one sender process for the KV of one offered block.

    Attributes:
        sender_boot_id: Boot id of the sender process. A restarted sender has another boot id and
            refuses the request.
        link: Number of the receiver's connection to this sender process. A higher number replaces a
            lower one.
        transports: Number of data-plane connections. Both sides must be configured with the same
            number.
        codec: Name of the compression of the pieces (transfer/codec.py).
        dtype, components, granule, tokens, head_size: Data type and sizes of an uncompressed piece,
            which has the shape `[1, components, granule, tokens, head_size]`. `granule` is a number
            of kv heads.
        head_shards: Number of shards into which the receiver divides the kv heads.
        wanted: Devices of the receiving dp rank, in all receiver processes. Every sender process
            computes the same reshard plan from this list.
        process: Index of the requesting process. The sender serves only the devices of this
            process.
        turn: Index of the sender's preferred replica. Different values spread the load over the
            replicas.
    """

    pull_id: int
    offer_id: int
    sender_boot_id: int
    link: int
    transports: int
    deadline_seconds: float
    codec: str
    dtype: str
    components: int
    granule: int
    tokens: int
    head_size: int
    head_shards: int
    wanted: tuple[Wanted, ...]
    process: int
    turn: int
    backend: KvBackend = KvBackend.ENGINE


class InMemory(Message, frozen=True):
    """Location of pieces in a region of the sender's shared memory. The pieces are complete once
    the region's first byte is set.

    Attributes:
        descriptor, inode: File descriptor in the sender process, and inode, of the region.
        offsets: Byte offset of each array in the region.
    """

    descriptor: int
    inode: int
    offsets: tuple[int, ...]


class InRegistered(Message, frozen=True):
    """Location of pieces in a memory region that the sender registered with NIXL.

    Attributes:
        offsets: Byte offset of each array in the region.
    """

    metadata: bytes
    address: int
    size: int
    offsets: tuple[int, ...]


KvMemory = InMemory | InRegistered


class Posted(Message, frozen=True):
    """Reply to `PullRequest`: the pieces are ready under the id `pull_id`, in the order of
    `pieces`. Each piece is sent as the arrays that the codec packs it into.

    Attributes:
        address: Address (host:port) of the sender's transfer server. Meaningless if `pieces` is
            empty.
        heads: Number of kv heads of the whole block.
        pieces: Pieces to pull. Empty if the sender holds nothing for the receiver.
        memory: Location of the pieces. None if JAX's transfer engine sends them.
    """

    pull_id: int
    link: int
    address: str
    heads: int
    pieces: tuple[PostedPiece, ...]
    memory: KvMemory | None = None


class Refused(Message, frozen=True):
    """The pull has failed. `error` is the name of a type in jdisagg/errors.py."""

    pull_id: int
    error: str
    message: str


class Pulled(Message, frozen=True):
    """Reports that all pieces of pull `pull_id` have arrived. The sender may then reuse their
    memory."""

    pull_id: int


class Withdraw(Message, frozen=True):
    """Reports that the receiver gave up the pull."""

    pull_id: int


class Leave(Message, frozen=True):
    """Reports that the receiver closes all its connections up to and including number `link`."""

    link: int


KvMessage = PullRequest | Posted | Refused | Pulled | Withdraw | Leave


class KvEnvelope(Message, frozen=True):
    """Ordered messages from one process to another. The receiver is identified by its boot id."""

    sender: KvEnd
    receiver_boot_id: int
    messages: tuple[KvMessage, ...]


class KvPlanePort(Protocol):
    async def send(self, envelope: KvEnvelope) -> None:
        """Delivers the messages of an envelope. Raises InvalidRequestError if the envelope is for
        an earlier run (another boot id) of this process."""
        ...


class KvLink(Protocol):
    """Sends messages to other processes for the channel of the process `sender` (`KvReceiver`),
    which is the `KvEnd` in the cards that this process publishes. Only the process run (boot id)
    that a message is addressed to receives it. Messages between two processes should keep their
    order."""

    def send(self, end: KvEnd, message: KvMessage) -> None:
        """Queues a message for the process `end`. The message may be lost. Never blocks, never
        raises. Thread-safe."""
        ...


class KvReceiver(Protocol):
    def handle(self, sender: KvEnd, message: KvMessage) -> None:
        """Processes a message from the process `sender`. Never blocks, never raises.
        Thread-safe."""
        ...
