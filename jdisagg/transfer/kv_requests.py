"""Data classes of the receiving half of a channel: its sender processes, its pulls, and the
requests of each pull.

This module sends and pulls nothing. `KvPuller` holds these records and documents which thread may
use each."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from jdisagg.errors import LayoutError
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import BlockEvent, BlockState, PostedPiece, PullRequest, after
from jdisagg.transfer.assembly import Assembly
from jdisagg.transfer.backend import Inlet, Leaf
from jdisagg.transfer.channel import PullTarget
from jdisagg.transfer.pieces import plan_ahead
from jdisagg.transfer.polled_pull import PolledPull, is_ready
from jdisagg.transfer.transfer_engine import ID_BITS


@dataclass(slots=True)
class PeerState:
    """State of the connection to one sender process.

    Attributes:
        link: Number of the current connection to the process. Each new connection has a higher
            number.
        address: Address of the process's transfer server. "" until the process has reported it.
    """

    end: KvEnd
    link: int
    inlet: Inlet
    address: str = ""
    used: float = 0.0


@dataclass(slots=True, eq=False)
class SentRequest:
    """The request of one pull to one sender process.

    Attributes:
        arrays: One object to poll for each requested array. None until the transfer has started.
        unread: Reason why the sender's memory could not be read. "" otherwise.
    """

    peer: PeerState
    transfer: "Transfer"
    request: PullRequest
    sent_at: float = 0.0
    state: BlockState = BlockState.ASKED
    arrays: Sequence[jax.Array | Leaf] | None = None
    address: str = ""
    unread: str = ""

    @property
    def ahead(self) -> tuple[PostedPiece, ...]:
        """Pieces that are pulled before the sender answers."""
        return self.request.pieces

    def advance(self, event: BlockEvent) -> bool:
        """Returns whether the event changes the state."""
        state = after(self.state, event)
        if state is not None:
            self.state = state
        return state is not None

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
    peer: PeerState,
    assembly: Assembly,
    offer_id: int,
    target: PullTarget,
    transports: int,
    turn: int,
    ahead: tuple[PostedPiece, ...] = (),
) -> PullRequest:
    """Returns the request to one sender process, with a new id and without a deadline."""
    zeros = target.zeros
    _, components, heads, tokens, head_size = zeros.shape
    return PullRequest(
        pull_id=secrets.randbits(ID_BITS),
        offer_id=offer_id,
        sender_boot_id=peer.end.boot_id,
        link=peer.link,
        transports=transports,
        deadline_seconds=0.0,
        codec=target.codec,
        dtype=str(zeros.dtype),
        components=components,
        granule=target.granule,
        tokens=tokens,
        head_size=head_size,
        head_shards=heads // target.granule,
        wanted=assembly.wanted,
        process=jax.process_index(),
        turn=turn,
        address=peer.address if ahead else "",
        pieces=ahead,
        backend=peer.inlet.backend,
    )
