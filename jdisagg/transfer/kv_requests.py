"""One pull as the receiver keeps it: what it asked of each process of its sender, over which
connection, and for which pieces.

Records, and how requests are made of a target; nothing is sent or pulled here. Whoever keeps them
says which thread may touch what."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from jdisagg.errors import LayoutError
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import PostedPiece, PullRequest
from jdisagg.transfer.assembly import Assembly
from jdisagg.transfer.channel import PullTarget
from jdisagg.transfer.device_memory import DeviceSender
from jdisagg.transfer.nixl_memory import NixlSender
from jdisagg.transfer.pieces import plan_ahead
from jdisagg.transfer.polled_pull import PolledPull
from jdisagg.transfer.shared_memory import Leaf, SenderMemory
from jdisagg.transfer.transfer_engine import Inlet


@dataclass(slots=True)
class SenderConnection:
    """To one sender process. `number` grows with each new one. `address`: of the sender's outlet,
    once it has said so; `used`: when something was last asked there. `moved`: when something last
    arrived. `memory`: its shared memory, where that can be mapped, or its registered memory, where
    both sides have NIXL, or its devices', where it lends them; nothing goes through the engine
    then."""

    end: KvEnd
    number: int
    inlet: Inlet | None = None
    address: str = ""
    used: float = 0.0
    moved: float = 0.0
    memory: SenderMemory | NixlSender | DeviceSender | None = None


@dataclass(slots=True, eq=False)
class SentRequest:
    """What one sender process was asked for one pull, and when last. `arrays` once they are on
    their way from its outlet at `address`, or have a place in its memory."""

    pull_id: int
    connection: SenderConnection
    transfer: "Transfer"
    sent_at: float
    request: PullRequest | None = None
    arrays: Sequence[jax.Array | Leaf] | None = None
    address: str = ""
    refused: bool = False
    unread: str = ""
    ahead: tuple[PostedPiece, ...] = ()


@dataclass(slots=True, eq=False)
class Transfer:
    pull: PolledPull
    peer: str
    assembly: Assembly
    requests: list[SentRequest] = field(default_factory=list)


def pieces_by_sender(
    card: MeshCard, target: PullTarget, assembly: Assembly, turn: int
) -> dict[int, tuple[PostedPiece, ...]] | None:
    """What comes to this process's devices, by the place in `card.ends` of the process that sends
    it; None where the two do not fit."""
    _, components, _, tokens, head_size = target.zeros.shape
    shape = (1, components, target.heads, tokens, head_size)
    try:
        plan = plan_ahead(card, target.source_rank, shape, assembly.wanted, target.granule, turn)
    except LayoutError:
        return None  # the sender's refusal will say in what
    process, found = jax.process_index(), {}
    holder = dict(zip(card.devices, card.processes, strict=True))
    for piece in plan:
        want = assembly.wanted[piece.place]
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
    """What the sender is told."""
    zeros = target.zeros
    _, components, heads, tokens, head_size = zeros.shape
    return PullRequest(
        pull_id=sent.pull_id,
        offer_id=offer_id,
        sender_boot_id=sent.connection.end.boot_id,
        link=sent.connection.number,
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
        address=sent.connection.address if sent.ahead else "",
        pieces=sent.ahead,
        shared=isinstance(sent.connection.memory, SenderMemory),
        nixl=isinstance(sent.connection.memory, NixlSender),
        device=isinstance(sent.connection.memory, DeviceSender),
    )
