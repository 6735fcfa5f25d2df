"""What the two ends of a transfer channel say to each other about bytes: plain data, JAX-free,
carried by a `KvLink`.

When R is introduced to S:
    R -> S  Open          R will pull
    S -> R  Opened        where from
One pull, receiver process R and each sender process S of the peer's instance:
    R -> S  PullRequest   what R wants for its own devices, under a fresh random id, which names it
                          on the data plane, too
    S -> R  Posted        where the bytes wait (perhaps none: S holds nothing for R), or
    S -> R  Refused       why not; also later, when the offer is revoked
    R -> S  Pulled        all has arrived; S forgets the posting, or
    R -> S  Withdraw      R gave up; S takes back what it posted under the id
    R -> S  Leave         R will pull nothing more; S closes what it kept for R
A pull ahead: R, who knows where from and which pieces, pulls on the data plane as it asks, before
anything is posted, perhaps before the offer is made. S then posts without a word; where it refuses,
or is told to withdraw, it posts an error under the id, so that nothing stays parked in the engine.
By shared memory, where R can map S's: R says so in its request, S answers once the bytes are
written there, and R says Pulled once it needs them no more. Over NIXL, where both have it:
likewise; R reads what S wrote, and says Pulled when it has. From device to device on one host,
where both lend memory of theirs: likewise; R copies what S has computed, which S only keeps.
Any message may be lost, late or doubled: ids are used once and deadlines decide. Devices are
numbers of the side that names them."""

from typing import Protocol

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.plain import Message


class Wanted(Message, frozen=True):
    """One device of the receiving dp rank: the process it belongs to and its head shard (0 ..
    PullRequest.head_shards - 1)."""

    device: int
    process: int
    head_shard: int


class PostedPiece(Message, frozen=True):
    """One piece: from `source` (a device of the sender) to `destination` (a device of the
    receiver), its `part`-th granule."""

    source: int
    destination: int
    part: int


class Open(Message, frozen=True):
    """The receiver's connection number `link` to the sender of this boot is about to be used, with
    so many transports."""

    sender_boot_id: int
    link: int
    transports: int


class Opened(Message, frozen=True):
    """What is posted for connection number `link` is posted on the transfer server at `address`."""

    link: int
    address: str


class PullRequest(Message, frozen=True):
    """What one receiver process asks of one sender process.

    pull_id: random 64 bits, used once. sender_boot_id: whom it is meant for; another boot refuses.
    link: counts the connections that
        the receiver has made to this sender process; a higher number replaces the lower one.
    transports: connections of the data plane, which must be equal on both sides. deadline_seconds:
    what remains of the pull's. codec: how it travels. dtype, components, granule, tokens,
    head_size: of a piece [1, C, G, T, H] before the codec. head_shards: over how many shards the
    receiver splits its heads. wanted: all devices of the receiving rank, in all processes, from
        which every sender process makes the same plan. process: the receiver's own among them; only
        its devices are served.
    turn: which replica of the sender begins. address: of a pull ahead, the transfer server from
    which `pieces`, in this order, are being pulled already; "" and () otherwise. shared: the
    receiver maps the sender's shared memory, and wants them there. nixl: it reads the sender's
    registered memory, and wants them there. device: it copies from the sender's devices, where
    they are to stay."""

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
    shared: bool = False
    nixl: bool = False
    device: bool = False


class InMemory(Message, frozen=True):
    """Where pieces lie in the sender's shared memory, or will lie once its first byte says so: the
    descriptor and inode of their region, and at which byte each leaf begins."""

    descriptor: int
    inode: int
    offsets: tuple[int, ...]


class InRegistered(Message, frozen=True):
    """Where pieces lie in memory that the sender has registered with NIXL: what its agent says of
    the region, the region's address, how many bytes of it are theirs, and at which byte each leaf
    begins."""

    metadata: bytes
    address: int
    size: int
    offsets: tuple[int, ...]


class LentAllocation(Message, frozen=True):
    """Memory of a device that other processes of the host can open by its handle: its bytes, and a
    number that no other of the sender has."""

    handle: bytes
    number: int
    size: int


class OnDevice(Message, frozen=True):
    """Where pieces lie on the sender's devices: the allocations, and for each leaf the place of its
    own among them and at which of its bytes it begins."""

    allocations: tuple[LentAllocation, ...]
    places: tuple[int, ...]
    offsets: tuple[int, ...]


class Posted(Message, frozen=True):
    """The pieces wait under uuid `pull_id` on the transfer server at `address` (host:port), in this
    order, each as its codec's leaves.

    heads: kv heads of the whole block. pieces: may be empty, then nothing waits and `address` says
    nothing. memory: where they lie instead, if shared or registered memory or the devices' own was
    asked for."""

    pull_id: int
    link: int
    address: str
    heads: int
    pieces: tuple[PostedPiece, ...]
    memory: InMemory | InRegistered | OnDevice | None = None


class Refused(Message, frozen=True):
    """The pull has failed. `error`: name of a type in jdisagg/errors.py."""

    pull_id: int
    error: str
    message: str


class Pulled(Message, frozen=True):
    """All that this sender process posted under the id has arrived; what lay in shared or
    registered memory or on its devices is not needed any more."""

    pull_id: int


class Withdraw(Message, frozen=True):
    """The receiver gave the pull up. `ahead`: it was pulled ahead, and its request waits in the
    engine."""

    pull_id: int
    ahead: bool = False


class Leave(Message, frozen=True):
    """The receiver closes its connection number `link` and all before."""

    link: int


KvMessage = Open | Opened | PullRequest | Posted | Refused | Pulled | Withdraw | Leave


class KvEnvelope(Message, frozen=True):
    """Messages from one process of an instance to one boot of another, in order."""

    sender: KvEnd
    receiver_boot_id: int
    messages: tuple[KvMessage, ...]


class KvPlanePort(Protocol):
    async def send(self, envelope: KvEnvelope) -> None:
        """Raises InvalidRequestError where the envelope is for another boot of this process."""
        ...
