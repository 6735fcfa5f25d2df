"""Control messages by which two processes agree on a KV transfer. A `KvLink` carries them. Does not
import JAX.

Before the first pull of receiver process R from sender process S:

- R -> S Open: R announces that it will pull from S.
- S -> R  Opened: the address to pull from.

One pull of R from each sender process S of the peer's instance:

- R -> S PullRequest: the KV that R needs for its own devices. A new random id identifies the pull,
  also on the data plane.
- S -> R Posted: the location of the bytes (an empty list of pieces if S has none for R), or
- S -> R Refused: the reason. S also sends Refused after Posted if it revokes the offered KV.
- R -> S Pulled: everything arrived, and S frees the posted pieces, or
- R -> S Withdraw: R gave up the pull, and S withdraws the posted pieces.
- R -> S Leave: R makes no more pulls, and S frees its state for R.

A pull ahead saves one round trip: if R already has the address and the list of pieces, it sends its
request and starts the data-plane pull at the same time. S then posts the pieces and sends no reply.
If S refuses or receives Withdraw, it posts an error under the pull's id, because R's pull would
otherwise wait in the transfer engine forever.

This is the exchange for JAX's transfer engine. Other backends use the same messages. With shared
memory, S replies at once and sets the region's first byte when all bytes are written; R sends
Pulled after its last read. With NIXL, R reads the bytes that S wrote into registered memory.

Any message may be lost, late or duplicated. Ids are therefore used once, and every wait has a
deadline. A device number is the number that JAX gives the device in the process that owns it."""

import enum
from typing import Protocol

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.plain import Message


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


class Open(Message, frozen=True):
    """Opens a connection from the receiver to the sender process with boot id `sender_boot_id`.
    `link` is the connection's number. The data plane uses `transports` parallel connections."""

    sender_boot_id: int
    link: int
    transports: int


class Opened(Message, frozen=True):
    """Reply to `Open`. The sender's transfer server for connection number `link` listens at
    `address` (host:port)."""

    link: int
    address: str


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
        address: Address of the transfer server from which a pull ahead has started. Empty for other
            pulls.
        pieces: Pieces of a pull ahead, in the order in which the receiver pulls them. Empty for
            other pulls.
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
    address: str = ""
    pieces: tuple[PostedPiece, ...] = ()
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
    """Reports that the receiver gave up the pull. `ahead` means that the pull already waits in the
    transfer engine. Such a wait ends only when the sender posts data or an error."""

    pull_id: int
    ahead: bool = False


class Leave(Message, frozen=True):
    """Reports that the receiver closes all its connections up to and including number `link`."""

    link: int


KvMessage = Open | Opened | PullRequest | Posted | Refused | Pulled | Withdraw | Leave


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
