"""Control messages between the two ends of a transfer channel: plain data, JAX-free, carried by a
`KvLink`.

Before the first pull of receiver process R from sender process S:

- R -> S Open: R announces its pulls.
- S -> R  Opened: the address to pull from.

One pull of R from each sender process S of the peer's instance:

- R -> S PullRequest: the KV that R needs for its own devices, under a new random id, which the data
  plane uses as well.
- S -> R Posted: location of the bytes (no pieces if S holds nothing for R), or
- S -> R  Refused: the reason. Also sent later, when the offer is revoked.
- R -> S Pulled: everything arrived, and S frees the posting, or
- R -> S Withdraw: R gave up the pull, and S withdraws its posting.
- R -> S Leave: R makes no more pulls, and S frees its state for R.

Pull ahead: if R already has the address and the list of pieces, it starts the data-plane pull
together with its request, before the posting and perhaps before the offer. S then posts without a
reply. If S refuses or receives a withdrawal, it posts an error under the id, so that R's pull does
not wait in the engine forever.

Other backends follow the same exchange. With shared memory, S replies at once and sets the region's
first byte when all bytes are written; R sends Pulled after its last read. With NIXL, R reads the
bytes that S wrote into registered memory. With CUDA IPC on one host, R copies directly from S's
arrays.

Any message may be lost, late or duplicated. Ids are therefore used once, and every wait has a
deadline. Device numbers are those of the side that owns the device."""

import enum
from typing import Protocol

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.plain import Message


class KvBackend(enum.StrEnum):
    """Transport of a pull's bytes."""

    ENGINE = "engine"
    SHARED = "shared"
    NIXL = "nixl"
    CUDA = "cuda"


class Wanted(Message, frozen=True):
    """One device of the receiving dp rank, with its process and its index among the
    `PullRequest.head_shards` head shards."""

    device: int
    process: int
    head_shard: int


class PostedPiece(Message, frozen=True):
    """Piece number `part` of those from sender device `source` to receiver device `destination`."""

    source: int
    destination: int
    part: int


class Open(Message, frozen=True):
    """Opens the receiver's connection `link` to this boot of the sender. The data plane uses
    `transports` parallel connections."""

    sender_boot_id: int
    link: int
    transports: int


class Opened(Message, frozen=True):
    """Reply to `Open`: the transfer server at `address` serves connection `link`."""

    link: int
    address: str


class PullRequest(Message, frozen=True):
    """Request of one receiver process to one sender process.

    Attributes:
        pull_id: Random 64 bits, used once.
        sender_boot_id: Boot of the sender that should serve the request. Any other boot refuses.
        link: Number of the receiver's connection to this sender process. A higher number replaces a
            lower one.
        transports: Connections of the data plane, equal on both sides.
        deadline_seconds: Remaining time of the pull.
        codec: Codec of the pieces.
        dtype, components, granule, tokens, head_size: Type and sizes of a piece [1, C, G, T, H]
            before the codec.
        head_shards: Shards of the receiver's heads.
        wanted: Devices of the receiving rank in all processes. Every sender process computes the
            same reshard plan from them.
        process: The receiver's own process. Only the devices of this process are served.
        turn: Index of the sender's preferred replica.
        address: Transfer server of a pull ahead. Empty for other pulls.
        pieces: Pieces of a pull ahead, in the order in which they are pulled.
        backend: Transport of the bytes.
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
    """Pieces in the sender's shared memory, complete once the region's first byte is set:
    descriptor and inode of the region, and the byte offset of each leaf."""

    descriptor: int
    inode: int
    offsets: tuple[int, ...]


class InRegistered(Message, frozen=True):
    """Pieces in memory that the sender registered with NIXL: its agent's metadata, the region's
    address, the bytes in use, and the byte offset of each leaf."""

    metadata: bytes
    address: int
    size: int
    offsets: tuple[int, ...]


class LentAllocation(Message, frozen=True):
    """Device memory that other processes of the host can open by its CUDA IPC handle: its size in
    bytes, and a number unique at the sender."""

    handle: bytes
    number: int
    size: int


class OnDevice(Message, frozen=True):
    """Pieces on the sender's devices: the allocations, and for each leaf the index of its
    allocation and its byte offset in it."""

    allocations: tuple[LentAllocation, ...]
    places: tuple[int, ...]
    offsets: tuple[int, ...]


KvMemory = InMemory | InRegistered | OnDevice


class Posted(Message, frozen=True):
    """Reply to `PullRequest`: the pieces are ready under uuid `pull_id`, in this order. Each piece
    is sent as the arrays of its codec.

    Attributes:
        address: Transfer server (host:port), meaningless if `pieces` is empty.
        heads: kv heads of the whole block.
        pieces: Posted pieces. Empty if the sender holds nothing for the receiver.
        memory: Location of the pieces. None for the transfer engine.
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
    """Reports that all pieces of this sender process have arrived, so that it may reuse their
    memory."""

    pull_id: int


class Withdraw(Message, frozen=True):
    """The receiver gave up the pull. `ahead` means that it already waits in the transfer engine."""

    pull_id: int
    ahead: bool = False


class Leave(Message, frozen=True):
    """The receiver closes its connection `link` and all earlier ones."""

    link: int


KvMessage = Open | Opened | PullRequest | Posted | Refused | Pulled | Withdraw | Leave


class KvEnvelope(Message, frozen=True):
    """Messages from one process of an instance to one boot of another, in order."""

    sender: KvEnd
    receiver_boot_id: int
    messages: tuple[KvMessage, ...]


class KvPlanePort(Protocol):
    async def send(self, envelope: KvEnvelope) -> None:
        """Raises InvalidRequestError if the envelope is for another boot of this process."""
        ...
