"""Data classes of the receiving half of a channel: its sender processes, its pulls, and the
requests of each pull.

This module sends and pulls nothing. `KvPuller` holds these records and documents which thread may
use each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from jdisagg.errors import LayoutError
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import PostedPiece, PullRequest
from jdisagg.transfer.assembly import Assembly
from jdisagg.transfer.backend import Inlet, Leaf
from jdisagg.transfer.channel import PullTarget
from jdisagg.transfer.pieces import plan_ahead
from jdisagg.transfer.polled_pull import PolledPull, is_ready


@dataclass(slots=True)
class PeerState:
    """State of the connection to one sender process.

    Attributes:
        link: Number of the current connection to the process. Each new connection has a higher
            number.
        address: Address of the process's transfer server. "" until the process has reported it.
        moved: Time when data last arrived from the process.
        suspected: Time of the last error that the connection may have caused.
        received: Bytes that have arrived from the process's host, when last counted.
        counted, flowed: Time when received bytes were last counted, and time of the last count that
            found new bytes.
    """

    end: KvEnd
    link: int
    inlet: Inlet
    address: str = ""
    used: float = 0.0
    moved: float = 0.0
    suspected: float = -math.inf
    received: int = 0
    counted: float = -math.inf
    flowed: float = -math.inf


@dataclass(slots=True, eq=False)
class SentRequest:
    """The request of one pull to one sender process.

    Attributes:
        arrays: One object to poll for each requested array. None until the transfer has started.
        unread: Reason why the sender's memory could not be read. "" otherwise.
        ahead: Pieces that are pulled before the sender answers.
    """

    pull_id: int
    peer: PeerState
    transfer: "Transfer"
    sent_at: float
    request: PullRequest | None = None
    arrays: Sequence[jax.Array | Leaf] | None = None
    address: str = ""
    refused: bool = False
    unread: str = ""
    ahead: tuple[PostedPiece, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.arrays is not None and all(map(is_ready, self.arrays))


@dataclass(slots=True, eq=False)
class Transfer:
    """`patience_seconds`: seconds without arriving bytes after which the pull fails. `until`: time
    at which the pull fails in any case."""

    pull: PolledPull
    source: str
    assembly: Assembly
    patience_seconds: float
    until: float
    requests: list[SentRequest] = field(default_factory=list)


def pieces_by_sender(
    card: MeshCard, target: PullTarget, assembly: Assembly, turn: int
) -> dict[int, tuple[PostedPiece, ...]] | None:
    """Returns the pieces by the index, in `card.ends`, of the sender process that holds them.
    Returns None if the layouts of the two meshes do not match."""
    _, components, _, tokens, head_size = target.zeros.shape
    shape = (1, components, target.heads, tokens, head_size)
    try:
        plan = plan_ahead(card, target.source_rank, shape, assembly.wanted, target.granule, turn)
    except LayoutError:
        return None  # the sender's refusal will report why
    process, found = jax.process_index(), {}
    holder = dict(zip(card.devices, card.processes, strict=True))
    for piece in plan:
        want = assembly.wanted[piece.receiver]
        if want.process == process:
            found.setdefault(holder[piece.source], []).append(
                PostedPiece(piece.source, want.device, piece.part)
            )
    return {place: tuple(pieces) for place, pieces in found.items()}


def request_of(
    sent: SentRequest,
    offer_id: int,
    target: PullTarget,
    deadline_seconds: float,
    transports: int,
    turn: int,
) -> PullRequest:
    zeros = target.zeros
    _, components, heads, tokens, head_size = zeros.shape
    return PullRequest(
        pull_id=sent.pull_id,
        offer_id=offer_id,
        sender_boot_id=sent.peer.end.boot_id,
        link=sent.peer.link,
        transports=transports,
        deadline_seconds=deadline_seconds,
        codec=target.codec,
        dtype=str(zeros.dtype),
        components=components,
        granule=target.granule,
        tokens=tokens,
        head_size=head_size,
        head_shards=heads // target.granule,
        wanted=sent.transfer.assembly.wanted,
        process=jax.process_index(),
        turn=turn,
        address=sent.peer.address if sent.ahead else "",
        pieces=sent.ahead,
        backend=sent.peer.inlet.backend,
    )
