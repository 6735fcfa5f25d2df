"""Control messages between the two ends of a transfer channel: plain data, JAX-free, carried by a
`KvLink`.

Before the first pull of receiver process R from sender process S:

- R -> S  Open: R will pull.
- S -> R  Opened: the address to pull from.

One pull of R from each sender process S of the peer's instance:

- R -> S  PullRequest: the KV that R needs for its own devices, under a fresh random id that also
  names it on the data plane.
- S -> R  Posted: where the bytes wait (none if S holds nothing for R), or
- S -> R  Refused: the reason. Also sent later, when the offer is revoked.
- R -> S  Pulled: everything arrived and S forgets the posting, or
- R -> S  Withdraw: R gave up and S takes back its posting under the id.
- R -> S  Leave: R will pull nothing more and S closes its state for R.

Pull ahead: if R knows the address and the pieces, it pulls on the data plane together with its
request, before the posting and perhaps before the offer. S then posts without a reply. If S refuses
or receives a withdrawal, it posts an error under the id, so that nothing stays parked in the
engine.

Other backends follow the same exchange. With shared memory, S answers at once, the region's first
byte reports when the bytes are written, and R sends Pulled once it needs them no more. With NIXL, R
reads what S wrote into registered memory. With CUDA IPC on one host, R copies the arrays that S
computed and holds.

Any message may be lost, late or doubled: ids are used once and deadlines decide. Device numbers
belong to the side that names them."""

import enum
from typing import Protocol

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.plain import Message


class KvBackend(enum.StrEnum):
    """What moves the bytes of a pull."""

    ENGINE = "engine"
    SHARED = "shared"
    NIXL = "nixl"
    CUDA = "cuda"


class Wanted(Message, frozen=True):
    """One device of the receiving dp rank, with its process and its head shard (0 ..
    PullRequest.head_shards - 1)."""

    device: int
    process: int
    head_shard: int


class PostedPiece(Message, frozen=True):
    """Granule `part` of the pieces from sender device `source` to receiver device `destination`."""

    source: int
    destination: int
    part: int


class Open(Message, frozen=True):
    """The receiver will use its connection `link` to this boot of the sender, with `transports`
    parallel connections."""

    sender_boot_id: int
    link: int
    transports: int


class Opened(Message, frozen=True):
    """Postings for connection `link` are on the transfer server at `address`."""

    link: int
    address: str


class PullRequest(Message, frozen=True):
    """Request of one receiver process to one sender process.

    Attributes:
        pull_id: Random 64 bits, used once.
        sender_boot_id: Intended boot of the sender. Any other refuses.
        link: Number of the receiver's connection to this sender process. A higher number replaces a
            lower one.
        transports: Connections of the data plane, equal on both sides.
        deadline_seconds: Remaining time of the pull.
        codec: Codec of the pieces.
        dtype, components, granule, tokens, head_size: Type and sizes of a piece [1, C, G, T, H]
            before the codec.
        head_shards: Shards of the receiver's heads.
        wanted: Devices of the receiving rank in all processes, from which every sender process
            computes the same plan.
        process: The receiver's own process. Only its devices are served.
        turn: Index of the sender's replica to use first.
        address: Transfer server of a pull ahead, else empty.
        pieces: Pieces of a pull ahead, in the order in which they are pulled.
        backend: What moves the bytes.
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
    """The pieces wait under uuid `pull_id` in this order, each as its codec's leaves.

    Attributes:
        address: Transfer server (host:port), meaningless if `pieces` is empty.
        heads: kv heads of the whole block.
        pieces: Posted pieces. Empty if nothing waits.
        memory: Location of the pieces unless the backend is the engine.
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
    """Everything that this sender process posted under the id has arrived. Its memory may be
    reused."""

    pull_id: int


class Withdraw(Message, frozen=True):
    """The receiver gave up the pull. `ahead` means that its request already waits in the engine."""

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
